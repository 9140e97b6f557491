"""The moments of AdamW8bit: codes of 8 bits and scales, two bytes a parameter instead of eight.

A group of 32 elements, in the order of memory, has a code of 8 bits for each moment of each element, and two scales.
The first moment m is kept as `round(127 sqrt(|m| / s))` with the sign of m, where s is the largest |m| of the group,
raised to the next bf16 value: codes are dense near zero. Of the second moment the root r is kept, as
`round(255.5 r / t - 0.5)`, where t is the largest root, in fp32: bf16 has 8 bits, and a scale that falls by 0.05 % a
step would never fall. Code k stands for `(k + 0.5) t / 255.5`: updates divide by the root, so none is zero but with its
whole group. First moments of a group that are all below 2^-126 count as zero; a moment that isn't finite makes its
group NaN.

Source: codes of 8 bits with a scale for 32 elements, and the root of the second moment, as in FlashOptim
(arXiv:2602.23349), which has scales of fp16 and another curve for the first moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatrain.errors import OptimizerError
from megatrain.optim.masters.halves import CHUNK

GROUP = 32
"""Elements that share two scales."""
EXACT = ("exp_avg", "exp_avg_sq")
CODES = {"exp_avg_codes": torch.int8, "exp_avg_sq_codes": torch.uint8}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = {"exp_avg_scales": torch.bfloat16, "exp_avg_sq_scales": torch.float32}
_PER_SQUARE, _PER_ROOT = float.fromhex("0x1.040c2p-14"), float.fromhex("0x1.00804p-8")  # 1 / 127^2, 1 / 255.5
_LEAST, _INFINITE, _NAN = 0x00800000, 0x7F800000, 0x7FC00000  # bits of 2^-126, of infinity, of a quiet NaN
Moments = tuple[torch.Tensor, torch.Tensor]
Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes of the first and of the second moment, and the scales of both."""


def decoded(coded: Coded) -> Moments:
    """Returns the fp32 moments of flat codes; a scale that is infinite or no number makes its whole group NaN."""
    mean, root = _decoded(coded)
    return mean, root.square_()


def _decoded(coded: Coded) -> Moments:
    """The first moment, and the root of the second."""
    codes, square, mean_scales, root_scales = coded
    size = codes.numel()
    code = codes.float()
    mean = (code * code.abs()).mul_(_spread(mean_scales.float().mul_(_PER_SQUARE), size))
    return mean, square.float().add_(0.5).mul_(_spread(root_scales * _PER_ROOT, size))


def encoded(moments: Moments) -> Coded:
    """Returns the codes and scales of flat fp32 moments."""
    return _encoded(moments[0], _root(moments[1]))


def _encoded(mean: torch.Tensor, root: torch.Tensor) -> Coded:
    bits = _largest(mean)
    raised = torch.where(bits < _LEAST, 0, (bits.clamp(max=_INFINITE) + 0xFFFF).bitwise_and_(-0x10000))
    scales = torch.where(bits > _INFINITE, _NAN, raised).view(torch.float32)
    root_scales = _largest(root).view(torch.float32)
    per_mean, per_root = _spread(_inverse(scales), mean.numel()), _spread(_inverse(root_scales) * 255.5, root.numel())
    first = torch.where(per_mean > 0, mean, 0.0)
    first = _root(first.abs() * per_mean).mul_(127.0).copysign_(first).round_()
    second = (torch.where(per_root > 0, root, 0.0) * per_root).sub_(0.5).round_()
    return first.to(torch.int8), second.to(torch.uint8), scales.to(torch.bfloat16), root_scales


