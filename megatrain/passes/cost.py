"""TemplateCost: the bytes and work of one execution of a template; schedules are made from these figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.hardware.work import Works, total_flops
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class ResultCost:
    """What a block may keep of its forward so that its backward needn't run fused kernels again, measured.

    Args:
        calls: Places of the calls with these kernels among the nodes of the template's graph, ascending.
        specs: Of the tensors that are kept, in the order in which the kernels return them.
        forward_workspace_bytes: As in `TemplateCost`, of a forward that keeps these; they don't count.
        backward_workspace_bytes: The same of a backward that finds them.
        repeated: The kernels of the repeated forward then.
    """

    calls: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    repeated: Works

    @property
    def figures(self) -> tuple[int, int, Works]:
        """What scheduling needs besides the specs."""
        return self.forward_workspace_bytes, self.backward_workspace_bytes, self.repeated

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class TemplateCost:
    """Bytes and work of one execution of a template, measured on fake tensors.

    Args:
        saved_bytes: Bytes that the forward holds for its backward, beyond inputs, outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond inputs, outputs and state.
        backward_workspace_bytes: The same for recompute and backward, beyond the gradients produced.
        forward: What the kernels of the forward compute and move.
        backward: The same of the backward alone, without a recompute, where all gradients are needed that some block
            needs.
        unmeasured: Why the bytes are a bound instead (the results of all calls at once) and the kernels aren't
            known; empty where both are measured.
        held_state: Positions of the state that a retained graph keeps by another way than autograd's saved tensors (in
            the context of an autograd.Function). It keeps a copy, counted in `saved_bytes`: slots are written again.
        backwards: Backwards of blocks that need fewer gradients: for which inputs and state, and their kernels.
        saved_parts: The bytes of each tensor in `saved_bytes`, largest first; empty where they aren't measured.
        workspace_parts: The bytes of each tensor that is alive when the workspace of a forward is largest, and of a
            backward with its recompute; largest first; empty where they aren't measured.
        results: What may be kept of a forward that is repeated; None if nothing is worth it anywhere.

    >>> from megatrain.hardware.work import Kernels
    >>> forward, backward = (Kernels("fp32", 4194304, 65536),), (Kernels("fp32", 8388608, 131072, 2),)
    >>> print(TemplateCost(90112, 24576, 57088, forward, backward))
    saves 90112 B, workspace 57088 B, 4.19 + 8.39 MFLOP
    >>> print(TemplateCost(90112, 24576, 57088, unmeasured="a module runs its own code"))
    saves at most 90112 B, workspace at most 57088 B (a module runs its own code)
    """

    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward: Works = ()
    backward: Works = ()
    unmeasured: str = ""
    held_state: tuple[int, ...] = ()
    backwards: tuple[tuple[tuple[bool, ...], Works], ...] = ()
    saved_parts: tuple[int, ...] = ()
    workspace_parts: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    results: ResultCost | None = None

    def backward_of(self, needs: Sequence[bool]) -> Works:
        """The kernels of a backward for which of the inputs, and then of the state, need a gradient."""
        return dict(self.backwards).get(tuple(needs), self.backward)

    def __str__(self) -> str:
        flops = total_flops(self.forward), total_flops(self.backward)
        workspace = max(self.forward_workspace_bytes, self.backward_workspace_bytes)
        if self.unmeasured:
            return f"saves at most {self.saved_bytes} B, workspace at most {workspace} B ({self.unmeasured})"
        text = f"saves {self.saved_bytes} B, workspace {workspace} B, {_flops_text(*flops)}"
        if self.results is None:
            return text
        spared = _flops_text(flops[0] - total_flops(self.results.repeated))
        return f"{text}; may keep {self.results.nbytes} B of attention for {spared}"


def _flops_text(*flops: int) -> str:
    """Numbers in the unit of the largest, such as `0.5 + 1 MFLOP`; the first alone if the others are zero."""
    shown = flops if any(flops[1:]) else flops[:1]
    scaled, units = max(map(float, flops)), iter(("", "K", "M", "G", "T", "P"))
    unit, one = next(units), 1
    while scaled >= 999.5 and unit != "P":
        scaled, unit, one = scaled / 1000, next(units), one * 1000
    return f"{' + '.join(f'{each / one:.3g}' for each in shown)} {unit}FLOP"
