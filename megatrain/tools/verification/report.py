"""The result of verify(): one difference per tensor, the largest first, and the place of the first one."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.base.counts import counted

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor, or one plain value of the output, is from eager PyTorch's.

    Args:
        kind: `"output"`, `"gradient"`, `"input gradient"`, `"buffer"`, `"parameter"` or `"rng"`.
        name: Its path in the output, its name in the model, the name of the argument, or the generator's device.
        step: The training step, from 0.
        absolute: Largest absolute difference; inf where the two can't be subtracted, and `reason` says why.
        relative: `absolute` over the tensor's own largest absolute value, or over a hundredth of the largest of its
            kind if that is more: some gradients, such as that of a key projection's bias, are zero except for rounding.
        blocks: The blocks that hold it (state), read it (inputs) or make it (outputs): `"block 3 layers.2"`.
        tolerance: Largest `relative` that counts as equal.
        reason: In words what differs, where it isn't the size of numbers: a shape, a dtype, None.
    """

    kind: str
    name: str
    step: int
    absolute: float
    relative: float
    blocks: tuple[str, ...] = ()
    tolerance: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it counts as equal."""
        return self.relative <= self.tolerance

    @property
    def severity(self) -> tuple[bool, float]:
        """Orders differences: what is beyond its tolerance comes first, then the larger."""
        return not self.ok, self.relative

    def __str__(self) -> str:
        blocks = f"  [{_blocks_text(self.blocks)}]" if self.blocks else ""
        reason = f"  {self.reason}" if self.reason else ""
        return (
            f"{self.kind:14s} {self.step:4d}  {self.absolute:9.2e}  {self.relative:9.2e}  {self.name}{blocks}{reason}"
        )


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first block, in the order in which a step runs, whose numbers are not eager's.

    Args:
        culprit: The part at fault. `"model"`: eager PyTorch gives other numbers when the same step is repeated.
            `"capture"`: the traced graph, run as a whole, gives other numbers than the model. `"passes"`: the graph is
            right, but the blocks made from it aren't. `"runtime"`: the blocks are right, but the run isn't.
            `"unrepeatable"`: all agree when the step is repeated.
        step: The training step, from 0.
        block: Index of the block; None where it can't be told.
        name: The block's name; for `"model"` and `"capture"` the module's, if its output differs.
        phase: `"forward"`, `"recompute"`, `"backward"` or `"after"` (when the numbers leave the last block).
        what: The tensor: ``output `add_3` ``, ``state `layers.2.weight` ``.
        absolute: Largest absolute difference.
        relative: The same over the tensor's largest absolute value.
        reason: The difference in words, if it isn't the size of numbers.
    """

    culprit: str
    step: int
    block: int | None = None
    name: str = ""
    phase: str = ""
    what: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        block = f"block {self.block} {self.name}" if self.block is not None else ""
        if self.culprit in ("model", "capture"):
            block = f"module `{self.name}`" if self.name else "the whole model"
            block += f" (block {self.block})" if self.block is not None else ""
        where = ", ".join([part for part in (block, self.phase, f"step {self.step}") if part])
        size = f"{self.what} is off by {self.absolute:.2e} (relative {self.relative:.2e})" if self.what else ""
        size = f"{self.what}: {self.reason}" if self.reason else size
        return f"first difference: {where}: {size + '; ' if size else ''}{_CULPRITS[self.culprit]}"


_CULPRITS = {
    "model": "the model is at fault: eager PyTorch itself gives other numbers when the step is repeated from the same "
    "weights and seed (state outside of parameters and buffers, or a kernel that isn't deterministic)",
    "capture": "the capture is at fault: the traced graph, run as a whole, gives other numbers than the model",
    "passes": "the passes are at fault: the traced graph is right, the blocks made from it aren't",
    "runtime": "the runtime or the schedule is at fault: the blocks, run one after the other, are right",
    "unrepeatable": "nothing differed when the step was repeated: two operations have no fixed order, or a kernel "
    "isn't "
    "deterministic",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`; prints one line if all is equal bit for bit, otherwise the differences.

    Args:
        differences: One per tensor compared, worst first. They end with the first step that isn't equal.
        tolerance: Largest relative difference that counts as equal, for the coarsest dtype compared.
        model: Class name of the model.
        num_blocks: Blocks in its schedule.
        first_difference: Where the first difference arose; None if all is equal, or if the search failed.
        notes: Notes for the reader: nothing differentiable, NaN in eager, a search that failed.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    model: str
    num_blocks: int
    first_difference: FirstDifference | None = None
    notes: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest relative difference of all."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether everything agrees within its tolerance."""
        return all(d.ok for d in self.differences)

    def __str__(self) -> str:
        differing = [d for d in self.differences if d.absolute != 0 or not d.ok]
        exact = len(self.differences) - len(differing)
        verdict = "equal to" if self.ok else "DIFFERENT from"
        lines = [
            f"verify {self.model}: {verdict} eager PyTorch; {exact} of {len(self.differences)} tensors bit for bit "
            f"({self._compared()}), largest relative difference {self.max_error:.2e} (tolerance {self.tolerance:.0e}), "
            f"{counted(self.num_blocks, 'block')}"
        ]
        if self.first_difference is not None:
            lines.append(f"  {self.first_difference}")
        lines += [f"  note: {note}" for note in self.notes]
        if differing:
            lines.append(f"  {'kind':14s} {'step':>4s}  {'absolute':>9s}  {'relative':>9s}  name")
            lines += [f"  {d}" for d in differing[:_SHOWN]]
        hidden = len(differing) - _SHOWN
        return "\n".join(lines + ([f"  ... and {hidden} more, not larger"] if hidden > 0 else []))

    def _compared(self) -> str:
        """What was compared, over how many steps: `20 gradient, 2 output in 2 steps`."""
        kinds = sorted(Counter(d.kind for d in self.differences).items())
        steps = counted(len({d.step for d in self.differences}), "step")
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds)
        return f"{counts} in {steps}" if counts else "nothing compared"

    def to_json(self) -> str:
        """Returns the report as JSON; what is infinite or NaN is null there."""
        found = {"ok": self.ok, "max_error": self.max_error, **asdict(self)}
        return json.dumps(finite(found), indent=2)


def finite(value: Any) -> Any:
    """Returns what JSON can hold: no number that is infinite or NaN."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _blocks_text(blocks: tuple[str, ...]) -> str:
    shown = ", ".join(blocks[:3])
    return f"{shown} and {len(blocks) - 3} more" if len(blocks) > 3 else shown
