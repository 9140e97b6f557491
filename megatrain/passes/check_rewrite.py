"""check_rewrite(): compares a capture with what a rewrite makes of it, on random weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import checked, count, function, number, optional
from megatrain.base.counts import counted
from megatrain.device import HOST
from megatrain.errors import LowerError
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.distance import TOLERANCES, scale_by_kind, tensor_distance
from megatrain.passes.interpret import Code
from megatrain.passes.pipeline import Rewrite, pass_name, run_pass, stateless
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.inventory import inventory
from megatrain.tracer.recording.random_numbers import HostRng, kept_rng
from megatrain.tracer.spec import EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule

_LEAST_NOISE = 0.1


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a tensor of a rewritten capture is from that of the original, at most, over all trials.

    Args:
        kind: `"output"`, `"gradient"`, `"input gradient"` or `"buffer"`.
        name: The number of the output, or the name of the parameter, input or buffer.
        relative: The largest absolute difference over the largest absolute value of the tensor, or over a hundredth of
            the largest of its kind if that is more. 0 means the same bits.
        tolerance: The largest `relative` that counts as equal.
        reason: In words what differs, where it isn't the size of numbers.
    """

    kind: str
    name: str
    relative: float
    tolerance: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it counts as equal."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        what = self.reason or f"{self.relative:.1e} apart"
        return f"{self.kind} {self.name}: {what} (allowed: {self.tolerance:.1e})"


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """The result of `check_rewrite`.

    Args:
        name: Of the rewrite.
        model: Class name of the model.
        changed: Whether the rewrite changed the capture. If it did not, nothing was compared.
        trials: How often weights and inputs were drawn.
        deviations: One for each tensor that was compared, the worst first.
        kept: Inputs of whole numbers that stayed as given, since the capture is made for their values.
    """

    name: str
    model: str
    changed: bool
    trials: int
    deviations: tuple[Deviation, ...]
    kept: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the rewrite changed the capture, and everything agrees within its tolerance."""
        return self.changed and all(deviation.ok for deviation in self.deviations)

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.name} leaves {self.model} as it is; nothing was compared"
        same = sum(deviation.relative == 0 for deviation in self.deviations)
        verdict = "equal" if self.ok else "DIFFERENT"
        lines = [
            f"{self.name} of {self.model}: {verdict}; {same} of {len(self.deviations)} tensors bit for bit, "
            f"{counted(self.trials, 'trial')}"
        ]
        lines += [f"  {deviation}" for deviation in self.deviations[:8] if deviation.relative]
        lines += [f"  {name} stayed as given: the capture is made for its values" for name in self.kept]
        return "\n".join(lines)


@checked(
    model=MODEL,
    rewrite=function(1),
    args=EXAMPLE_ARGS,
    kwargs=EXAMPLE_KWARGS,
    trials=count(least=1),
    seed=count(),
    tolerance=optional(number(least=0)),
)
def check_rewrite(
    model: nn.Module,
    rewrite: Rewrite,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    trials: int = 3,
    seed: int = 0,
    tolerance: float | None = None,
) -> RewriteReport:
    """Compares the gradients of a capture with those of the rewritten one, over random weights and inputs.

    Captures `model(*args, **kwargs)`, applies the rewrite to the graph that `lower` would give it (without dead calls),
    and runs both graphs as they are: without blocks, schedule and runtime. Each trial draws other weights and inputs
    around the given ones, so that no bias of zeros and no norm of ones hides a fault; whole numbers and flags among the
    inputs change places. Outputs, gradients of all parameters and inputs, and written buffers are compared, with fixed
    random gradients of the outputs. Dropout draws the same numbers in both if the rewrite keeps the order of its draws.

    Args:
        model: Any module with values; it stays as it was.
        rewrite: Takes a `TracedModule` and returns another one.
        args: Example positional arguments.
        kwargs: Example keyword arguments.
        trials: How often weights and inputs are drawn.
        seed: Of the draws.
        tolerance: Relative difference that counts as equal; 0 asks for the same bits. None goes by dtype, as in
            `verify`: 1e-5 for single precision, 1e-13 for double, 4e-3 for half, 3e-2 for bfloat16.

    Raises:
        TraceError: If the model can't be captured.
        LowerError: If the model is on the meta device, if what the rewrite returns breaks a rule, or if the way that
            the model takes depends on the values of its weights.
        OptionError: If an option has a wrong value.
    """
    given: dict[str, Any] = dict(kwargs or {})
    tensors = inventory(model)[1]
    meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if meta is not None:
        raise LowerError(
            f"`{meta}` is on the meta device.\n  A rewrite is checked on values.\n"
            "  Build the model on the CPU, with few layers; the rewrite is the same."
        )
    traced = canonicalize(trace(model, args, given))
    made: Any = run_pass(rewrite, traced, is_rewrite=True)
    changed = str(made) != str(traced)
    trial = _Trials(traced, Arguments.of(model, args, given), tensors, seed)
    with kept_rng(HOST):
        found = [trial.compare(made, number, tolerance) for number in range(trials if changed else 0)]
    worst: dict[tuple[str, str], Deviation] = {}
    for deviation in (deviation for one in found for deviation in one):
        key = deviation.kind, deviation.name
        worst[key] = max(worst.get(key, deviation), deviation, key=lambda d: d.relative)
    ordered = sorted(worst.values(), key=lambda d: (d.ok, -d.relative))
    return RewriteReport(pass_name(rewrite), traced.name, changed, trials, tuple(ordered), tuple(sorted(trial.kept)))


_Tensors = Mapping[tuple[str, str], torch.Tensor | None]


class _Trials:
    """Runs a capture and its rewritten form on the same random weights and inputs."""

    def __init__(
        self, traced: TracedModule, arguments: Arguments, tensors: Mapping[str, torch.Tensor], seed: int
    ) -> None:
        self._traced, self._tensors, self._seed, self._host = traced, tensors, seed, HostRng.now()
        self._inputs = dict(zip(arguments.names, arguments.tensors, strict=True))
        self._parameters = {key for key, entry in traced.state.items() if entry.kind == "parameter"}
        self.kept: set[str] = set()

    def compare(self, made: TracedModule, number: int, tolerance: float | None) -> list[Deviation]:
        """Takes one trial."""
        expected = self._expected(number)
        found = self._run(made, number)
        scale_of_key = scale_by_kind(expected)
        coarsest = max((TOLERANCES.get(dtype, 0.0) for dtype in _autocast_dtypes(self._traced)), default=0.0)
        deviations: list[Deviation] = []
        for key, tensor in expected.items():
            kind, name = key
            scale = scale_of_key(key)
            absolute, reason = _apart(tensor, found[key])
            by_dtype = 0.0 if tensor is None else max(TOLERANCES.get(tensor.dtype, 0.0), coarsest)
            allowed = by_dtype if tolerance is None else tolerance
            deviations.append(Deviation(kind, name, absolute / scale if scale else absolute, allowed, reason))
        return deviations

    def _expected(self, number: int) -> _Tensors:
        """Runs the capture; inputs of whole numbers stay as given if it runs for their values alone."""
        try:
            return self._run(self._traced, number)
        except (GuardFailedError, IndexError, RuntimeError):
            self.kept |= {name for name, tensor in self._inputs.items() if not _is_continuous(tensor)}
        try:
            return self._run(self._traced, number)
        except GuardFailedError as error:
            raise LowerError(
                f"the way that the model takes depends on values: {error}.\n"
                "  A rewrite is checked over random weights and inputs, for which the capture must be right as well.\n"
                "  Compare on your own: megatrain.verify(megatrain.compile(model, passes=[...]), ...)."
            ) from error

    def _run(self, traced: TracedModule, number: int) -> _Tensors:
        generator = torch.Generator().manual_seed(self._seed + number)
        inputs = {name: self._input(name, tensor, generator) for name, tensor in self._inputs.items()}
        state = {key: self._state_of(key, tensor, generator) for key, tensor in self._tensors.items()}
        lifted = stateless(traced)
        # A forward that writes into its inputs, or into buffers, writes into copies: leaves keep their values.
        given = [tensor.clone() for tensor in inputs.values()]
        given += [(state[key] if key in state else traced.constants[key]).clone() for key in lifted.keys]
        self._host.restore()  # draws of Python and NumPy, such as those of SpecAugment
        torch.manual_seed(self._seed + number)
        results = Code(lifted.graph)(given)
        leaves = {("gradient", key): tensor for key, tensor in state.items() if tensor.requires_grad}
        leaves |= {("input gradient", name): tensor for name, tensor in inputs.items() if tensor.requires_grad}
        return _observed(traced, results, leaves, generator)

    def _input(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if _is_continuous(tensor):
            return _drawn(tensor, generator)
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor if name in self.kept else tensor.flatten()[order].view(tensor.shape)

    def _state_of(self, key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draws a parameter; a buffer keeps its values, which may be those of a table."""
        there = tensor.detach().to(self._traced.device).requires_grad_(tensor.requires_grad)
        return _drawn(there, generator) if key in self._parameters and _is_continuous(tensor) else there


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor with noise as large as its own spread; a leaf."""
    values = tensor.detach()
    spread = float(values.abs().float().std(correction=0)) if values.numel() else 0.0
    noise = torch.randn(values.shape, generator=generator).to(values)
    return (values + noise * (spread or _LEAST_NOISE)).requires_grad_(tensor.requires_grad)


def _observed(
    traced: TracedModule,
    results: Sequence[torch.Tensor],
    leaves: Mapping[tuple[str, str], torch.Tensor],
    generator: torch.Generator,
) -> _Tensors:
    """All that a run leaves: outputs, gradients, and buffers that were written."""
    num_outputs = len(results) - len(traced.writes_back)
    outputs, buffers = results[:num_outputs], results[num_outputs:]
    seen: dict[tuple[str, str], torch.Tensor | None] = {("output", str(i)): o.detach() for i, o in enumerate(outputs)}
    seen |= {("buffer", key): b.detach() for (key, _), b in zip(traced.writes_back, buffers, strict=True)}
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if roots and leaves:
        pulled = [torch.randn(root.shape, generator=generator).to(root) for root in roots]
        gradients = torch.autograd.grad(roots, list(leaves.values()), pulled, allow_unused=True)
        seen |= dict(zip(leaves, gradients, strict=True))
    return seen


def _apart(expected: torch.Tensor | None, found: torch.Tensor | None) -> tuple[float, str]:
    if expected is None or found is None:
        words = "has no gradient" if found is None else "has a gradient, and none before"
        return (0.0, "") if expected is found else (float("inf"), words)
    return tensor_distance(expected, found)


def _is_continuous(tensor: torch.Tensor) -> bool:
    """Tells whether noise can be added; eight bits are too few for sums."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1


def _autocast_dtypes(traced: TracedModule) -> set[torch.dtype]:
    return {dtype for node in traced.graph.nodes for _, dtype in node.meta.get("autocast", ())}
