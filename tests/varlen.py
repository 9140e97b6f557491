"""Stand-ins on the CPU for kernels of attention over documents of several lengths: torch's, and flash-attn's.

They have the schemas of the real ones and plain arithmetic, so what is captured, counted and kept is what a card has.
flash-attn's are under its names, as its package isn't there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import Library, custom_op, register_fake, register_kernel
from torch.nn.attention import varlen


def _scores(
    query: torch.Tensor, key: torch.Tensor, ends: Sequence[torch.Tensor], *, is_causal: bool, scale: float
) -> torch.Tensor:
    rows, columns = (torch.arange(len(tensor)) for tensor in (query, key))
    of = [torch.searchsorted(end.long(), at, right=True) for end, at in zip(ends, (rows, columns), strict=True)]
    sees = of[0][:, None] == of[1][None]
    if is_causal:
        sees &= rows[:, None] >= columns[None]
    products = torch.einsum("ihd,jhd->hij", query.float(), key.float()) * scale
    return products.masked_fill(~sees, float("-inf"))


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *ends: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, ends, is_causal=is_causal, scale=scale or query.shape[-1] ** -0.5)
    sums = scores.logsumexp(-1)
    found = torch.einsum("hij,jhd->ihd", (scores - sums[..., None]).exp(), value.float())
    return found.to(query.dtype), sums


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    *ends: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    factor, upper = scale or query.shape[-1] ** -0.5, grad.float()
    parts = (_scores(query, key, ends, is_causal=is_causal, scale=factor) - sums[..., None]).exp()
    of_parts = torch.einsum("ihd,jhd->hij", upper, value.float()) - (upper * out.float()).sum(-1).T[..., None]
    of_scores = parts * of_parts * factor
    return (
        torch.einsum("hij,jhd->ihd", of_scores, key.float()).to(query.dtype),
        torch.einsum("hij,ihd->jhd", of_scores, query.float()).to(key.dtype),
        torch.einsum("hij,ihd->jhd", parts, upper).to(value.dtype),
    )


def register_torchs(library: Library) -> None:
    """Gives the operators of `torch.nn.attention.varlen` kernels on the CPU, as long as the library lives."""
    assert varlen.varlen_attn is not None

    def forward(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
        is_causal: bool = False, scale: float | None = None, window_size: Any = None, *_: Any, **__: Any,
    ) -> Any:  # fmt: skip
        causal = is_causal or (window_size is not None and list(window_size) == [-1, 0])
        found, sums = _forward(query, key, value, cu_seq_q, cu_seq_k, is_causal=causal, scale=scale)
        return found, sums, torch.zeros(2, dtype=torch.uint64)

    def backward(
        grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int,
        max_k: int, is_causal: bool, rng_state: Any, scale: float | None = None, window_size: Any = None,
    ) -> Any:  # fmt: skip
        causal = is_causal or (window_size is not None and list(window_size) == [-1, 0])
        given = grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k
        return _backward(*given, is_causal=causal, scale=scale)

    register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
    register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward, lib=library)


# -- flash-attn's ------------------------------------------------------------------------------------------------------


@custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    found, sums = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=causal, scale=softmax_scale)
    return found, sums, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _fake_forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, *_: Any) -> Any:
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), sums, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_backward(  # noqa: PLR0913, PLR0917
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
) -> torch.Tensor:  # fmt: skip
    given = dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k
    for place, found in zip((dq, dk, dv), _backward(*given, is_causal=causal, scale=softmax_scale), strict=True):
        place.copy_(found)
    return torch.empty_like(softmax_lse)


def _fake_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, *_: Any) -> Any:
    return torch.empty_like(softmax_lse)


register_fake("flash_attn::_flash_attn_varlen_forward", _fake_forward)
register_fake("flash_attn::_flash_attn_varlen_backward", _fake_backward)


class FlashAttnVarlenFunc(torch.autograd.Function):
    """As flash-attn calls its operators."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ends: Any, longest: int, causal: bool) -> Any:
        scale = q.shape[-1] ** -0.5
        given = ends, ends, longest, longest, 0.0, scale, causal
        out, sums, _, rng_state = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, *given)
        ctx.save_for_backward(q, k, v, out, sums, ends, rng_state)
        ctx.more = longest, longest, 0.0, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, sums, ends, _ = ctx.saved_tensors
        made = [torch.empty_like(each) for each in (q, k, v)]
        given = grad, q, k, v, out, sums, *made, ends, ends, *ctx.more
        torch.ops.flash_attn._flash_attn_varlen_backward(*given)
        return *made, None, None, None


FlashAttnVarlenFunc.__module__ = "flash_attn.flash_attn_interface"
