"""Results: the blocks for which it is worth keeping results of their forward for their backward, on either side."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.costs import OpSeconds
from megatrain.scheduler.workload import Workload


def result_bytes(workload: Workload, block: int) -> int:
    """Bytes of the results that a block may keep."""
    return sum(value.nbytes for value in workload.values if value.is_result and value.producer == block)


def spared_seconds(workload: Workload, block: int, seconds: OpSeconds) -> float:
    """Seconds by which the backward of a block gets shorter if it finds its results."""
    work = workload.blocks[block]
    return 0.0 if work.kept is None else seconds.of_kernels(work.forward) - seconds.of_kernels(work.kept.repeated)


def sparing_results(workload: Workload, machine: Hardware) -> tuple[int, ...]:
    """The blocks whose backward gets shorter with results that are there.

    The last one's backward follows its forward at once: nothing is gained there that its graph wouldn't.

    Args:
        workload: What runs.
        machine: Whose rates count.
    """
    seconds = OpSeconds(machine)
    return tuple(b for b in workload.backward_blocks()[:-1] if spared_seconds(workload, b, seconds) > 0)


def within(workload: Workload, kind: StepKind, blocks: Sequence[int], most_bytes: int | None) -> tuple[int, ...]:
    """The last of some blocks, whose results take no more than so many bytes together; None is any number."""
    chosen: list[int] = []
    for block in reversed(blocks):
        nbytes = kind.micro_batches * result_bytes(workload, block)
        most_bytes = None if most_bytes is None else most_bytes - nbytes
        if most_bytes is not None and most_bytes < 0:
            break
        chosen.append(block)
    return tuple(reversed(chosen))
