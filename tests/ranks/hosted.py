"""What ranks of two hosts do, each of which deals the blocks to its devices: functions that processes run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import megatrain
from megatrain.errors import ScheduleError
from megatrain.planning import dealt_tables
from megatrain.ranks import host
from megatrain.ranks.channels.gloo_channel import GlooChannel
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.check.hosts_rules import HostSums
from megatrain.training.attempts import agreed_tables
from tests.ranks.failing import refused
from tests.ranks.rounds import CASE as ONE_HOST
from tests.ranks.rounds import ROUND
from tests.ranks.sides import Case, begin, take, train
from tests.training.parity import seeded_stack, square, stack_batch

HOSTS = "aabb"
CASE = replace(ONE_HOST, deal=[(1, 1, 1, 1)] * 4)


def on_hosts(rank: int, hosts: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Does something as a rank of a host."""
    host.NAME = hosts[rank]
    try:
        return work(rank, *arguments)
    finally:
        host.NAME = None


def passing(rank: int) -> dict[str, Any]:
    """Where a rank stands after a step, what its sums go through, and what its table says."""
    compiled, _, step = begin(CASE, dist.group.WORLD)
    take(CASE, rank, step, [0])
    ranks, kind = compiled.megatrain.ranks, step.schedule.kind
    totals: Any = ranks.totals
    channels = {"before": ranks.before, "after": ranks.after, "totals": totals._between}
    return {
        "place": [ranks.place, kind.ranks, kind.store, kind.devices, kind.micro_batches],
        "channels": sorted(name for name, channel in channels.items() if isinstance(channel, GlooChannel)),
        "within": totals._within,
        "ops": sorted({op.what for op in step.schedule.ops} & {*"RPGXDV"}),
    }


def dealing_otherwise(rank: int, case: Case) -> Any:
    """The second host by itself would deal blocks the other way round."""
    own = dealt_tables.device_of_each
    if rank >= 2:
        dealt_tables.device_of_each = lambda *given: tuple(1 - device for device in own(*given))
    try:
        return train(case, dist.group.WORLD, rank)
    finally:
        dealt_tables.device_of_each = own


def nonfinite_hosts(rank: int) -> list[Any]:
    """The second step has gradients that aren't finite, by a rank of the second host; it is skipped by all."""
    model = seeded_stack(4)
    made = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD, **ROUND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = megatrain.TrainStep(made, optimizer, loss=square, max_grad_norm=1.0, on_nonfinite="skip")
    for number in range(3):
        step(stack_batch(10 * number + rank, 2) * (float("inf") if number == 1 and rank == 3 else 1.0))
    step.flush()
    return [step.progress.skipped, step.progress.nonfinite, step.progress.count, step.progress.grad_norm]


def differing_hosts(rank: int) -> list[str]:
    """Ranks of the second host train fewer parameters; then all train the same."""
    model = seeded_stack(4)
    made = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD, **ROUND)
    first = next(model.parameters())
    step = megatrain.TrainStep(made, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    first.requires_grad_(rank < 2)
    texts = [refused(lambda: step(stack_batch(rank, 2)))]
    first.requires_grad_(True)
    return [*texts, refused(lambda: step(stack_batch(rank, 2)))]


def _waiting(found: HostSums) -> HostSums:
    """A host whose first sum waits for its last total."""
    first, last = max(found.devices), min(found.devices)
    (what,) = {what for what, _ in found.waits} - {"G"}
    return replace(found, waits={**found.waits, (what, first): (("G", last),)})


def _unsound(*_: Any) -> Any:
    raise ScheduleError("these tables are no step")


def disturbed_hosts(rank: int, what: str) -> list[str]:
    """The second host has tables that can't be run with those of the first one; then it has others."""
    _, _, step = begin(CASE, dist.group.WORLD)
    own, check = agreed_tables.host_sums, agreed_tables.check_devices
    if rank >= 2 and what == "circle":
        agreed_tables.host_sums = lambda *given: _waiting(own(*given))
    elif rank >= 2:
        agreed_tables.check_devices = _unsound
    try:
        texts = [refused(lambda: step(CASE.batches(0)[rank]))]
    finally:
        agreed_tables.host_sums, agreed_tables.check_devices = own, check
    return [*texts, refused(lambda: step(CASE.batches(0)[rank])), str(step.progress.count)]


def failing_hosts(rank: int, op: str, who: int) -> tuple[str, str]:
    """An op of a rank fails; then there is another step."""
    chaos = Chaos(max_delay_s=0, fail=op) if rank == who else None
    case = replace(CASE, compile={**ROUND, "chaos": chaos, "transfer": "copy"})
    _, _, step = begin(case, dist.group.WORLD)
    return refused(lambda: step(case.batches(0)[rank])), refused(lambda: step(case.batches(1)[rank]))


def ungrouped(rank: int) -> str:
    """What `compile` says of hosts that can't deal the blocks alike."""
    return refused(lambda: megatrain.compile(seeded_stack(4), device="cpu", process_group=dist.group.WORLD, **ROUND))
