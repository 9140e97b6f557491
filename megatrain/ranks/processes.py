"""Ranks: the processes of one host that train one model together, how they meet, and how they find one that ended."""

from __future__ import annotations

import json
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatrain.checks import Rule
from megatrain.device import Device
from megatrain.errors import ExecuteError, OptionError, RanksError
from megatrain.ranks.shared_memory import PAGE, SharedMemory, can_tell_copies, close_all, end_of, host_name
from megatrain.ranks.shared_store import SharedStore
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

    The losses of a step are such code: ranks have other numbers of micro-batches, and wait for each other's gradients.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            raise ExecuteError(
                f"the loss exchanges values with other processes ({name}), within a training step of all.\n"
                "  Ranks take their losses at other moments, and wait for each other's gradients: maybe for ever.\n"
                "  Exchange them before the model's call or after the step: in a callback, or where they are logged."
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
LOOK_S = 0.5
"""How often a rank that waits looks whether another one has failed or ended."""
ENDED_S = 5.0
"""How long to look for the rank because of which a connection broke."""
POLL_S = 5e-5
"""How often a rank looks whether another one is done."""
_TRANSFER = timedelta(days=7)  # ranks that live are waited for
_made: Counter[str] = Counter()
_GONE = "Look at the output of that process. Start all ranks again, and load the latest checkpoint."

PROCESS_GROUP = Rule(
    "a process group of torch.distributed",
    "{name}=torch.distributed.group.WORLD, after torch.distributed.init_process_group",
    lambda value: None if isinstance(value, ProcessGroup) else "is no process group that this process is part of",
)