def _root(values: torch.Tensor) -> torch.Tensor:
    """Rounded correctly, which the fp32 `sqrt` of large tensors isn't."""
    return values.double().sqrt_().float()


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The bits of the largest magnitude of each group; what isn't a number is larger than what is infinite."""
    groups = -(-values.numel() // GROUP)
    padded = torch.nn.functional.pad(values, (0, groups * GROUP - values.numel()))
    return padded.view(torch.int32).bitwise_and(0x7FFFFFFF).view(groups, GROUP).amax(1)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where((scales > 0) & scales.isfinite(), 1.0 / scales, 0.0)


def _spread(scales: torch.Tensor, size: int) -> torch.Tensor:
    return scales.repeat_interleave(GROUP)[:size]


def update_(values: torch.Tensor, gradient: torch.Tensor, coded: Coded, scalars: Sequence[float]) -> None:
    """Updates flat fp32 values and their codes in place, in operations that are rounded one by one.

    The bits are those of `adamw_8bit.c`. Works on pieces, so that the moments are never whole in memory.

    Args:
        values: Contiguous; written.
        gradient: Like the values, fp32; not written.
        coded: Views of the state of these elements, which begin with a group; written.
        scalars: The numbers of `adamw.scalars_of`.
    """
    scale, decay, weight, beta2, rest2, correction, eps, size = torch.tensor(scalars, dtype=torch.float32)
    by_eps, by_size = (eps * correction).item(), (size * correction).item()
    piece = CHUNK * torch.get_num_threads()
    for start in range(0, values.numel(), piece):
        own, groups = slice(start, start + piece), slice(start // GROUP, -(-(start + piece) // GROUP))
        part = coded[0][own], coded[1][own], coded[2][groups], coded[3][groups]
        mean, root = _decoded(part)
        g = gradient[own] * scale.item()
        values[own].mul_(decay.item())
        mean = mean + (g - mean).mul_(weight.item())
        second = root.square_().mul_(beta2.item()) + g.square_().mul_(rest2.item())
        root = _root(second)
        values[own] += (mean * by_size).div_(root + by_eps)
        for old, new in zip(part, _encoded(mean, root), strict=True):
            old.copy_(new)


def exact_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state as `torch.optim.AdamW` has it: fp32 moments in place of codes and scales."""
    if "exp_avg_codes" not in state:
        return dict(state)
    moments = decoded(coded_state(state))
    shape = state["exp_avg_codes"].shape
    kept = {name: value for name, value in state.items() if name not in CODES | SCALES}
    return kept | {name: moment.view(shape) for name, moment in zip(EXACT, moments, strict=True)}


def coded_from(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Returns a parameter's state in codes: the same in the right dtypes, or exact moments encoded.

    Raises:
        OptimizerError: If the state has neither.
    """
    device = parameter.device
    kept = {name: value for name, value in state.items() if name not in (*EXACT, *CODES, *SCALES)}
    if all(name in state for name in EXACT):
        check_parameter(parameter)
        moments: Any = tuple(state[name].to(device, torch.float32).reshape(-1) for name in EXACT)
        found = dict(zip((*CODES, *SCALES), encoded(moments), strict=True))
        return kept | {name: value.view(parameter.shape) if name in CODES else value for name, value in found.items()}
    dtypes = CODES | SCALES
    missing = [name for name in dtypes if name not in state]
    if missing:
        raise OptimizerError(
            f"the state of a {tuple(parameter.shape)} parameter has no `{missing[0]}`.\n"
            "  AdamW8bit loads its own state or that of torch.optim.AdamW: codes and scales, or both moments.\n"
            "  Load the state of one of these, or clear the parameter's state to begin anew."
        )
    return kept | {name: state[name].to(device, dtype) for name, dtype in dtypes.items()}


def new_state(parameter: torch.Tensor) -> dict[str, Any]:
    """Returns the state before the first step: codes of the parameter's shape, and flat scales; zeros.

    Raises:
        OptimizerError: If the parameter can't have codes.
    """
    check_parameter(parameter)
    groups = -(-parameter.numel() // GROUP)
    codes = {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name, dtype in CODES.items()}
    scales = {name: torch.zeros(groups, dtype=dtype, device=parameter.device) for name, dtype in SCALES.items()}
    return {"step": torch.tensor(0.0), **codes, **scales}


def coded_state(state: Mapping[str, Any]) -> Coded:
    """Returns the flat codes and the scales of a parameter's state, as views."""
    codes = [state[name].view(-1) for name in CODES]
    return codes[0], codes[1], state["exp_avg_scales"], state["exp_avg_sq_scales"]


def check_parameter(parameter: torch.Tensor) -> None:
    """Refuses a parameter whose groups another order of memory would change, or whose values fp32 can't hold.

    Raises:
        OptimizerError: If it isn't contiguous, or of another dtype than fp32, bf16 and fp16.
    """
    if parameter.dtype not in _DTYPES:
        raise OptimizerError(
            f"a {tuple(parameter.shape)} parameter is {parameter.dtype}.\n"
            "  AdamW8bit updates in fp32: parameters of fp32, bf16 and fp16.\n"
            "  Give such parameters to torch.optim.AdamW, in a list of optimizers."
        )
    if not parameter.is_contiguous():
        raise OptimizerError(
            f"a {tuple(parameter.shape)} parameter with strides {parameter.stride()} isn't contiguous.\n"
            "  AdamW8bit keeps a scale for 32 elements in the order of memory, which a load would have to know.\n"
            "  Make it contiguous (model.to(memory_format=torch.contiguous_format)), or use torch.optim.AdamW."
        )
