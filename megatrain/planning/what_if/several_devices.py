"""on_devices(): the planned step on each of several devices of one or more hosts, which train one model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatrain.checks import either, one_of, optional
from megatrain.errors import ExecuteError, LowerError, MegatrainError, OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.options import REPLICATE, ROUND, SHARD
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.what_if.devices_plan import DevicesPlan
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.check.hosts_rules import HostSums, check_hosts, host_sums
from megatrain.scheduler.items import Stream
from megatrain.scheduler.timing.simulate_devices import ONE_HOST, Hosts, simulate_devices
from megatrain.sizes import SIZE, parse_bytes

MOST_DEVICES = 64
NO_LINK = "none"
LINK = optional(either(SIZE, one_of(NO_LINK)))
"""What a device gets from the others of its host in a second, or that it gets nothing."""
NETWORK = "25GB"
"""Bytes a second between hosts where nobody says otherwise: 200 Gbit/s."""
_NEAR = 1.02
"""A step that takes at most so many times what its compute takes isn't planned in a further way."""


def hosts_of(number: int, network: int | str | None) -> Hosts:
    """Makes hosts, and the network between them.

    Args:
        number: How many.
        network: Bytes that go from one to another in a second, each way; None is 200 Gbit/s.
    """
    return Hosts(number, parse_bytes(NETWORK if network is None else network, "network"))


def best_on_devices(
    plans: Sequence[PlannedStep],
    num_devices: int,
    hosts: Hosts = ONE_HOST,
    link: int | str | None = None,
    across_devices: str = "auto",
) -> DevicesPlan:
    """Of several ways to split a step, the one whose step of all devices is the shortest.

    More micro-batches may be faster on one device and slower on several: the next rank's second one waits for this
    rank's last.

    Args:
        plans: Of one device, with its micro-batches; at least one fits.
        num_devices: As in `on_devices`.
        hosts: See there.
        link: See there.
        across_devices: See there.

    Raises:
        OptionError: See `on_devices`.
        ScheduleError: If no rank's step fits its device.
    """
    found: list[DevicesPlan] = []
    error: MegatrainError | None = None
    for plan in sorted((plan for plan in plans if plan.fits), key=_alone_s):
        fed = [each.step_s for each in found if not each.is_refused]
        if fed and min(fed) <= _least_s(plan, across_devices):
            continue
        try:
            found.append(on_devices(plan, num_devices, hosts, link, across_devices))
        except (ScheduleError, ExecuteError, LowerError) as refused:
            error = error or refused
    if not found:
        assert error is not None
        raise error
    return _best(found)


def _best(plans: Sequence[DevicesPlan]) -> DevicesPlan:
    """The shortest step, of those that a host can hold and feed if there are any; the first one of equals."""
    return min(plans, key=lambda each: (each.is_refused, each.step_s))


def _least_s(plan: PlannedStep, across_devices: str) -> float:
    """Seconds that a step of several devices takes at least: where each streams all weights, those of one alone.

    In the other ways a device copies fewer weights, but computes as much.
    """
    if plan.simulation is None or across_devices == REPLICATE:
        return _alone_s(plan)
    return plan.simulation.busy.get(Stream.COMPUTE, 0.0) * plan.simulation.step_s


def _alone_s(plan: PlannedStep) -> float:
    return plan.simulation.step_s if plan.simulation is not None else 0.0


