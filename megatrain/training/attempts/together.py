"""Together: what the ranks of a process group agree on around each step; a process alone agrees with itself.

A step has two meetings. Before it runs, each rank tells how much its micro-batches count, and a digest of everything
that must not differ. Before its first backward, each rank tells that its forward has succeeded; until then a rank may
run it again, with all others, and a failure leaves no trace on any rank. From then on sums of gradients travel, and a
rank that fails ends the training of all: some may have updated what others have not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from megatrain.compiled.inside import Compiled
from megatrain.counts import counted
from megatrain.errors import ExecuteError, RanksError
from megatrain.files.disk import digest_of
from megatrain.memory.host_limits import available_bytes
from megatrain.optim.proxy import Optimizer
from megatrain.planning.host_plan import HostPlan
from megatrain.ranks.channels import NUM_ROOMS
from megatrain.ranks.ranks import NoCollectives, Ranks, check_words, words_of
from megatrain.runtime.executor import Executor
from megatrain.sizes import format_bytes
from megatrain.tracer.guards import GuardFailedError
from megatrain.training.attempts.host_sharing import Changed, HostSharing
from megatrain.training.attempts.rank_facts import Facts, check_supported, facts_of, refuse_difference, values_of
from megatrain.training.batch import Counts, Shares
from megatrain.training.boundary import Boundary, NotFiniteError, Progress
from megatrain.training.setup import Setting


def broken(error: BaseException) -> str:
    """Why no further step is possible.

    Args:
        error: Which ended a step that others had begun.
    """
    return (
        "the ranks are no longer at the same step, because one of them failed in the middle of one.\n"
        f"  {words_of(error)}\n"
        "  Start all ranks again, and load the latest checkpoint."
    )


def other_rank(error: BaseException) -> RanksError | None:
    """The failure of another rank that an error comes from."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RanksError):
        cause = cause.__cause__
    return cause


Agree = Callable[[Mapping[str, Any]], "list[dict[str, Any]] | None"]
"""Tells all ranks something, and returns what all tell."""
# Rows of a host plan that each process has for itself; of the others the ranks share one copy.
_OWN = ("state of no block", "constants", "slab", "parks", "values on the host", "device memory", "update scratch")


def check_room(ranks: Ranks, setting: Setting, plan: HostPlan, agree: Agree, *, is_shared: bool) -> None:
    """Refuses a step before any rank has allocated something for it; all ranks call it at the same time.

    Each rank by itself would find that its own part fits, and the system would end processes when all have begun.

    Args:
        ranks: The processes that train together.
        setting: Of this rank's step.
        plan: The memory that this rank's steps take.
        agree: See `Agree`.
        is_shared: The ranks share the model already: what each of them holds is the same memory.

    Raises:
        ExecuteError: If the ranks need more than there is.
        RanksError: If another rank fails.
    """
    kind = setting.kind
    # Gradients that wait for a norm or for serial updates are there once.
    names = _OWN if kind.keeps_totals else (*_OWN, "gradients")
    own = sum(map(plan.bytes_of, names)) if kind.is_shared else plan.total_bytes
    room = max((block.landing_bytes for block in setting.schedule.known_workload().blocks), default=0)
    held = min(plan.held_bytes, plan.total_bytes)
    words = agree({"own": own, "shared": plan.total_bytes - own, "room": room, "held": held})
    assert words is not None
    shared, room = (max(int(word[name]) for word in words) for name in ("shared", "room"))
    each, held_by_all = ([int(word[name]) for word in words] for name in ("own", "held"))
    # From each rank to the next, and back from the last one, unless totals stay where they come.
    rooms = (ranks.size - 1 + (not kind.keeps_totals)) * NUM_ROOMS * room
    needed = shared + sum(each) + rooms
    available = available_bytes() + (max(held_by_all) if is_shared else sum(held_by_all))
    if needed > available:
        parts = f"All share {format_bytes(shared)}, each" if shared else "They share nothing, each"
        further = "" if shared else '; or masters="exact", of which ranks share one copy'
        raise ExecuteError(
            f"{counted(ranks.size, 'rank')} of one host need {format_bytes(needed)} of its memory, "
            f"{format_bytes(available)} are available.\n"
            f"  {parts} has up to {format_bytes(max(each))}, and {format_bytes(rooms)} are between them; "
            f"{format_bytes(needed - available)} are missing.\n"
            f"  Use fewer devices, or smaller or fewer micro-batches, of which less is parked{further}."
        )
    agree({})  # nobody allocates before all have looked


