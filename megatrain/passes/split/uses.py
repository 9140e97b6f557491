"""Uses: the calls that bring a state tensor into the data, if its parts can make these calls one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from megatrain.passes.split.rows import Act, Gather


@dataclass(frozen=True, slots=True)
class Cut:
    """A call, the operand of it that is cut, and what it does to that."""

    node: fx.Node
    operand: fx.Node
    act: Act


@dataclass(frozen=True, slots=True)
class Use:
    """One road of a tensor into the data.

    Args:
        before: Views and casts of the tensor alone.
        call: Where it meets other data.
    """

    before: tuple[Cut, ...]
    call: Cut

    @property
    def end(self) -> fx.Node:
        """The call whose result the parts make up."""
        return self.call.node

    def nodes(self) -> tuple[fx.Node, ...]:
        """The calls that are rewritten, without the shared views in front."""
        return (self.call.node,)


@dataclass(frozen=True, slots=True)
class Batch(Use):
    """A product batched over the rows: each part gives a stretch of the result."""


@dataclass(frozen=True, slots=True)
class Row(Use):
    """One row, by a number that never changes: one part gives it."""

    row: int


@dataclass(frozen=True, slots=True)
class Selection(Use):
    """Rows picked by number, and the views and the product that follow."""

    gather: Gather
    after: tuple[Cut, ...]

    @property
    def end(self) -> fx.Node:
        """The call whose result the parts make up."""
        return self.after[-1].node if self.after else self.call.node

    def nodes(self) -> tuple[fx.Node, ...]:
        """The calls that are rewritten, without the shared views in front."""
        return (self.call.node, *(step.node for step in self.after))


@dataclass(frozen=True, slots=True)
class Grouped(Use):
    """A grouped product: consecutive runs of `tokens`, each with its own row; `ends` tells where the runs end."""

    tokens: fx.Node
    ends: fx.Node
