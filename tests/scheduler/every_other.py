"""What a table's checker must say of all tables and instructions that differ from a right one."""

from __future__ import annotations

from random import Random

from megatrain.errors import ScheduleError
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload
from tests.scheduler.mutations import mutants, with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.test_instructions import is_rejected as is_refused
from tests.scheduler.test_instructions import mutants as other_instructions


def num_rejected(plan: Schedule, work: Workload, seed: int, *, fits: bool) -> int:
    """Checks that every other table is refused or harmless, and that all other instructions are refused.

    Args:
        plan: A right one.
        work: Its workload.
        seed: Of the choice among other tables.
        fits: Whether the figures of another table are made to fit it.

    Returns:
        The number of tables that are refused.
    """
    rejected = 0
    for name, mutant in mutants(plan, Random(seed)):
        mutant = with_figures(mutant) if fits else mutant
        try:
            mutant.check()
        except ScheduleError:
            rejected += 1
            continue
        try:
            find_harm(mutant, work, seed=seed)
        except Harm as harm:
            raise AssertionError(f"{name}: {harm}\n{plan}\n{mutant}") from harm
    made = plan.instructions
    assert [name for name, other in other_instructions(made, Random(seed)) if not is_refused(plan, other)] == []
    return rejected
