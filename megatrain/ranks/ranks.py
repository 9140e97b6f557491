"""Ranks: the processes that train one model together, and everything that passes between them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatrain.checks import Rule
from megatrain.device import Device
from megatrain.errors import ExecuteError, OptionError, RanksError
from megatrain.ranks.channels import Channel, GoOn, HostChannel, LandingChannel
from megatrain.ranks.host import host_of
from megatrain.ranks.signs_of_life import LOOK_S, SignsOfLife
from megatrain.torch_private import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:  # torch may be built without; then nothing is one
    ProcessGroup = getattr(dist, "ProcessGroup", type("ProcessGroup", (), {}))


def check_cards(ranks: Ranks, device: Device) -> None:
    """Refuses ranks that compute on one card, each of which would plan with all of its memory. All ranks call it.

    Raises:
        RanksError: Naming them.
    """
    cards = ranks.exchange(device.identity())
    for card in filter(None, dict.fromkeys(cards)):
        found = [str(rank) for rank, other in enumerate(cards) if other == card]
        if len(found) > 1:
            raise RanksError(
                f"ranks {', '.join(found)} compute on the same device, {device} {device.card()}.\n"
                "  Each rank has a device of its own, whose memory it plans.\n"
                '  Give it one before compile: torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"])).'
            )


def check_ranks(group: ProcessGroup | None, kernels: str) -> None:
    """Refuses what several ranks can't do yet.

    Raises:
        OptionError: Naming the option.
    """
    if group is None or group.size() == 1:
        return
    if kernels == "inductor":
        raise OptionError(
            f'process_group= has {group.size()} ranks, but kernels="{kernels}".\n'
            "  Each rank would compile kernels of its own, whose bits may differ.\n"
            '  Leave kernels out: "eager" has the bits of one process.'
        )


class NoCollectives(TorchDispatchMode):
    """Refuses collectives of `torch.distributed` in the body, on this thread.

    The losses of a step are such code: a rank computes its own when the sum of the rank before has come, which that
    rank hands on after its own losses.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            raise ExecuteError(
                f"the loss exchanges values with other processes ({name}), within a training step of all.\n"
                "  A rank computes its loss when the sums of the rank before have come, so that one waits for this "
                "rank's loss\n"
                "  here, and would wait for ever.\n"
                "  Exchange them ahead of the model's call or behind the step: in a callback, or where they are logged."
            )
        return func(*args, **(kwargs or {}))


