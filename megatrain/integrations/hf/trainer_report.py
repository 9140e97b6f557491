"""TrainerReport: the result of verifying a trainer; one difference per value, and the first of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

from megatrain.counts import counted
from megatrain.verification.report import Difference, finite

_SHOWN = 8
KINDS = ("loss", "gradient norm", "learning rate", "logged", "parameter", "buffer", "optimizer", "rng")
"""What is compared, in the order in which an update makes it."""
_CULPRITS = {
    "streamed": "the streamed run is at fault: the stock run repeats its own numbers",
    "stock": "the script is at fault: the stock run itself gives other numbers when it is repeated (data, a function "
    "or a callback with state of its own, or a kernel that isn't deterministic)",
    "unrepeatable": "nothing differed when both were repeated, with parameters read after each update: updates that "
    "were still due, or two operations in no fixed order",
}


@dataclass(frozen=True, slots=True)
class FirstUpdate:
    """Where the numbers of two runs part.

    Args:
        culprit: `"streamed"`; `"stock"`, if the stock run isn't equal to itself; or `"unrepeatable"`.
        difference: The first value that differs, in the order in which updates make them; None if nothing differed
            when both were repeated.
    """

    culprit: str
    difference: Difference | None

    def __str__(self) -> str:
        found = self.difference
        where = ""
        if found is not None:
            size = found.reason or f"off by {found.absolute:.2e} (relative {found.relative:.2e})"
            name = found.kind if found.name == found.kind else f"{found.kind} `{found.name}`"
            where = f"update {found.step}, {name}: {size}; "
        return f"first difference: {where}{_CULPRITS[self.culprit]}"


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The result of verifying a trainer that streams.

    Args:
        differences: One per value compared, the worst first. Each has the number of its update, from 1; what training
            leaves (parameters, optimizer) has that of the last.
        tolerance: Largest relative difference that counts as equal; 0 asks for the same bits.
        trainer: Name of the streamed class.
        stock: Name of the class without megatrain.
        num_updates: Updates that both took.
        num_training_steps: How many of them were one training step.
        num_operations: Operations that the streamed model ran on the device; 0 means that it never streamed.
        num_blocks: Blocks in its schedule.
        first_difference: Where the two part; None if they are equal.
        notes: For the reader.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    trainer: str
    stock: str
    num_updates: int
    num_training_steps: int
    num_operations: int
    num_blocks: int
    first_difference: FirstUpdate | None = None
    notes: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest relative difference of all."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def has_streamed(self) -> bool:
        """Whether the model really ran through its blocks."""
        return self.num_operations > 0

    @property
    def ok(self) -> bool:
        """Whether the model streamed, and everything agrees within the tolerance."""
        return self.has_streamed and all(d.ok for d in self.differences)

    def __str__(self) -> str:
        differing = [d for d in self.differences if d.absolute != 0 or not d.ok]
        exact = len(self.differences) - len(differing)
        verdict = "equal to" if all(d.ok for d in self.differences) else "DIFFERENT from"
        lines = [
            f"verify {self.trainer}: {verdict} {self.stock} without megatrain; {exact} of {len(self.differences)} "
            f"values bit for bit ({self._compared()}), largest relative difference {self.max_error:.2e} (tolerance "
            f"{self.tolerance:.0e})",
            f"  {self._streamed()}",
        ]
        if self.first_difference is not None:
            lines.append(f"  {self.first_difference}")
        lines += [f"  note: {note}" for note in self.notes]
        if differing:
            lines.append(f"  {'kind':14s} {'update':>4s}  {'absolute':>9s}  {'relative':>9s}  name")
            lines += [f"  {d}" for d in differing[:_SHOWN]]
        hidden = len(differing) - _SHOWN
        return "\n".join(lines + ([f"  ... and {hidden} more, not larger"] if hidden > 0 else []))

    def _compared(self) -> str:
        counts = Counter(d.kind for d in self.differences)
        said = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
        return f"{said} in {counted(self.num_updates, 'update')}"

    def _streamed(self) -> str:
        if not self.has_streamed:
            return "NOT STREAMED: no operation of the model's blocks ran, so nothing is verified"
        return (
            f"streamed: {counted(self.num_blocks, 'block')}, "
            f"{counted(self.num_operations, 'operation')} on the device; "
            f"{self.num_training_steps} of {self.num_updates} updates were one training step"
        )

    def to_json(self) -> str:
        """Returns the report as JSON; what is infinite or NaN is null there."""
        return json.dumps(finite({"ok": self.ok, "max_error": self.max_error, **asdict(self)}), indent=2)
