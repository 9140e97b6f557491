"""verify(): a model against itself, compiled and eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.compiled import compile as compile_model
from megatrain.tracer.structure import Structure


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor is from eager PyTorch's.

    Args:
        kind: `"output"`, `"gradient"`, `"buffer"`, `"parameter"` or `"rng"`.
        name: Its name.
        step: The training step, from 0.
        absolute: Largest absolute difference; inf where one has a value and the other none, or shapes differ.
        relative: `absolute` over the largest absolute value of its kind (all gradients share one scale: some, a
            key projection's bias for one, are zero but for rounding).
    """

    kind: str
    name: str
    step: int
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; prints the worst first.

    Args:
        differences: One per tensor compared, worst first.
        tolerance: Largest relative difference that counts as equal.
        model: Class name of the model.
        num_blocks: Blocks in its schedule.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    model: str
    num_blocks: int

    @property
    def max_error(self) -> float:
        """The largest relative difference of all."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether everything agrees within the tolerance."""
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        exact = sum(d.absolute == 0 for d in self.differences)
        verdict = "equal to" if self.ok else "DIFFERENT from"
        lines = [
            f"verify {self.model}: {verdict} eager PyTorch; {exact} of {len(self.differences)} tensors bit for bit, "
            f"largest relative difference {self.max_error:.2e} (tolerance {self.tolerance:.0e}), "
            f"{self.num_blocks} blocks",
            f"  {'kind':9s} {'step':>4s}  {'absolute':>9s}  {'relative':>9s}  name",
        ]
        for d in self.differences[:8]:
            lines.append(f"  {d.kind:9s} {d.step:4d}  {d.absolute:9.2e}  {d.relative:9.2e}  {d.name}")
        hidden = len(self.differences) - 8
        return "\n".join(lines + ([f"  ... and {hidden} more, no worse"] if hidden > 0 else []))


def verify(
    model: nn.Module,
    *args: Any,
    steps: int = 2,
    seed: int = 0,
    learning_rate: float = 0.05,
    tolerance: float = 1e-5,
    compile_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Trains a copy of `model` compiled and another eagerly, side by side, and compares everything.

    Both run `steps` steps of forward, backward and a plain SGD update on the same arguments, from the same seed.
    Compared are the outputs, every gradient, every buffer, the parameters after each update, and the random
    generator's state. The loss is the output's `loss` if it has one, else the sum of the means of its
    differentiable tensors. `model` itself is left as it was.

    Args:
        model: Any module that `compile` takes.
        *args: Arguments of its forward.
        steps: Training steps.
        seed: Seed set before each step, for dropout.
        learning_rate: Of the update between steps.
        tolerance: Relative difference that still counts as equal.
        compile_options: Options of `compile`.
        **kwargs: Keyword arguments of its forward.

    Returns:
        The report; `report.ok` is the verdict.

    Raises:
        TraceError: And whatever else `compile` raises.
    """
    options = dict(compile_options or {})
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_model(streamed, **options)
    device = compiled.options.device
    eager.to(device)
    differences: list[Difference] = []
    for step in range(steps):
        expected = _snapshot(eager, eager, args, kwargs, seed + step, learning_rate)
        found = _snapshot(compiled, streamed, args, kwargs, seed + step, learning_rate)
        differences += _compare(expected, found, step)
    order = sorted(differences, key=lambda d: (-d.relative, d.step, d.kind, d.name))
    return Report(tuple(order), tolerance, type(model).__name__, len(compiled.program.blocks))


_Snapshot = dict[tuple[str, str], torch.Tensor | None]


def _snapshot(call: nn.Module, model: nn.Module, args: Any, kwargs: Any, seed: int, learning_rate: float) -> _Snapshot:
    """Runs one step and copies all that it produced."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    result = call(*args, **kwargs)
    tensors = Structure.of(result).placeholders
    loss = _loss(result, tensors)
    if loss is not None:
        loss.backward()
    found: _Snapshot = {("output", str(i)): t.detach().cpu().clone() for i, t in enumerate(tensors)}
    found["rng", "cpu"] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        found["gradient", name] = None if parameter.grad is None else parameter.grad.detach().cpu().to_dense().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-learning_rate)
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            found[kind, name] = tensor.detach().cpu().clone()
    return found


def _loss(result: Any, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    terms = [t.abs().mean() if t.is_complex() else t.float().pow(2).mean() for t in tensors if t.requires_grad]
    return torch.stack([t.reshape(()) for t in terms]).sum() if terms else None


def _compare(expected: _Snapshot, found: _Snapshot, step: int) -> Iterator[Difference]:
    scales: dict[str, float] = {}
    for (kind, _), tensor in expected.items():
        if tensor is not None and tensor.numel():
            scales[kind] = max(scales.get(kind, 0.0), float(tensor.abs().max()))
    for kind, name in expected.keys() | found.keys():
        absolute = _distance(expected.get((kind, name)), found.get((kind, name)))
        scale = scales.get(kind, 0.0)
        yield Difference(kind, name, step, absolute, absolute / scale if scale and absolute else absolute)


def _distance(left: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """Largest absolute difference; NaN equals NaN."""
    if left is None or right is None:
        return 0.0 if left is right else float("inf")
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if left.numel() == 0 or torch.equal(left, right):
        return 0.0
    if left.dtype in (torch.bool, torch.uint8):
        return float("inf")
    wide = torch.complex128 if left.is_complex() else torch.float64
    gap = (left.to(wide) - right.to(wide)).abs()
    gap[left.isnan() & right.isnan()] = 0
    gap[left == right] = 0
    return float(gap.nan_to_num(nan=float("inf")).max())
