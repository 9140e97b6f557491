"""with_host_room(): of the plans of a step the fastest that fits the memory of the host.

A plan that takes too much of it is made again in other ways: fewer results of attention are kept, the device updates
more blocks, optimizer state is in a file, less is parked, fewer updates wait for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatrain.hardware.hardware import Hardware
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.plan_step import StepChoices
from megatrain.planning.planned_step import StepLimits
from megatrain.scheduler.builder.moments import spared_in_file
from megatrain.scheduler.builder.search import result_bytes, spared_bytes

ALL = 1 << 62
"""Bytes: as many as can be."""
# Of the host, for a byte of the device, that a block updated there spares at most: it has fp32 weights and AdamW's
# moments there, 12 bytes a parameter, and its gradients don't wait on the host.
_SPARED = 4 / 3
# So often a plan is made with more blocks on the device, each time by what the host still lacks.
_MOST_SPARED = 3

PlannedOnHost = tuple[StepChoices, HostPlan]


def with_host_room(
    tried: Callable[..., PlannedOnHost],
    with_host: Callable[[StepChoices], PlannedOnHost],
    limits: StepLimits,
    updates: Sequence[str],
) -> tuple[StepChoices, HostPlan]:
    """The fastest plan, or one that takes less memory of the host if it doesn't fit there.

    Args:
        tried: Plans with one of `updates`, and other limits by name.
        with_host: Says what a plan takes of the host.
        limits: Those of the step.
        updates: When they may run, the fastest way first.
    """

    def missing(host: HostPlan) -> int:
        return host.missing_bytes(limits.host_memory)

    fastest, *others = updates
    if limits.filed and not limits.least_filed_bytes:
        return _with_file(tried, with_host, limits, updates, missing)
    first = made, host = tried(fastest)
    if made.too_small is not None or not missing(host):
        return made, host
    if made.schedule.results:
        most = max(0, _result_bytes(made) - missing(host))
        fewer = tried(fastest, most_result_bytes=most)
        made, host = fewer if not missing(fewer[1]) else (made, host)
    tries: list[PlannedOnHost] = []
    is_known = limits.host_memory is not None
    if limits.updates_there and is_known:
        again = partial(tried, fastest)
        tries.append(_with_more_there((made, host), lambda least: again(least_spared_bytes=least), missing))
    # Without a machine as little as possible is parked on the host; later updates leave less for the next step.
    for each in (fastest, *(others if is_known else ())):
        if missing(host):
            less = tried(each, hardware=None)
            made, host = less if less[1].total_bytes < host.total_bytes else (made, host)
    tries.append((made, host))
    if limits.filed:
        less_parked = ((with_host(m.with_less_parked(missing(h)))) for m, h in [first, tries[-1]] if missing(h))
        tries += less_parked
    return _best(tries, limits.hardware, missing)


def _with_file(
    tried: Callable[..., PlannedOnHost],
    with_host: Callable[[StepChoices], PlannedOnHost],
    limits: StepLimits,
    updates: Sequence[str],
    missing: Callable[[HostPlan], int],
) -> PlannedOnHost:
    """The fastest plan without a file if one fits, or with as much optimizer state in a file as the host needs room."""
    fastest, *others = updates
    plain = tried(fastest, updates_there=False)
    if plain[0].too_small is not None:
        return plain
    tries = [plain]
    if limits.device_memory is None or missing(plain[1]) <= _SPARED * limits.device_memory:
        tries.append(tried(fastest))
        if not missing(tries[-1][1]):
            return tries[-1]
    if missing(plain[1]):
        in_file = partial(_with_state_in_file, tried, missing)
        # What isn't parked leaves room for state.
        tries += [in_file(fastest), in_file(fastest, hardware=None)]
        for each in others:
            if all(missing(one[1]) for one in tries):
                tries.append(in_file(each, hardware=None))
        tries += [with_host(each[0].with_less_parked(missing(each[1]))) for each in tries if missing(each[1])]
    return _best(tries, limits.hardware, missing)


def _with_state_in_file(
    tried: Callable[..., PlannedOnHost], missing: Callable[[HostPlan], int], updates: str, **changes: Any
) -> PlannedOnHost:
    """A plan with as much optimizer state in a file as the host needs room, or as spares most."""
    plan = partial(tried, updates, **changes, updates_there=False)
    made, host = plan(least_filed_bytes=0)
    while lacking := missing(host):
        # A buffer has a few bytes more, between the tensors.
        more = plan(least_filed_bytes=spared_in_file(made.schedule) + lacking)
        if more[1].total_bytes >= host.total_bytes:
            break
        made, host = more
    return made, host


def _with_more_there(
    first: PlannedOnHost, plan: Callable[[int], PlannedOnHost], missing: Callable[[HostPlan], int]
) -> PlannedOnHost:
    """A plan with more blocks on the device, as many as spare what the host lacks, or as fit.

    Args:
        first: The plan that lacks memory of the host.
        plan: Plans so that at least so many bytes are spared.
        missing: Of a plan.
    """
    (made, host), least = first, 0
    for _ in range(_MOST_SPARED):  # what is parked on the host may be more than before
        workload, table = made.schedule.known_workload(), made.schedule
        spared = sum(spared_bytes(workload, table.kind, block) for block in table.device_updates)
        if not missing(host) or spared < least:
            break
        least = spared + missing(host)
        made, host = plan(least)
    if not missing(host):
        return made, host
    most = plan(ALL)
    return most if most[1].total_bytes < host.total_bytes else (made, host)


def _best(
    found: Sequence[PlannedOnHost], machine: Hardware | None, missing: Callable[[HostPlan], int]
) -> PlannedOnHost:
    """Of those that fit the host the fastest; if none does, the one that takes the least of it."""
    fits = [each for each in found if not missing(each[1])]
    if len(fits) < 2 or machine is None:
        return fits[0] if fits else min(found, key=lambda each: each[1].total_bytes)
    return min(fits, key=lambda each: each[0].schedule.simulate(machine).step_s)


def _result_bytes(made: StepChoices) -> int:
    workload = made.schedule.known_workload()
    return len(made.captures) * sum(result_bytes(workload, block) for block in made.schedule.results)