# The stages of an attempt: before its first meeting, before the second, and from then on.
_MEETING, _RUNNING_FORWARD, _AGREED = "meeting", "forward", "agreed"


class AgainError(Exception):
    """Another rank runs its forwards again, and this one with it. Never reaches the user."""


class Together:
    """Agrees with the other ranks.

    Args:
        compiled: The model, with its ranks.
        optimizers: In the order of their steps.
        rules: Options of the step that must be the same on all ranks.
        sharing: Has the ranks of a host share one store.
        boundary: No step can follow one that failed when all had agreed on it.
    """

    def __init__(
        self,
        compiled: Compiled,
        optimizers: Sequence[Optimizer],
        rules: Mapping[str, object],
        sharing: HostSharing,
        boundary: Boundary,
    ):
        self._sharing, self._boundary = sharing, boundary
        self._compiled = compiled
        self._ranks: Ranks | None = compiled.ranks
        self._optimizers = optimizers
        self._rules = rules
        self._stage = _MEETING
        self._is_telling = False
        self._is_compared = False

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks is not None

    @property
    def is_compared(self) -> bool:
        """Whether ranks have found that they have the same values."""
        return self._is_compared

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Runs one attempt at a step. If it fails here, the others hear why; if it fails there, this rank stops too.

        Raises:
            RanksError: If another rank failed, or differs.
        """
        if self._ranks is None:
            yield
            return
        self._stage, self._is_telling = _MEETING, False
        self._ranks.agreed.clear()
        try:
            yield
        except (AgainError, NotFiniteError):
            raise  # so does every rank
        except BaseException as error:
            self._fail(self._ranks, error)
            raise

    @contextmanager
    def refusing(self, at: str = "a step") -> Generator[None]:
        """Tells the others if a step is refused before its first attempt, because they wait for this rank.

        No step can follow one that Ctrl-C ended here, maybe in the middle of a meeting.

        Args:
            at: The call in which all ranks are, in words.
        """
        try:
            yield
        except BaseException as error:
            if self._ranks is not None and not isinstance(error, Exception):
                self._ranks.announce(words_of(error))
                self._boundary.broken = broken(error)
            elif self._ranks is not None and other_rank(error) is None:
                with suppress(RanksError):
                    self._tell(self._ranks, {"failed": words_of(error)}, at)
            raise

    def _fail(self, ranks: Ranks, error: BaseException) -> None:
        found = other_rank(error)
        is_quiet = self._stage != _AGREED and not self._is_telling and isinstance(error, Exception)
        if found is None and is_quiet:
            again = self._stage == _RUNNING_FORWARD and isinstance(error, GuardFailedError)
            with nullcontext() if again else suppress(RanksError):  # of several failures each rank raises its own
                self._tell(ranks, {"again": True} if again else {"failed": words_of(error)})
            return
        if found is error and is_quiet:
            return  # it was said in a meeting, in which all ranks were
        if found is None:
            ranks.announce(words_of(error))
        self._boundary.broken = broken(error)
        if found is not None and found is not error:
            raise found from error
        if isinstance(error, GuardFailedError):  # which would have the step run again
            raise ExecuteError(self._boundary.broken) from error

    def _tell(self, ranks: Ranks, word: dict[str, Any], at: str = "a step") -> list[dict[str, Any]]:
        """Tells all ranks something, and hears what they tell.

        Raises:
            RanksError: If another rank failed, or is elsewhere.
        """
        self._is_telling = True
        words = ranks.exchange({"at": at, **word})
        self._is_telling = False
        check_words(ranks, words)
        return words

    def changed(self) -> Changed | None:
        """What this rank's code has written since the latest step into what ranks share; None if they share nothing."""
        return self._sharing.changed() if self._is_compared else None

    def check_changed(self, words: Sequence[Changed | None]) -> None:
        """Refuses what isn't written on all ranks.

        Raises:
            RanksError: Naming it.
        """
        self._sharing.check(words)

    def tell_all(self, at: str, word: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Tells all ranks something between two steps, and hears what they tell, by rank.

        Returns:
            None in a process alone.

        Raises:
            RanksError: If another rank failed, or is elsewhere.
        """
        return None if self._ranks is None else self._tell(self._ranks, dict(word), at)

    def meet(
        self, setting: Setting, executor: Executor, counts: Counts, progress: Progress, *, is_timed: bool
    ) -> Shares:
        """Compares everything that must not differ; finds the share of each micro-batch.

        Args:
            setting: What runs here.
            executor: Runs it.
            counts: How much each micro-batch counts.
            progress: Of the training so far.
            is_timed: Whether the step is timed.

        Raises:
            RanksError: If the ranks differ.
            OptionError: See `Shares`.
            ExecuteError: If the model is one that several ranks can't train.
        """
        ranks = self._ranks
        assert ranks is not None
        check_supported(setting, self._compiled, self._optimizers)
        rules = {**self._rules, "the call": "step.time(batch)" if is_timed else "step(batch)"}
        facts = facts_of(executor, self._compiled, self._optimizers, rules, progress)
        if not self._is_compared:
            facts |= values_of(self._compiled, self._optimizers)
        told = {"digest": _digest(facts), "changed": self._sharing.told(setting.kind), **counts.said()}
        words = self._tell(ranks, told)
        if len({word["digest"] for word in words}) > 1:
            refuse_difference([word["facts"] for word in self._tell(ranks, {"facts": facts})])
        if self._sharing.check([word["changed"] for word in words]):
            self._sharing.share(lambda: self._tell(ranks, {}))
        self._is_compared = True
        self._stage = _RUNNING_FORWARD
        return Shares(counts, others=words, rank=ranks.rank)

    def vote(self) -> None:
        """Waits until all ranks have run the forward.

        Raises:
            AgainError: If one of them runs its forwards again.
            RanksError: If one failed.
        """
        if self._ranks is None:
            return
        words = self._tell(self._ranks, {"again": False})
        if any(word["again"] for word in words):
            raise AgainError
        self._stage = _AGREED
        self._ranks.agreed.set()

    def watching_loss(self) -> AbstractContextManager[object]:
        """Runs the code of a loss.

        Raises:
            ExecuteError: If it waits for other ranks.
        """
        return nullcontext() if self._ranks is None else NoCollectives()

    def losses(self, losses: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The losses of the micro-batches of all ranks, in their order: on the host, unless a process trains alone."""
        if self._ranks is None:
            return losses
        own = losses[0].dtype
        words = self._tell(self._ranks, {"losses": torch.stack([loss.to(own) for loss in losses]).tolist()})
        return [torch.tensor(x, dtype=own) for word in words for x in word["losses"]]

    def refuse(self, what: str, way_out: str) -> None:
        """Refuses something that only a process alone can do.

        Raises:
            ExecuteError: If there are other ranks.
        """
        if self._ranks is not None:
            raise ExecuteError(
                f"{what} isn't possible with a process_group of {self._ranks.size} ranks.\n"
                "  Ranks wait for each other in one order, which it would change.\n"
                f"  {way_out}"
            )


def _digest(facts: Facts) -> str:
    return digest_of(json.dumps(facts, sort_keys=True).encode())
