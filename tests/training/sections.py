"""Steps of small models whose first block is divided into sections, as if it were large."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from megatrain.scheduler import from_program
from megatrain.scheduler.builder.sections import first_deferred
from megatrain.scheduler.items import NO_BLOCK
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload

NUM_SECTIONS = 3


def worth(num_sections: int) -> Callable[[Workload, StepKind], int]:
    """Makes what takes the place of `worthwhile_sections`."""

    def worthwhile(workload: Workload, kind: StepKind) -> int:
        block = first_deferred(workload, kind)
        return 1 if block == NO_BLOCK or workload.blocks[block].is_mostly_frozen else num_sections

    return worthwhile


@contextmanager
def always_divided(num_sections: int = NUM_SECTIONS) -> Generator[None]:
    """During the body schedules of steps divide the first block with a deferred update, whatever its size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_program, "worthwhile_sections", worth(num_sections))
        yield
