"""DevicesHost: the host memory that the ranks of one host take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.counts import counted
from megatrain.errors import ExecuteError
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.planned_step import UNBOUNDED, PlannedStep
from megatrain.ranks.channels.host_channel import NUM_ROOMS
from megatrain.scheduler.dealt.messages import mail_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.simulate_devices import Hosts
from megatrain.sizes import format_bytes

# Rows of a host plan that each process has for itself; of the others the ranks of a host share one copy.
_OWN = ("state of no block", "constants", "slab", "parks", "values on the host", "device memory", "update scratch")


@dataclass(frozen=True, slots=True)
class DevicesHost:
    """The memory of the host whose ranks take the most.

    Args:
        num_ranks: How many it has.
        shared_bytes: What all of them share: parameters, masters, states of optimizers, and gradients that stay.
        own_bytes: What each has, of the rank that has the most.
        room_bytes: Rooms through which sums and totals of gradients go.
        total_bytes: All of it; the processes themselves come on top.
    """

    num_ranks: int
    shared_bytes: int
    own_bytes: int
    room_bytes: int
    total_bytes: int

    @staticmethod
    def of(ranks: Sequence[PlannedStep], hosts: Hosts) -> DevicesHost:
        """Adds up what the ranks of each host take.

        Args:
            ranks: Their steps.
            hosts: Where they are.
        """
        numbers = hosts.of(len(ranks))
        found: list[DevicesHost] = []
        for host in sorted(set(numbers)):
            first, *_ = mates = [each for each, number in zip(ranks, numbers, strict=True) if number == host]
            own = [own_bytes(each.host, each.schedule.kind) for each in mates]
            shared = first.host.total_bytes - own[0]
            sent = [sent_bytes(number, each.schedule) for number, each in enumerate(mates)]
            own = [state + rooms for state, rooms in zip(own, sent, strict=True)]
            found.append(DevicesHost.made(shared, own, largest_room(first.schedule), first.schedule.kind))
        return max(found, key=lambda each: each.total_bytes)

    @staticmethod
    def made(shared: int, own: Sequence[int], room: int, kind: StepKind) -> DevicesHost:
        """Adds up bytes.

        Args:
            shared: What all ranks share.
            own: What each of them has.
            room: The largest room.
            kind: Of their steps.
        """
        # From each rank to the next, and back from the last one, unless totals stay where they come.
        channels = len(own) - 1 + (not kind.keeps_totals) if len(own) > 1 else 0
        rooms = channels * NUM_ROOMS * room
        return DevicesHost(len(own), shared, max(own), rooms, shared + sum(own) + rooms)

    def missing_bytes(self, host_memory: int | None) -> int:
        """How much more memory the ranks take than a host has; 0 if nobody says how much that is."""
        return 0 if host_memory is None else max(0, self.total_bytes - host_memory)

    def check(self, host_memory: int | None) -> None:
        """Refuses ranks that take more memory than their host has.

        Raises:
            ExecuteError: With what is missing.
        """
        missing = self.missing_bytes(host_memory)
        if missing:
            assert host_memory is not None
            raise ExecuteError(
                f"{counted(self.num_ranks, 'rank')} of one host need {format_bytes(self.total_bytes)} of its memory, "
                f"{format_bytes(host_memory)} are available.\n"
                f"  {self.parts()}; {format_bytes(missing)} are missing.\n"
                f"  Use fewer devices, or smaller or fewer micro-batches, of which less is parked{self._further()}."
            )

    def _further(self) -> str:
        return "" if self.shared_bytes else '; or masters="exact", of which ranks share one copy'

    def parts(self) -> str:
        """Says what takes it."""
        if not self.shared_bytes:
            return (
                f"Each rank has up to {format_bytes(self.own_bytes)}, they share nothing, and "
                f"{format_bytes(self.room_bytes)} are between them"
            )
        return (
            f"All share {format_bytes(self.shared_bytes)}, each has up to {format_bytes(self.own_bytes)}, and "
            f"{format_bytes(self.room_bytes)} are between them"
        )

    def line(self, host_memory: int | None) -> str:
        """A line about it, beside what there is."""
        known = host_memory is not None and host_memory < UNBOUNDED
        fits = "fits" if not self.missing_bytes(host_memory) else "doesn't fit"
        there = f" of {format_bytes(host_memory)}: {fits}" if known and host_memory is not None else ""
        parts = self.parts()
        return f"{format_bytes(self.total_bytes)}{there}. {parts}"


def own_bytes(plan: HostPlan, kind: StepKind) -> int:
    """The bytes of a rank's plan that no other rank of its host shares."""
    if not kind.is_shared and not kind.is_dealt:
        return plan.total_bytes
    # Gradients that wait for a norm or for serial updates are there once.
    names = _OWN if kind.keeps_totals else (*_OWN, "gradients")
    return sum(map(plan.bytes_of, names))


def sent_bytes(device: int, schedule: Schedule) -> int:
    """The bytes of the rooms that a rank has for itself, where blocks are dealt.

    They are those for what it sends to other devices, and where there are several hosts one for each way of its sums:
    from the host before, to the next one, and totals.

    Args:
        device: The number of its device on its host.
        schedule: Of its step.
    """
    kind = schedule.kind
    if not kind.is_dealt:
        return 0
    ways = kind.receives + kind.sends + kind.has_other_ranks
    return mail_bytes(device, schedule) + ways * _largest_gradients(schedule)


def largest_room(schedule: Schedule) -> int:
    """The bytes of the largest room through which gradients go from rank to rank of a host; none where they don't."""
    return 0 if schedule.kind.is_dealt else _largest_gradients(schedule)


def _largest_gradients(schedule: Schedule) -> int:
    return max((block.landing_bytes for block in schedule.known_workload().blocks), default=0)