def on_devices(
    plan: PlannedStep,
    num_devices: int,
    hosts: Hosts = ONE_HOST,
    link: int | str | None = None,
    across_devices: str = "auto",
) -> DevicesPlan:
    """Plans the step of each rank, and simulates all of them.

    `"auto"` plans all three ways, `"shard"` only where devices have links, and takes the one with the shortest step of
    those that a host can hold and feed. No blocks are dealt where the other ways compute all the time.

    Args:
        plan: Of one device, with its micro-batches.
        num_devices: How many there are in all, at least two, on each host as many.
        hosts: Where they are.
        link: Bytes that a device gets from the others of its host in a second; `"none"` if they have no links, None if
            the machine says it.
        across_devices: `"auto"` as above; `"replicate"`: each device streams all weights; `"shard"`: it copies a part,
            and gathers the rest from the others of its host; `"round"`: each host deals the blocks to its devices.

    Raises:
        OptionError: If the plan has no machine, or can't be planned again; or if nothing can come in shards, or
            masters are rounded, whose ranks share no store.
        ScheduleError: If a rank's step doesn't fit its device.
        LowerError: If the blocks can't be dealt.
    """
    if plan.hardware is None or plan.asked is None:
        raise OptionError(
            "this plan can't be put on several devices: it has no machine, or doesn't know its model.\n"
            "  The seconds of a step follow from the rates of a machine.\n"
            '  Call megatrain.plan with hardware="rtx-4090", say.'
        )
    machine, size = plan.hardware, num_devices // hosts.number
    known = machine.further_rates.get(Stream.GATHER)
    rate = known if link is None else None if link == NO_LINK else parse_bytes(link, "link")
    if across_devices == SHARD and (rate is None or size == 1):
        raise OptionError(
            'across_devices="shard" is impossible: nothing says what a device gets from the others of its host.\n'
            "  Each device copies a part of the weights, and gathers the rest over links such as NVLink.\n"
            '  Give link="400GB", say, and several devices for each host; or leave across_devices out.'
        )
    if across_devices in (SHARD, ROUND) and plan.asked.options["masters"] == "rounded":
        raise OptionError(
            f'across_devices="{across_devices}" with masters="rounded" is impossible.\n'
            "  Shards, and blocks that are dealt to devices, come from one store; then each rank has its own.\n"
            '  Plan with masters="exact", or leave across_devices out.'
        )
    linked = machine
    if rate is not None:
        linked = replace(machine, further_rates={**machine.further_rates, Stream.GATHER: rate})
    ways: dict[str, Callable[[], DevicesPlan]] = {
        REPLICATE: lambda: _on_devices(plan, num_devices, hosts, machine),
        SHARD: lambda: _on_devices(plan, num_devices, hosts, linked, size),
        ROUND: lambda: _dealt(plan, num_devices, hosts, machine),
    }
    if across_devices != "auto":
        return ways[across_devices]()
    found = [ways[REPLICATE]()]
    # Shards and dealt blocks come from one store, to several devices of a host.
    if size == 1 or not found[0].ranks[0].schedule.kind.is_shared:
        return found[0]
    for way in (SHARD, ROUND):
        best = _best(found)
        is_least = not best.is_refused and best.step_s <= _NEAR * _least_s(plan, way)
        if (way == SHARD and rate is None) or is_least:
            continue
        try:
            found.append(ways[way]())
        except (ScheduleError, ExecuteError, LowerError):  # whole weights fit
            continue
    return _best(found)


def _on_devices(plan: PlannedStep, num_devices: int, hosts: Hosts, hardware: Hardware, shards: int = 1) -> DevicesPlan:
    asked, simulation = plan.asked, plan.simulation
    assert asked is not None
    assert simulation is not None
    names = ["first", *["middle"] * (num_devices - 2), "last"]
    changed = {"hardware": hardware, "shards": shards}
    found = {name: asked.again({"ranks": name, **changed}) for name in dict.fromkeys(names)}
    for each in found.values():
        error = each.refused()
        if error is not None:
            raise error
    ranks = [found[name] for name in names]
    simulated = simulate_devices([each.schedule for each in ranks], hardware, hosts)
    return DevicesPlan(plan, ranks, simulation.step_s, simulated, hosts)


def _dealt(plan: PlannedStep, num_devices: int, hosts: Hosts, hardware: Hardware) -> DevicesPlan:
    """The step where each host deals the blocks to its devices: each runs the micro-batches of all of its host."""
    asked, simulation = plan.asked, plan.simulation
    assert asked is not None
    assert simulation is not None
    size, number = num_devices // hosts.number, hosts.number
    micro_batches = plan.schedule.kind.micro_batches * size
    common = {"hardware": hardware, "micro_batches": micro_batches, "devices": size}
    names = ["first", *["middle"] * (number - 2), "last"] if number > 1 else ["alone"]
    made = {
        name: [asked.again({**common, "ranks": name, "device_number": device}) for device in range(size)]
        for name in dict.fromkeys(names)
    }
    sums: dict[str, HostSums] = {}
    for name, mates in made.items():
        for each in mates:
            error = each.refused()
            if error is not None:
                raise error
        tables = [each.schedule for each in mates]
        sums[name] = host_sums(tables, check_devices(tables))
    if number > 1:
        check_hosts([sums[name] for name in names])
    ranks = [each for name in names for each in made[name]]
    simulated = simulate_devices([each.schedule for each in ranks], hardware, hosts)
    return DevicesPlan(plan, ranks, simulation.step_s, simulated, hosts)
