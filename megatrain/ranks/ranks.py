"""Ranks: the processes that train one model together, and everything that passes between them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatrain.checks import Rule
from megatrain.device import Device
from megatrain.errors import RanksError
from megatrain.ranks.chain import column, open_chain
from megatrain.ranks.channels.channel import GoOn
from megatrain.ranks.channels.gloo_channel import Send
from megatrain.ranks.channels.host_channel import POLL_S
from megatrain.ranks.channels.mailbox import Mailbox
from megatrain.ranks.host import Host, host_of
from megatrain.ranks.signs_of_life import LOOK_S, SignsOfLife, wait_until
from megatrain.ranks.weight_shards import WeightShards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:  # torch may be built without; then nothing is one
    ProcessGroup = getattr(dist, "ProcessGroup", type("ProcessGroup", (), {}))

MEETING_S = 600.0
"""How long a rank waits for the others to call `compile`."""
_MEETING = timedelta(seconds=MEETING_S)
_TRANSFER = timedelta(days=7)  # ranks that live are waited for; see `SignsOfLife`
_made: Counter[str] = Counter()

PROCESS_GROUP = Rule(
    "a process group of torch.distributed",
    "{name}=torch.distributed.group.WORLD, after torch.distributed.init_process_group",
    lambda value: None if isinstance(value, ProcessGroup) else "is no process group that this process is part of",
)


class Ranks:
    """The processes that train one model together; all of them make it at the same time.

    Ranks meet by collectives of Gloo. Sums of gradients go through channels: memory that ranks of one host share, or
    collectives of Gloo in groups of their own, where the order of those in one group is all that ranks must agree on.

    Args:
        group: The process group of the user.
        deals: Whether `deal_blocks` is called at once.

    Raises:
        RanksError: If another rank doesn't come, or ends meanwhile; for the rest see `deal_blocks`.

    Attributes:
        rank: This rank, from 0.
        size: How many ranks there are.
        agreed: Set while all ranks take a step that none of them takes back.
        host: The ranks of this host, which may share memory; None for a rank that has its host to itself, or can't.
        hosts: The ranks of each host that share memory, the host of rank 0 first.
        place: As in `Chain`, like the next four. The chain has all ranks; where blocks are dealt one of each host,
            those that have the same blocks.
        before: See there.
        after: See there.
        totals: See there.
        kept_totals: See there.
        shards: Divides copies of weights among the devices of this host; None unless `divide_weights` was called.
        mailbox: Has what crosses between devices to which blocks are dealt; None unless `deal_blocks` was called.
        link_bytes_per_s: What a device gets from the others of its host in a second, which `measure_links` finds: the
            least of all ranks; None if it wasn't called, or if one of them can't get weights from others.
    """

    def __init__(self, group: ProcessGroup, *, deals: bool = False):
        self.rank, self.size = group.rank(), group.size()
        self.agreed = threading.Event()
        self.shards: WeightShards | None = None
        self.mailbox: Mailbox | None = None
        self.link_bytes_per_s: float | None = None
        name = f"{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1
        of_group: Any = group.get_group_store()
        store = self._store = dist.PrefixStore(f"megatrain/{name}", of_group.clone())
        self._signs = SignsOfLife(store, self.rank, self.size)
        self._meet()

        self._groups: list[Any] = []  # what `_abandon` keeps
        self._is_abandoned = False
        self._meetings = self._gloo("meetings", range(self.size))
        self._of_host = self._meetings, self.size
        self.host = host_of(self.rank, self.exchange)

        self._mates: list[list[int]] = self.exchange([self.rank] if self.host is None else self.host.ranks)
        self.hosts = list(dict.fromkeys(map(tuple, self._mates)))
        if deals:
            self.deal_blocks()
        else:
            self._open_chain("all", range(self.size))

    def _gloo(self, what: str, members: Sequence[int]) -> Any:
        place = members.index(self.rank)
        group = dist.ProcessGroupGloo(dist.PrefixStore(what, self._store), place, len(members), _MEETING)
        self._groups.append(group)
        return group

    def _open_chain(self, what: str, members: Sequence[int]) -> None:
        def gloo(name: str, some: Sequence[int]) -> Any:
            return self._gloo(f"{what}/{name}", some)

        chain = open_chain(self.rank, members, self._mates, self.host, gloo, self._sender, self.look)
        self.place, self.before, self.after, self.totals, self.kept_totals = chain

    def deal_blocks(self) -> None:
        """Has each host deal the blocks of the model to the devices of its ranks; all ranks call it at the same time.

        Raises:
            RanksError: If hosts can't, or another rank ends meanwhile.
        """
        self._open_chain("columns", column(self.rank, self.hosts))
        assert self.host is not None
        if not self.is_one_host:
            self._of_host = self._gloo(f"host/{self.host.ranks[0]}", self.host.ranks), self.host.size
        self.mailbox = Mailbox(self.host.file, self.host.index, self.host.size, self.size + 2, self.look)

    @staticmethod
    def of(group: ProcessGroup | None, *, deals: bool = False) -> Ranks | None:
        """The ranks of a group; None for a process that trains alone."""
        return None if group is None or group.size() == 1 else Ranks(group, deals=deals)

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return len(self.hosts) == 1

    def divide_weights(self, device: Device) -> None:
        """Divides the copies of weights among the ranks of each host; all ranks call it at the same time.

        Raises:
            RanksError: If nothing moves shards between such devices.
        """
        if self.host is not None and not self._divides(self.host, device):
            raise RanksError(
                f"nothing moves memory from one device of the kind {device.kind} to another.\n"
                "  A device that gathers weights from others needs a backend of torch.distributed, such as NCCL.\n"
                '  Leave across_devices out: "replicate" copies whole weights to each device.'
            )

    def _divides(self, host: Host, device: Device) -> bool:
        store = dist.PrefixStore(f"shards/{host.ranks[0]}", self._store)
        group = device.collectives(store, host.index, host.size, _TRANSFER)
        if group is None:
            return False
        self._groups.append(group)
        self.shards = WeightShards(host.index, host.size, self._wait_on_device, group)
        return True

    def measure_links(self, device: Device) -> None:
        """Divides the copies of weights where it can, and measures how fast; all ranks call it at the same time.

        Raises:
            RanksError: If another rank ends meanwhile.
        """
        rate = None
        if self.host is not None and self._divides(self.host, device):
            assert self.shards is not None
            rate = self.shards.measured_rate(device, self.look)
        rates = self.exchange(rate)
        self.link_bytes_per_s = None if None in rates else min(rates)
        if None in rates:
            self.copy_whole_weights()

    def copy_whole_weights(self) -> None:
        """Lets go of what divides copies of weights, whose buffers take memory of the device; all ranks call it."""
        if self.shards is not None:
            self._groups.remove(self.shards.group)
        self.shards = None

    def _meet(self) -> None:
        until = time.monotonic() + MEETING_S
        while missing := self._signs.missing():
            self._signs.look()
            if time.monotonic() > until:
                names = ", ".join(map(str, missing))
                raise RanksError(
                    f"rank {names} didn't come within {MEETING_S:.0f} s.\n"
                    "  All ranks of the process group compile the model, in the same order among several models.\n"
                    "  Call megatrain.compile(model, process_group=...) on each rank."
                )
            time.sleep(LOOK_S / 10)

    def announce(self, text: str) -> None:
        """Tells all ranks that wait for this one that it has failed."""
        self._signs.announce(text)

    def exchange(self, value: Any, go_on: GoOn = lambda: None, *, is_of_host: bool = False) -> list[Any]:
        """Gives a value to all ranks; returns those of all, by rank.

        Args:
            value: Numbers, texts, lists and dictionaries.
            go_on: See `GoOn`.
            is_of_host: See `exchange_bytes`.

        Raises:
            RanksError: If another rank can't answer.
        """
        told = self.exchange_bytes(json.dumps(value).encode(), go_on, is_of_host=is_of_host)
        return [json.loads(content) for content in told]

    def exchange_bytes(self, content: bytes, go_on: GoOn = lambda: None, *, is_of_host: bool = False) -> list[bytes]:
        """Gives bytes to all ranks, or where blocks are dealt to those of this host; the rest as `exchange`."""
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        group, size = self._of_host if is_of_host else (self._meetings, self.size)
        sizes = self._gathered(torch.tensor([text.numel()]), group, size, go_on)
        padded = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = self._gathered(padded, group, size, go_on)
        return [bytes(t[: int(n)].numpy()) for t, n in zip(texts, sizes, strict=True)]

    def _gathered(self, own: torch.Tensor, group: Any, size: int, go_on: GoOn) -> list[torch.Tensor]:
        found = [torch.zeros_like(own) for _ in range(size)]
        options = _options(dist.distributed_c10d.AllgatherOptions())
        self._wait(lambda: group.allgather([found], [own], options), go_on)
        return found

    def _sender(self, group: Any, source: int) -> Send:
        """What gives bytes of a rank to all ranks of a group, or gets them."""
        options = _options(dist.BroadcastOptions())
        options.rootRank = source
        return lambda part, go_on: self._wait(lambda: group.broadcast([part], options), go_on)

    def look(self) -> None:
        """Looks for a rank that can't go on.

        Raises:
            RanksError: Naming the rank.
        """
        self._signs.look()
        ended = () if self.host is None else self.host.ended()
        if ended:
            raise self._signs.ended(ended)

    def wait_until_agreed(self, go_on: GoOn) -> None:
        """Returns once all ranks take the step."""
        while not self.agreed.wait(LOOK_S):
            go_on()

    def _wait(self, begin: Callable[[], Any], go_on: GoOn = lambda: None) -> None:
        """Begins a transfer and waits for its end.

        Raises:
            RanksError: If another rank can't go on. The group of this transfer is of no use then.
        """
        over = threading.Event()
        try:
            future = begin().get_future()
            future.add_done_callback(lambda _: over.set())
            while not over.wait(LOOK_S):
                go_on()
                self._signs.look()
            future.value()
        except BaseException as error:
            self._abandon()
            if isinstance(error, RuntimeError):
                raise self._signs.reason(error) from error
            raise

    def _wait_on_device(self, begin: Callable[[], Sequence[Any]], go_on: GoOn) -> None:
        """Begins collectives of devices on the current stream, and waits for their end there.

        Raises:
            RanksError: If another rank can't go on. The group of the collectives is of no use then.
        """
        try:
            for work in begin():
                wait_until(work.is_completed, go_on, self.look, POLL_S)
                work.wait()
        except BaseException as error:
            self._abandon()
            if isinstance(error, RuntimeError):
                raise self._signs.reason(error) from error
            raise

    def _abandon(self) -> None:
        """Keeps the groups for the life of the process: the end of a group waits for its transfers, maybe for ever."""
        if not self._is_abandoned:
            self._is_abandoned = True
            # What a thread that never ends holds isn't let go of when Python ends.
            threading.Thread(target=_hold, args=self._groups, name="megatrain-abandoned", daemon=True).start()


def _hold(*_: object) -> None:
    threading.Event().wait()


def _options(made: Any) -> Any:
    made.timeout = _TRANSFER
    return made