class Ranks:
    """The processes of one host that train one model together; all of them make it at the same time.

    They meet by collectives of Gloo, and share memory.

    Args:
        group: The process group of the user.

    Raises:
        RanksError: If another rank doesn't come; if ranks can't share memory, as on several hosts.

    Attributes:
        rank: This rank, from 0.
        size: How many ranks there are.
        memory: What they share.
        store: The model's state there.
        count: How many steps all ranks have begun.
        num_areas: How many kinds of landings have their place in `memory`.
        board_bytes: Bytes there of what ranks tell each other of landings.
    """

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        name = f"{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1
        of_group: Any = group.get_group_store()
        store = dist.PrefixStore(f"megatrain/{name}", of_group.clone())
        self.count = self.num_areas = self.board_bytes = 0
        self._groups: list[Any] = []  # what `_abandon` keeps
        self._ends: dict[int, int] = {}
        self._failures: torch.Tensor | None = None
        self._wait_for_all(store)
        self._meetings: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("meetings", store), self.rank, self.size, timedelta(seconds=MEETING_S)
        )
        self._groups.append(self._meetings)
        self.memory = self._shared_memory()
        self.store = SharedStore(self.memory, self.rank, self.size)
        # The first pages: why each rank has failed, a text after its length.
        self._failures = torch.frombuffer(self.memory.landing(0, self.size * PAGE), dtype=torch.uint8)

    @staticmethod
    def of(group: ProcessGroup | None) -> Ranks | None:
        """The ranks of a group; None for a process that trains alone."""
        return None if group is None or group.size() == 1 else Ranks(group)

    def _wait_for_all(self, store: Any) -> None:
        store.set(f"here/{self.rank}", "")
        keys = [f"here/{rank}" for rank in range(self.size)]
        try:
            store.wait(keys, timedelta(seconds=MEETING_S))
        except RuntimeError as error:
            with suppress(RuntimeError):
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise RanksError(
                    f"rank {', '.join(missing)} didn't come within {MEETING_S:.0f} s.\n"
                    "  All ranks of the process group compile the model, in the same order among several models.\n"
                    "  Call megatrain.compile(model, process_group=...) on each rank."
                ) from error
            raise RanksError(f"the store of the process group can't be reached.\n  {_GONE}") from error

    def _shared_memory(self) -> SharedMemory:
        """Memory that all ranks map; all of them call this at the same time."""
        told = self.exchange([host_name(), os.getpid(), can_tell_copies()])
        is_able = len({name for name, *_ in told}) == 1 and all(can for *_, can in told)
        file = SharedMemory.made() if is_able and self.rank == 0 else None
        addresses = self.exchange(None if file is None else file.address)
        if is_able and file is None:
            with suppress(OSError):  # nobody shares then: each finds that out below
                file = SharedMemory.opened(addresses[0])
        if not all(self.exchange(file is not None)) or file is None:
            raise RanksError(
                f"the {self.size} ranks share no memory: they are on several hosts, or the system has none to share.\n"
                "  Ranks that train together are processes of one Linux host, with one store for all of them.\n"
                "  On several hosts take FSDP2 or DeepSpeed; or train on one host."
            )
        ends = {rank: end_of(process) for rank, (_, process, _) in enumerate(told) if rank != self.rank}
        self._ends = {rank: end for rank, end in ends.items() if end is not None}
        weakref.finalize(self, close_all, list(self._ends.values()))
        return file

    def announce(self, text: str, rank: int | None = None) -> None:
        """Tells all ranks that wait that this one has failed, or that another one was found to have ended."""
        if self._failures is None:
            return
        content = text.encode()[: PAGE - 8]
        page = self._failures[(own := self.rank if rank is None else rank) * PAGE : (own + 1) * PAGE]
        with self.memory.locked():
            page[8 : 8 + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            page[:8].view(torch.int64)[0] = len(content)

    def look(self) -> None:
        """Looks for a rank that can't go on.

        Raises:
            RanksError: Naming the rank.
        """
        if self._failures is None:
            return
        for rank in range(self.size):
            page = self._failures[rank * PAGE : (rank + 1) * PAGE]
            if rank != self.rank and (nbytes := int(page[:8].view(torch.int64)[0])):
                raise RanksError(f"rank {rank} failed: {bytes(page[8 : 8 + nbytes].tolist()).decode(errors='replace')}")
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        for rank, end in self._ends.items():
            if end in found:
                self.announce(f"it ended.\n  {_GONE}", rank)
                raise RanksError(f"rank {rank} ended.\n  {_GONE}")

    def exchange(self, value: Any, go_on: Callable[[], object] = lambda: None) -> list[Any]:
        """Gives a value to all ranks; returns those of all, by rank.

        Args:
            value: Numbers, texts, lists and dictionaries.
            go_on: Called now and then; raises an error to give the wait up.

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

    def _gathered(self, own: torch.Tensor, go_on: Callable[[], object]) -> list[torch.Tensor]:
        found = [torch.zeros_like(own) for _ in range(self.size)]
        options: Any = dist.distributed_c10d.AllgatherOptions()
        options.timeout = _TRANSFER
        over = threading.Event()
        try:
            future = self._meetings.allgather([found], [own], options).get_future()
            future.add_done_callback(lambda _: over.set())
            while not over.wait(LOOK_S):
                go_on()
                try:
                    self.look()
                except RanksError:
                    if not over.wait(LOOK_S):  # a rank may end as soon as it has answered
                        raise
            future.value()
        except BaseException as error:
            self._abandon()
            if isinstance(error, RuntimeError):
                raise self._reason(error) from error
            raise
        return found

    def _reason(self, error: BaseException) -> RanksError:
        """The rank because of which a meeting failed: as a rule it ended, and its connections with it."""
        until = time.monotonic() + ENDED_S
        try:
            while time.monotonic() < until:
                self.look()
                time.sleep(LOOK_S / 10)
        except RanksError as found:
            return found
        return RanksError(f"a meeting of the ranks failed: {type(error).__name__}: {error}\n  {_GONE}")

    def wait_until(self, is_over: Callable[[], bool], go_on: Callable[[], object]) -> None:
        """Returns once something of other ranks is over.

        Args:
            is_over: Asked again and again.
            go_on: Called as often; raises an error if this rank has given up.

        Raises:
            RanksError: If another rank can't go on.
        """
        looked = time.monotonic()
        while not is_over():
            go_on()
            if time.monotonic() - looked > LOOK_S:
                self.look()
                looked = time.monotonic()
            time.sleep(POLL_S)
        with self.memory.locked():
            pass  # what others have written before is read after

    def _abandon(self) -> None:
        """Keeps the groups for the life of the process: the end of a group waits for its transfers, maybe for ever."""
        if self._groups:
            # What a thread that never ends holds isn't let go of when Python ends.
            threading.Thread(target=_hold, args=self._groups, name="megatrain-abandoned", daemon=True).start()
            self._groups = []


def _hold(*_: object) -> None:
    threading.Event().wait()


NO_BACKWARD = (
    "loss.backward() of a model that was compiled with process_group= isn't possible.\n"
    "  Its gradients would be those of this rank alone; a TrainStep makes those of all ranks.\n"
    "  Train with megatrain.TrainStep, or compile without process_group."
)
"""Why `loss.backward()` of such a model is refused."""