def meet(ranks: Ranks, at: str, word: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tells all ranks something, and hears what they tell, by rank.

    Args:
        ranks: Those that meet.
        at: The call in which this rank is, in words.
        word: Numbers, texts, lists and dictionaries. A rank that can't go on tells `failed`.

    Raises:
        RanksError: If another rank failed, or is in another call.
    """
    words = ranks.exchange({"at": at, **word})
    check_words(ranks, words)
    return words


def check_words(ranks: Ranks, words: Sequence[Mapping[str, Any]]) -> None:
    """Looks whether all ranks have met in one call, and can go on.

    Raises:
        RanksError: If not.
    """
    for rank, other in enumerate(words):
        if rank != ranks.rank and "failed" in other:
            raise RanksError(f"rank {rank} failed before the step: {other['failed']}")
    if len({other["at"] for other in words}) > 1:
        places = ", ".join(f"rank {rank} in {other['at']}" for rank, other in enumerate(words))
        raise RanksError(
            f"the ranks are in different calls: {places}.\n"
            "  All ranks make the same calls in the same order: steps and save().\n"
            "  Make this call on each rank: no rank writes a checkpoint or prepares a step for the others."
        )


def compare(ranks: Ranks, at: str, facts: Mapping[str, object], way_out: str) -> None:
    """Looks whether plain values are the same on all ranks, which all meet here.

    Args:
        ranks: See `meet`.
        at: See `meet`.
        facts: What must not differ, by its name in words.
        way_out: What the user can do about a difference.

    Raises:
        RanksError: Naming the first difference: the same on each rank.
    """
    told = [word["facts"] for word in meet(ranks, at, {"facts": {name: str(value) for name, value in facts.items()}})]
    for rank, theirs in enumerate(told[1:], start=1):
        for name in {**told[0], **theirs}:
            first, other = told[0].get(name, "nothing"), theirs.get(name, "nothing")
            if first != other:
                raise RanksError(
                    f"the ranks differ: {name} is {first} on rank 0, but {other} on rank {rank}.\n  {way_out}"
                )


def words_of(error: BaseException) -> str:
    """What other ranks are told of an error: its class and its first line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]


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
    """The processes of one host that train one model together; all of them make it at the same time.

    Ranks meet by collectives of Gloo. Sums of gradients go through channels, memory that the ranks share.

    Args:
        group: The process group of the user.

    Raises:
        RanksError: If another rank doesn't come, or ends meanwhile; if ranks can't share memory, as on several hosts.

    Attributes:
        rank: This rank, from 0.
        size: How many ranks there are.
        agreed: Set while all ranks take a step that none of them takes back.
        host: The ranks, and the memory that they share.
        place: Where this rank stands in the chain along which sums go, as in `StepKind`.
        before: From the rank before this one; None for the first.
        after: To the rank after this one; None for the last.
        totals: From the last rank to all others.
        kept_totals: The same, into memory where they stay.
    """

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        self.agreed = threading.Event()
        name = f"{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1
        of_group: Any = group.get_group_store()
        store = self._store = dist.PrefixStore(f"megatrain/{name}", of_group.clone())
        self._signs = SignsOfLife(store, self.rank, self.size)
        self._meet()

        self._groups: list[Any] = []  # what `_abandon` keeps
        self._is_abandoned = False
        place = dist.PrefixStore("meetings", store), self.rank, self.size
        self._meetings: Any = dist.ProcessGroupGloo(*place, _MEETING)
        self._groups.append(self._meetings)
        host = host_of(self.rank, self.exchange)
        if host is None or host.size < self.size:
            raise RanksError(
                f"the {self.size} ranks share no memory: they are on several hosts, or the system has none to share.\n"
                "  Ranks that train together are processes of one Linux host, with one store for all of them.\n"
                "  On several hosts take FSDP2 or DeepSpeed; or train on one host."
            )
        self.host, last = host, self.size - 1
        self.place = "first" if self.rank == 0 else "last" if self.rank == last else "middle"

        def channel(kind: type[HostChannel], number: int, giver: int, takers: Sequence[int]) -> Channel:
            taker = takers.index(self.rank) if self.rank in takers else None
            return kind(host.file, number, len(takers), taker, self.look)

        def pair(first: int) -> Channel | None:
            return channel(HostChannel, first, first, [first + 1]) if 0 <= first < last else None

        self.before, self.after = pair(self.rank - 1), pair(self.rank)
        self.totals = channel(HostChannel, self.size, last, range(last))
        self.kept_totals = channel(LandingChannel, self.size + 1, last, range(last))

    @staticmethod
    def of(group: ProcessGroup | None) -> Ranks | None:
        """The ranks of a group; None for a process that trains alone."""
        return None if group is None or group.size() == 1 else Ranks(group)

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

    def exchange(self, value: Any, go_on: GoOn = lambda: None) -> list[Any]:
        """Gives a value to all ranks; returns those of all, by rank.

        Args:
            value: Numbers, texts, lists and dictionaries.
            go_on: See `GoOn`.

        Raises:
            RanksError: If another rank can't answer.
        """
        content = json.dumps(value).encode()
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([text.numel()]), go_on)
        padded = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = self._gathered(padded, go_on)
        return [json.loads(bytes(t[: int(n)].numpy())) for t, n in zip(texts, sizes, strict=True)]

    def _gathered(self, own: torch.Tensor, go_on: GoOn) -> list[torch.Tensor]:
        found = [torch.zeros_like(own) for _ in range(self.size)]
        options: Any = dist.distributed_c10d.AllgatherOptions()
        options.timeout = _TRANSFER
        self._wait(lambda: self._meetings.allgather([found], [own], options), go_on)
        return found

    def look(self) -> None:
        """Looks for a rank that can't go on.

        Raises:
            RanksError: Naming the rank.
        """
        self._signs.look()
        if ended := self.host.ended():
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

    def _abandon(self) -> None:
        """Keeps the groups for the life of the process: the end of a group waits for its transfers, maybe for ever."""
        if not self._is_abandoned:
            self._is_abandoned = True
            # What a thread that never ends holds isn't let go of when Python ends.
            threading.Thread(target=_hold, args=self._groups, name="megatrain-abandoned", daemon=True).start()


def _hold(*_: object) -> None:
    threading.Event().wait()
