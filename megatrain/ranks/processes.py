"""Ranks: the processes of one host that train one model together, how they meet, and how they find one that ended."""

from __future__ import annotations

import json
import os
import select
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatrain.base.checks import Rule
from megatrain.base.torch_private import TorchDispatchMode
from megatrain.device import Device
from megatrain.errors import ApartWarning, ExecuteError, OptionError, RanksError
from megatrain.ranks.shared_memory import PAGE, SharedMemory, can_tell_copies, close_all, end_of
from megatrain.ranks.shared_store import SharedStore

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


def check_ranks(group: ProcessGroup | None, kernels: str, masters: str) -> None:
    """Refuses what several ranks can't do.

    Raises:
        OptionError: Naming the option.
    """
    refused = {
        f'kernels="{kernels}"': (kernels == "inductor", "Each rank would compile kernels of its own, whose bits may "
                                 "differ.", 'Leave kernels out: "eager" has the bits of one process.'),
        f'masters="{masters}"': (masters == "rounded", "Ranks share one copy of the parameters, and can't share the "
                                 "generators that round these.", "Leave masters out: ranks share low halves, too."),
    }  # fmt: skip
    for option, (is_given, rule, way) in refused.items():
        if is_given and group is not None and group.size() > 1:
            raise OptionError(f"process_group= has {group.size()} ranks, but {option}.\n  {rule}\n  {way}")


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


def refuse_difference(told: Sequence[Mapping[str, str]], way_out: str, *, nothing: str = "nothing") -> None:
    """Refuses values that differ between ranks: all of them say the same.

    Args:
        told: By rank and by name.
        way_out: What the user can do about a difference.
        nothing: What stands for a name that a rank hasn't told.

    Raises:
        RanksError: Naming the first difference.
    """
    for rank, theirs in enumerate(told[1:], start=1):
        for name in {**told[0], **theirs}:
            first, other = told[0].get(name, nothing), theirs.get(name, nothing)
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
POLL_S, LATER_POLL_S = 5e-5, 2e-3
"""How often a rank looks whether another one is done; and once it has waited for `LOOK_S`, so that a rank that waits
for minutes leaves the processor to the others."""
_FAILED, _MET, _LENGTHS = 0, 1, 2
"""Numbers of a rank on the board: the length of the letter that says why it failed, its latest meeting, and the lengths
of its letters in that meeting and the one before."""
_made: Counter[str] = Counter()
_GONE = "Look at the output of that process. Start all ranks again, and load the latest checkpoint."

PROCESS_GROUP = Rule(
    "a process group of torch.distributed",
    "{name}=torch.distributed.group.WORLD, after torch.distributed.init_process_group",
    lambda value: None if isinstance(value, ProcessGroup) else "is no process group that this process is part of",
)


