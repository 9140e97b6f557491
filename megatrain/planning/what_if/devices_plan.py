"""DevicesPlan: the planned step on each of several devices, and what all of them take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.counts import counted
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.options import REPLICATE, ROUND, SHARD
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.what_if.devices_host import DevicesHost
from megatrain.scheduler.items import Stream
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.simulate_devices import ONE_HOST, DevicesSimulation, Hosts
from megatrain.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class DevicesPlan:
    """A step of several devices; prints itself.

    Args:
        alone: The step of one device, with the micro-batches of one.
        ranks: The step of each rank.
        alone_s: Seconds of `alone`.
        simulation: The step of all of them.
        hosts: Where they are.
    """

    alone: PlannedStep
    ranks: Sequence[PlannedStep] = field(repr=False)
    alone_s: float
    simulation: DevicesSimulation
    hosts: Hosts = ONE_HOST

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all devices a second; None without token ids."""
        tokens = self.alone.tokens_per_step
        return None if tokens is None else tokens * len(self.ranks) / self.step_s

    @property
    def efficiency(self) -> float:
        """The step of one device by itself, by the step of all: 1 if nobody waits for others."""
        return self.alone_s / self.step_s

    @property
    def across_devices(self) -> str:
        """How the work is divided among the devices of a host, as the option of `compile`."""
        kind = self.ranks[0].schedule.kind
        return ROUND if kind.is_dealt else SHARD if kind.shards > 1 else REPLICATE

    @property
    def host(self) -> DevicesHost:
        """The memory of a host that its ranks take together."""
        return DevicesHost.of(self.ranks, self.hosts)

    def check(self) -> None:
        """Refuses a step that takes more memory than a host has, or in which the devices wait for that memory.

        Raises:
            ExecuteError: If `host_memory` of the plan is too little for all ranks of a host.
            ScheduleError: If copies and updates take longer there than a device for its part.
        """
        self.host.check(self.alone.host_memory)
        if self.simulation.host_s <= self.alone_s:
            return
        number = len(self.ranks) // self.hosts.number
        fed = max(1, int(number * self.alone_s / self.simulation.host_s))
        raise ScheduleError(
            f"the host's memory can't feed {counted(number, 'device')}: copies and updates take "
            f"{self._host()}, and one device takes {format_s(self.alone_s)} for its part.\n"
            f"  Of these devices {self._weights()}, and gradients go from one to the next through the host.\n"
            f"  Use about {fed} of them, or more tokens in a step of each{self._further()}."
        )

    @property
    def is_refused(self) -> bool:
        """Whether `check` refuses it."""
        try:
            self.check()
        except (ExecuteError, ScheduleError):
            return True
        return False

    def _further(self) -> str:
        """A way out where nobody said that the devices have links."""
        has_links = self.across_devices != REPLICATE
        return "" if has_links else "; devices with links between them may gather weights (link)"

    def _weights(self) -> str:
        shards = self.ranks[0].schedule.kind.shards
        if self.across_devices == ROUND:
            return "each streams the weights of its own blocks, and micro-batches go from one to the next"
        if shards == 1:
            return "each streams all weights"
        assert self.ranks[0].hardware is not None
        rate = format_bytes(int(self.ranks[0].hardware.further_rates[Stream.GATHER]))
        return f"each copies 1/{shards} of all weights and gathers the rest at {rate}/s"

    def _host(self) -> str:
        return f"{format_s(self.simulation.host_s)} ({format_bytes(self.simulation.host_bytes)})"

    def __str__(self) -> str:
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.0f} tokens/s"
        busy = ", ".join(f"{stream} {part:.0%}" for stream, part in self.simulation.busy.items() if part >= 0.005)
        number, hosts = len(self.ranks) // self.hosts.number, self.hosts
        where = "one host"
        if hosts.number > 1:
            where = f"each of {hosts.number} hosts, {format_bytes(int(hosts.network_bytes_per_s))}/s between them"
        return "\n".join(
            [
                f"devices: {number} of {where}, {self._weights()} ({self.across_devices}); predicted",
                f"  step: {format_s(self.step_s)}{rate}; {self.efficiency:.2f} of what as many devices alone would do",
                f"  busy at most: {busy}",
                f"  host memory: {self.host.line(self.alone.host_memory)}",
                f"  reads and writes of it: {self._host()}" + " on a host" * (hosts.number > 1),
            ]
        )
