"""TemplateCost: the bytes and work of one execution of a template; schedules are made from these figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TemplateCost:
    """Bytes and work of one execution of a template, measured on fake tensors.

    Args:
        saved_bytes: Bytes that the forward holds for its backward, beyond inputs, outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond inputs, outputs and state.
        backward_workspace_bytes: The same for recompute and backward, beyond the gradients produced.
        forward_flops: Floating-point operations of the forward's matrix products, convolutions and attention.
        unmeasured: Why the bytes are a bound instead (the results of all calls at once) and the operations aren't
            known; empty where both are measured.
        held_state: Positions of the state that a retained graph keeps by another way than autograd's saved tensors (in
            the context of an autograd.Function). It keeps a copy, counted in `saved_bytes`: slots are written again.

    >>> print(TemplateCost(90112, 24576, 57088, 4194304))
    saves 90112 B, workspace 57088 B, 4.19 MFLOP
    >>> print(TemplateCost(90112, 24576, 57088, 0, unmeasured="a module runs its own code"))
    saves at most 90112 B, workspace at most 57088 B (a module runs its own code)
    """

    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward_flops: int
    unmeasured: str = ""
    held_state: tuple[int, ...] = ()

    def __str__(self) -> str:
        workspace = max(self.forward_workspace_bytes, self.backward_workspace_bytes)
        if self.unmeasured:
            return f"saves at most {self.saved_bytes} B, workspace at most {workspace} B ({self.unmeasured})"
        return f"saves {self.saved_bytes} B, workspace {workspace} B, {_flops_text(self.forward_flops)}"


def _flops_text(flops: int) -> str:
    scaled, units = float(flops), iter(("", "K", "M", "G", "T", "P"))
    unit = next(units)
    while scaled >= 999.5 and unit != "P":
        scaled, unit = scaled / 1000, next(units)
    return f"{scaled:.3g} {unit}FLOP"