class Ranks:
    """The processes of one host that train one model together; all of them make it at the same time.

    They find each other by the store of their process group. From then on they meet in memory that they share.

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
        end: Another rank has failed in the middle of a step, or ended, so that no step can follow.
    """

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        name = f"{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1
        of_group: Any = group.get_group_store()
        self.count = self.num_areas = self.board_bytes = self._num_meetings = 0
        self.end: RanksError | None = None
        self._ends: dict[int, int] = {}
        try:
            self.memory = self._shared_memory(dist.PrefixStore(f"megatrain/{name}", of_group.clone()))
        except RuntimeError as error:
            raise RanksError(f"the store of the process group can't be reached.\n  {_GONE}") from error
        self.store = SharedStore(self.memory, self.rank, self.size)
        self._board = self.memory.words(0, self.size, PAGE // 8)

    def _shared_memory(self, store: Any) -> SharedMemory:
        """Memory that all ranks map; all of them call this at the same time."""
        can = can_tell_copies()
        file = SharedMemory.made() if can and self.rank == 0 else None
        told = self._told(store, "here", [os.getpid(), None if file is None else file.address])
        if can and file is None and told[0][1] is not None:
            with suppress(OSError):  # nobody shares then: each finds that out below
                file = SharedMemory.opened(told[0][1])
        if file is not None:
            ends = {rank: end_of(process) for rank, (process, _) in enumerate(told) if rank != self.rank}
            self._ends = {rank: end for rank, end in ends.items() if end is not None}
            weakref.finalize(self, close_all, list(self._ends.values()))
        if not all(self._told(store, "open", file is not None)) or file is None:
            raise RanksError(
                f"the {self.size} ranks share no memory: they are on several hosts, or the system has none to share.\n"
                "  Ranks that train together are processes of one Linux host, with one store for all of them.\n"
                "  On several hosts take FSDP2 or DeepSpeed; or train on one host."
            )
        return file

    def _told(self, store: Any, what: str, value: Any) -> list[Any]:
        """As `exchange`, before there is memory that ranks share."""
        store.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        until = time.monotonic() + MEETING_S
        while not store.check(keys):
            self._look_for_ends()
            if time.monotonic() > until:
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise RanksError(
                    f"rank {', '.join(missing)} didn't come within {MEETING_S:.0f} s.\n"
                    "  All ranks of the process group compile the model, in the same order among several models.\n"
                    "  Call megatrain.compile(model, process_group=...) on each rank."
                )
            time.sleep(LOOK_S / 50)
        return [json.loads(store.get(key)) for key in keys]

    def announce(self, text: str, rank: int | None = None) -> None:
        """Tells all ranks that wait that this one has failed, or that another one was found to have ended."""
        content, own = text.encode(), self.rank if rank is None else rank
        with self.memory.locked():
            self.memory.write_letter(2 * self.size + own, content)
            self._board[own, _FAILED] = len(content)

    def look(self) -> None:
        """Looks for a rank that can't go on.

        Raises:
            RanksError: Naming the rank.
        """
        for rank, nbytes in enumerate(self._board[:, _FAILED].tolist()):
            if nbytes and rank != self.rank:
                text = self.memory.letter(2 * self.size + rank, nbytes).decode(errors="replace")
                self.end = RanksError(f"rank {rank} failed: {text}")
                raise self.end
        self._look_for_ends(lambda rank: self.announce(f"it ended.\n  {_GONE}", rank))

    def _look_for_ends(self, tell: Callable[[int], object] = lambda _: None) -> None:
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        for rank, end in self._ends.items():
            if end in found:
                tell(rank)
                self.end = RanksError(f"rank {rank} ended.\n  {_GONE}")
                raise self.end

    def exchange(self, value: Any) -> list[Any]:
        """Gives a value to all ranks; returns those of all, by rank.

        Each writes a letter, and waits for those of the others. A letter stays until the meeting after the next: to
        begin that, all must have begun the next, and so have read this one's.

        Args:
            value: Numbers, texts, lists and dictionaries.

        Raises:
            RanksError: If another rank can't answer.
        """
        content = json.dumps(value).encode()
        self._num_meetings += 1
        number, which = self._num_meetings, self._num_meetings % 2
        lengths, met = self._board[:, _LENGTHS + which], self._board[:, _MET]
        with self.memory.locked():
            self.memory.write_letter(2 * self.rank + which, content)
            lengths[self.rank], met[self.rank] = len(content), number
        self.wait_until(lambda: int(met.min()) >= number, lambda: None)
        letters = enumerate(lengths.tolist())
        return [json.loads(self.memory.letter(2 * rank + which, nbytes)) for rank, nbytes in letters]

    def meet(self, at: str, word: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tells all ranks something, and hears what they tell, by rank.

        Args:
            at: The call in which this rank is, in words.
            word: Numbers, texts, lists and dictionaries. A rank that can't go on tells `failed`.

        Raises:
            RanksError: If another rank failed, or is in another call.
        """
        words = self.exchange({"at": at, **word})
        for rank, other in enumerate(words):
            if rank != self.rank and "failed" in other:
                raise RanksError(f"rank {rank} failed before the step: {other['failed']}")
        if len({other["at"] for other in words}) > 1:
            places = ", ".join(f"rank {rank} in {other['at']}" for rank, other in enumerate(words))
            raise RanksError(
                f"the ranks are in different calls: {places}.\n"
                "  All ranks make the same calls in the same order: steps and save().\n"
                "  Make this call on each rank: no rank writes a checkpoint or prepares a step for the others."
            )
        return words

    def compare(self, at: str, facts: Mapping[str, object], way_out: str) -> None:
        """Looks whether plain values, by their name in words, are the same on all ranks, which all meet here.

        Raises:
            RanksError: Naming the first difference, and the way out: the same on each rank.
        """
        words = self.meet(at, {"facts": {name: str(value) for name, value in facts.items()}})
        refuse_difference([word["facts"] for word in words], way_out)

    def wait_until(self, is_over: Callable[[], bool], go_on: Callable[[], object]) -> None:
        """Returns once something of other ranks is over.

        Args:
            is_over: Asked again and again.
            go_on: Called as often; raises an error if this rank has given up.

        Raises:
            RanksError: If another rank can't go on.
        """
        looked, pause = time.monotonic(), POLL_S
        while not is_over():
            go_on()
            if time.monotonic() - looked > LOOK_S:
                try:
                    self.look()
                except RanksError:
                    time.sleep(LOOK_S)
                    if not is_over():  # a rank may end as soon as it has answered
                        raise
                looked, pause = time.monotonic(), LATER_POLL_S
            time.sleep(pause)
        with self.memory.locked():
            pass  # what others have written before is read after


NO_BACKWARD = (
    "loss.backward() of a model that was compiled with process_group= isn't possible.\n"
    "  Its gradients would be those of this rank alone; a TrainStep makes those of all ranks.\n"
    "  Train with megatrain.TrainStep, or compile without process_group."
)
"""Why `loss.backward()` of such a model is refused."""


# -- a process that trains alone, although `torch.distributed` has others ----------------------------------------

Group = ProcessGroup | None
_said: WeakSet[nn.Module] = WeakSet()


def others_here() -> int:
    """How many processes the default group of `torch.distributed` has besides this one; 0 without such a group."""
    return dist.get_world_size() - 1 if dist.is_available() and dist.is_initialized() else 0


def refuse_apart() -> None:
    """Refuses a training step that other processes would know nothing of.

    Raises:
        ExecuteError: If there are others.
    """
    others = others_here()
    if others:
        raise ExecuteError(
            f"this step would train the model apart from the {others} other process{'es' if others > 1 else ''} of "
            "torch.distributed.\n"
            "  Gradients go to the processes of the model's process_group, and it was compiled without one.\n"
            "  Train together: megatrain.compile(model, process_group=torch.distributed.group.WORLD). Or train apart\n"
            "  on purpose, in a group of one: process_group=torch.distributed.new_subgroups(1)[0]."
        )


def note_apart(model: nn.Module, results: Sequence[torch.Tensor]) -> None:
    """Warns, once for each model, of a call without a group, whose gradients would be those of this process alone.

    Args:
        model: What was called.
        results: Of the call. Within `DistributedDataParallel` their gradients go to the others.
    """
    if model in _said or not others_here():
        return
    # Nothing public says that a module in `DistributedDataParallel` makes this call, but the calling code.
    callers = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
    if any(tensor.requires_grad for tensor in results) and DistributedDataParallel.__module__ not in callers:
        _said.add(model)
        warnings.warn(
            f"loss.backward() leaves the gradients of this process alone, and torch.distributed has {others_here()} "
            "others.\n"
            "  Nothing but DistributedDataParallel, or code of your own, adds theirs.\n"
            "  Train with a TrainStep, and compile(process_group=torch.distributed.group.WORLD); or say that you mean\n"
            "  it: process_group=torch.distributed.new_subgroups(1)[0].",
            ApartWarning,
            stacklevel=4,
        )
