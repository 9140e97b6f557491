"""The exchange of several ranks: each lands its gradients for all, and adds up and updates its own part."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from megatrain.base.counts import counted
from megatrain.base.host_limits import available_bytes
from megatrain.base.sizes import format_bytes
from megatrain.device.bus import Bus
from megatrain.errors import ExecuteError, RanksError
from megatrain.extending import register_op
from megatrain.files.disk import digest_of
from megatrain.optim.proxy import Optimizer
from megatrain.passes.program import Program
from megatrain.ranks.division import Parts
from megatrain.ranks.facts import Facts, Trained, check_supported, facts_of, values_of
from megatrain.ranks.landings import Landings, blocks_text
from megatrain.ranks.ops import TOTAL, WHOLE, check_totals, check_whole, with_others
from megatrain.ranks.processes import NoCollectives, Ranks, refuse_difference, words_of
from megatrain.runtime.exchange import Exchange, Word
from megatrain.runtime.gradients import Landed
from megatrain.runtime.operations import Operations, Run
from megatrain.runtime.streams.events import Aborted
from megatrain.scheduler.instructions import Bytes, Instruction
from megatrain.scheduler.schedule import Schedule

_OWN = (
    *("state of no block", "constants", "slab", "parks", "values on the host", "device memory", "update scratch"),
    "gradients",
)
"""Rows of a host plan that each process has for itself; of the others the ranks share one copy."""
_ALIKE = (
    "Ranks that train together have the same model, values, optimizer and options.\n"
    "  Build all alike on each rank: call torch.manual_seed first, or load the same checkpoint."
)
_WROTE = (
    "Code that writes parameters, buffers or an optimizer's state between two steps must do the same on\n"
    "  each rank, although ranks of one host share the memory.\n"
    "  Write on all ranks, then take the step."
)
_BROKEN = (
    "the ranks are no longer at the same step, because one of them failed in the middle of one.\n  {}\n"
    "  Start all ranks again, and load the latest checkpoint."
)
# A step that hasn't met the others yet; one whose forward runs, so that it may run again; and one that all take.
_ALONE, _MET, _VOTED = "alone", "met", "voted"


class RankExchange(Exchange):
    """Of one rank among several; see `Exchange`.

    A step has two meetings. In the first the ranks compare all that must not differ, and share what user code has
    written. In the second each tells that its forward has succeeded: until then a rank may run it again, and a failure
    leaves no trace on any rank. From then on gradients and updates are shared, and a rank that fails ends the training
    of all.

    Args:
        ranks: The processes that train together.
        compiled: The model.
        optimizers: In the order of their steps.
    """

    is_alone = False

    def __init__(self, ranks: Ranks, compiled: Trained, optimizers: Sequence[Optimizer]):
        self._ranks, self._compiled, self._optimizers = ranks, compiled, optimizers
        self.rank = ranks.rank
        self._parts = Parts(ranks, compiled, optimizers)
        self._keeps = self._has_landed = self._is_compared = self._has_room = False
        self._stage, self._blocks = _ALONE, ""

    # -- gradients -------------------------------------------------------------------------------------------

    def scheduled(self, schedule: Schedule) -> Schedule:
        """See `Exchange`; a plan of such a step that was kept has these ops already."""
        return schedule if any(op.stream == TOTAL.stream for op in schedule.ops) else with_others(schedule)

    def landing(self, bus: Bus) -> Landings:
        """See `Exchange`."""
        self._here = Landings(self._ranks, bus)
        return self._here

    def land(self, block: int, where: Bytes | None, landed: Sequence[Landed]) -> Sequence[Landed] | None:
        """See `Exchange`."""
        if block not in self._added:  # gradients without elements
            mine = (self._owner_is_mine(key) for key in self._program.blocks[block].binding)
            return [each if own else Landed(None) for each, own in zip(landed, mine, strict=True)]
        self._has_landed = True
        self._here.land(block, where, landed)
        return None

    def totals(self, block: int, go_on: Callable[[], object]) -> list[Landed]:
        """The sums of the gradients of all ranks, of this rank's part of a block; waits until all have landed."""
        self._here.wait_for(block, summed=False, go_on=go_on)
        return self._here.totals(block, self._owner_is_mine)

    def _owner_is_mine(self, key: str) -> bool:
        return self._parts.is_mine(self._program.state[key].owner)

    def kept(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """See `Exchange`."""
        return self._parts.keep(parameter, gradient, self._here) if self._keeps else gradient

    def norms(self, own: Mapping[int, tuple[float, str]]) -> Sequence[Mapping[int, tuple[float, str]]]:
        """See `Exchange`."""
        told = self._ranks.exchange({str(place): norm for place, norm in own.items()})
        return [{int(place): (value, dtype) for place, (value, dtype) in each.items()} for each in told]

    # -- updates ---------------------------------------------------------------------------------------------

    def begin_updates(self) -> None:
        """See `Exchange`."""
        self._parts.begin()

    def updating(
        self, held: Collection[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor], *, takes_over: bool
    ) -> AbstractContextManager[Mapping[torch.Tensor, torch.Tensor]]:
        """See `Exchange`."""
        return self._parts.updating(held, gradients, self._here if takes_over else None)

    def wait(self, held: Collection[torch.Tensor], go_on: Callable[[], object], *, gives_up: bool) -> bool:
        """See `Exchange`."""
        return self._parts.wait(held, go_on, gives_up=gives_up)

    def wait_summed(self, block: int, go_on: Callable[[], object]) -> None:
        """Returns once all ranks have added this one's gradients of a block."""
        if block in self._added:
            self._here.wait_for(block, summed=True, go_on=go_on)

    # -- a step ----------------------------------------------------------------------------------------------

    @contextmanager
    def taking(self, at: str = "a step") -> Generator[None]:
        """See `Exchange`. If it fails here, the others hear why; if it fails there, this rank stops too."""
        self._stage = _ALONE
        try:
            yield
        except BaseException as error:
            self._fail(error, at)
            raise
        finally:
            self._stage = _ALONE

    def _fail(self, error: BaseException, at: str) -> None:
        found = _other_rank(error)
        if self._stage != _VOTED and isinstance(error, Exception) and (found is None or found is not self._ranks.end):
            if found is None:
                with suppress(RanksError):  # of several failures each rank raises its own
                    self.tell(at, {"failed": words_of(error)})
            elif found is not error:
                raise found from error
            return
        if getattr(error, "is_on_all", False):
            return
        if found is None:
            self._ranks.announce(words_of(error))
        self.broken = _BROKEN.format(words_of(error))
        if found is not None and found is not error:
            raise found from error

    def tell(self, at: str, word: Word) -> list[Word]:
        """See `Exchange`."""
        return self._ranks.meet(at, word)

    def agree(
        self, programs: Sequence[Program], schedule: Schedule, facts: Mapping[str, object], word: Word
    ) -> list[Word]:
        """See `Exchange`."""
        program, told = programs[0], list[Word]()
        blocks = blocks_text(program)
        if self._stage == _ALONE:
            check_supported(programs, self._compiled, self._optimizers)
            told = self._meet(blocks, schedule, facts, word)
            self._blocks = _digest(blocks)
            self._ranks.count = 1 + max(word["count"] for word in told)
            self._stage = _MET
        elif _digest(blocks) != self._blocks:
            raise RanksError(
                f"rank {self.rank} runs other blocks than the others, because a value that Python code reads has "
                "changed.\n  All ranks train the same blocks in a step.\n  Let the model run the same layers for all."
            )
        self._program, self._added = program, {op.block for op in schedule.ops if op.what == "T"}
        assert self._added == {op.block for op in schedule.ops if op.what == "G"}
        self._keeps = schedule.kind.updates not in ("overlap", "serial")
        self._has_landed = False
        self._here.begin(program, lands=bool(schedule.places))
        entries = [[program.state[key].owner for key in block.binding if program.state[key].requires_grad]
                   for block in program.blocks]  # fmt: skip
        self._parts.know(entries)
        return told

    def _meet(
        self, blocks: Mapping[str, str], schedule: Schedule, facts: Mapping[str, object], word: Word
    ) -> list[Word]:
        kind = schedule.kind
        rules = {**facts, "when updates run": f"{kind.updates}, {'clipped' if kind.clip else 'not clipped'}"}
        compared = {**blocks, **facts_of(self._compiled, self._optimizers, rules)}
        if not self._is_compared:
            compared |= values_of(self._compiled)
        changed = self._parts.changed()
        own = {"digest": _digest(compared), "changed": changed, "count": self._ranks.count}
        words = self.tell("a step", {**word, **own})
        if len({each["digest"] for each in words}) > 1:
            self._ranks.compare("a step", compared, _ALIKE)
        told = [each["changed"] for each in words]
        way_out, nothing = (_WROTE, "as it was") if self._is_compared else (_ALIKE, "nothing")
        refuse_difference(told, way_out, nothing=nothing)
        if any(told):
            self._parts.share(lambda: self.tell("a step", {}))
        self._is_compared = True
        return words

    def check_room(self, schedule: Schedule, room: Callable[[], tuple[Mapping[str, int], int]]) -> None:
        """See `Exchange`. Each rank by itself would find that its part fits; the system would end processes later."""
        if self._has_room:
            return
        landings = sum(block.landing_bytes for block in schedule.known_workload().blocks if block.has_backward)
        further = landings if schedule.kind.transfer == "bind" else 0
        rows, held = room()
        total = sum(rows.values())
        own = sum(rows.get(name, 0) for name in _OWN)
        words = self.tell("a step", {"own": own + further, "shared": total - own, "held": min(held, total)})
        shared = max(int(word["shared"]) for word in words)
        each, held_by_all = ([int(word[name]) for word in words] for name in ("own", "held"))
        needed = shared + sum(each)
        available = available_bytes() + max(held_by_all)
        if needed > available:
            raise ExecuteError(
                f"{counted(self._ranks.size, 'rank')} of one host need {format_bytes(needed)} of its memory, "
                f"{format_bytes(available)} are available.\n"
                f"  All share {format_bytes(shared)}, each has up to {format_bytes(max(each))}; "
                f"{format_bytes(needed - available)} are missing.\n"
                "  Use fewer devices, or smaller or fewer micro-batches, of which less is parked."
            )
        self.tell("a step", {})  # nobody allocates before all have looked
        self._has_room = True

    def vote(self) -> None:
        """See `Exchange`."""
        if self._stage == _MET:
            self.tell("a step", {})
            self._stage = _VOTED

    def may_repeat(self) -> bool:
        """See `Exchange`."""
        return not self._has_landed

    def watching_loss(self) -> AbstractContextManager[object]:
        """See `Exchange`."""
        return NoCollectives()

    def losses(self, losses: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `Exchange`. They are on the host."""
        own = losses[0].dtype
        words = self.tell("a step", {"losses": torch.stack([loss.to(own) for loss in losses]).tolist()})
        return [torch.tensor(x, dtype=own) for word in words for x in word["losses"]]

    # -- between steps ---------------------------------------------------------------------------------------

    def check_written(self, at: str) -> None:
        """See `Exchange`."""
        told = self.tell(at, {"changed": self._parts.changed() if self._is_compared else {}})
        refuse_difference([word["changed"] for word in told], _WROTE, nothing="as it was")

    def refuse(self, what: str, way_out: str) -> None:
        """See `Exchange`."""
        raise ExecuteError(
            f"{what} isn't possible with a process_group of {self._ranks.size} ranks.\n"
            "  Ranks wait for each other in one order, which it would change.\n"
            f"  {way_out}"
        )


def _other_rank(error: BaseException) -> RanksError | None:
    """The failure of another rank that an error comes from."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RanksError):
        cause = cause.__cause__
    return cause


def _digest(facts: Facts | Mapping[str, str]) -> str:
    return digest_of(json.dumps(dict(facts), sort_keys=True).encode())


def _rank_exchange(run: Run) -> RankExchange:
    exchange = run.step_trainer.exchange
    if not isinstance(exchange, RankExchange):
        raise ExecuteError(
            "the schedule is that of one of several ranks, but this process trains alone.\n"
            "  A T adds gradients of all ranks.\n  Run it with a TrainStep of a model compiled with process_group=."
        )
    return exchange


def _add(operations: Operations, run: Run, instruction: Instruction) -> None:
    """T."""
    call = run.calls[0]
    block = call.loaded.program.blocks[instruction.op.block]
    totals = _rank_exchange(run).totals(block.index, lambda: _go_on(operations))
    operations.gradients.collect(block.index, block.binding, totals, call.loaded.facts.completes[block.index])


def _wait(operations: Operations, run: Run, instruction: Instruction) -> None:
    """V."""
    go_on, exchange = lambda: _go_on(operations), _rank_exchange(run)
    run.step_trainer.wait(instruction.op.block, go_on)
    if instruction.op.block not in operations.schedule.deferred:
        work = operations.schedule.known_workload().blocks[instruction.op.block]
        for member in (instruction.op.block, *work.shares):
            exchange.wait_summed(member, go_on)


def _go_on(operations: Operations) -> None:
    """Gives a wait for other ranks up if the step has failed meanwhile."""
    if operations.engine.streams.failure is not None:
        raise Aborted("a wait for other ranks")


register_op(TOTAL, handler=_add, rule=check_totals)
register_op(WHOLE, handler=_wait, rule=check_whole)
