"""Effects: the table of the kinds of ops. Only this table says what each op reads, makes, moves and computes.

Dependencies, lifetimes, live bytes, traffic and times are generic over it. A new kind of op is one row here, a handler
of the runtime, and a rule of the checker, which shares nothing with this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from megatrain.errors import ScheduleError
from megatrain.scheduler.items import ITEMS, NO_BLOCK, Effect, FactColumns, Item, ItemFacts, OpKind, Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload, chunk_bytes

Parks = Mapping[int, Sequence[int]]
"""Values that leave the device between forward and backward, by the block of their `A`."""


def turn_block(workload: Workload) -> int | None:
    """The last block that has a backward: where the step turns around."""
    blocks = workload.backward_blocks()
    return blocks[-1] if blocks else None


def keep_all(workload: Workload) -> int:
    """The smallest `keep` under which nothing is parked."""
    turn = turn_block(workload)
    return 0 if turn is None else turn + 1


class Parking:
    """What leaves the device between forward and backward under choices of one workload."""

    def __init__(self, workload: Workload, kind: StepKind) -> None:
        turn = turn_block(workload)
        self._turn = -1 if turn is None else turn
        never = turn is None or kind.mode == "forward" or kind.transfer == "bind"
        self._values = [
            (index, value.producer, value.is_result, frozenset(readers), readers[-1])
            for index, value in enumerate(() if never else workload.values)
            if value.is_parkable and (readers := workload.backward_readers(index))
        ]

    def values(self, *, keep: int, saves: Collection[int], results: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
        """Values that are parked on the host, by the block whose `A` ops move them.

        That block is the last one whose backward reads the value, hence the first to need it back. A value stays
        on the device if that block is among the last `keep`, or if a retained graph holds it. Results are there only of
        blocks that keep theirs.
        """
        saved, last = frozenset(saves), self._turn - keep
        found: dict[int, list[int]] = {}
        for index, producer, is_result, readers, block in self._values:
            if block > last or producer in saved or (is_result and producer not in results):
                continue
            if saved.isdisjoint(readers):
                found.setdefault(block, []).append(index)
        return {block: tuple(found[block]) for block in sorted(found)}


def parked_values(
    workload: Workload, kind: StepKind, *, keep: int, saves: Collection[int], results: Collection[int] = ()
) -> dict[int, tuple[int, ...]]:
    """As `Parking.values`, for one choice."""
    return Parking(workload, kind).values(keep=keep, saves=saves, results=results)


_RANKS = {kind: rank for rank, kind in enumerate(ITEMS)}


class KnownOp(NamedTuple):
    """The effect of an op, and what it takes and uses of a memory, by their numbers in `Effects.items`."""

    effect: Effect
    takes: tuple[int, ...]
    uses: tuple[int, ...]


class Effects:
    """The effects of the ops of one step.

    Args:
        workload: The workload of the step.
        kind: The kind of the step.
        saves: Blocks whose graph is retained.
        results: Blocks that keep results of their forward for their backward.
        parked: Values that leave the device between forward and backward, by the block of their `A`.
        persistent: Blocks whose frozen weights are on the device before the step begins.
        deferred: Blocks whose update follows in the next step.
        recorded: Blocks whose kernels are launched by one call.
        device_updates: Blocks that the device updates.
    """

    def __init__(
        self,
        workload: Workload,
        kind: StepKind,
        saves: Collection[int],
        results: Collection[int],
        parked: Parks,
        persistent: Collection[int],
        deferred: Collection[int],
        recorded: Collection[int] = (),
        device_updates: Collection[int] = (),
    ) -> None:
        self.workload, self.kind, self.deferred = workload, kind, frozenset(deferred)
        self.device_updates = frozenset(device_updates)
        self.inputs, self.outputs, self.kept = workload.inputs(), workload.outputs(), workload.results()
        goes_back = kind.mode != "forward"
        self.has_gradient = [goes_back and workload.has_value_gradient(i) for i in range(len(workload.values))]
        self.gradient_blocks = workload.gradient_blocks()
        turn = turn_block(workload) if goes_back else None
        # The op that follows the caller's loss: it reads the outputs, and finds their gradients.
        self.turn = ("B", turn) if turn is not None else ("F", len(workload.blocks) - 1)
        self.owners: list[list[int]] = [[] for _ in workload.blocks]
        for block in workload.update_blocks() if kind.updates != "none" else ():
            for member in workload.update_group(block):
                self.owners[member].append(block)
        self._sharers = Counter(value.storage for value in workload.values)
        # What is known so far, which the steps of `chosen` share: ops by all choices on which they depend.
        self._known: dict[tuple[str, str, int, int, int], KnownOp] = {}
        self._choice_numbers: dict[object, int] = {}
        self.items: list[ItemFacts] = []
        self.facts = FactColumns()
        self.ranks: list[tuple[int, int, int]] = []  # of the items: by micro-batch, in the order of `ITEMS`, by number
        self._numbers: dict[Item, int] = {}
        # What exists when the step begins, even if its ops never read it.
        self.standing = self.numbers(self._standing())
        self._choose(saves, results, parked, persistent, recorded)

    def chosen(
        self,
        saves: Collection[int],
        results: Collection[int],
        parked: Parks,
        persistent: Collection[int],
        recorded: Collection[int] = (),
    ) -> Effects:
        """The same step under other choices; ops that these don't concern keep the effects that are known."""
        found = copy(self)
        found._choose(saves, results, parked, persistent, recorded)
        return found

    def _choose(
        self,
        saves: Collection[int],
        results: Collection[int],
        parked: Parks,
        persistent: Collection[int],
        recorded: Collection[int],
    ) -> None:
        self.saves, self.results, self.persistent = frozenset(saves), frozenset(results), frozenset(persistent)
        self.recorded = frozenset(recorded)
        self.parked = parked
        self._parked_values = frozenset(value for values in parked.values() for value in values)
        concerned: list[list[int]] = [[] for _ in self.workload.blocks]
        for index in sorted(self._parked_values):
            value = self.workload.values[index]
            for block in value.readers if value.producer is None else (value.producer, *value.readers):
                concerned[block].append(index)
        # A number for all choices that concern a block's ops; the last is for ops of all blocks, which none concerns.
        self._choices: list[int] = [
            self._choice_numbers.setdefault(choices, len(self._choice_numbers))
            for choices in (
                (
                    *(b in chosen for chosen in (self.saves, self.results, self.persistent, self.recorded)),
                    tuple(values),
                    tuple(parked.get(b, ())),
                )
                for b, values in enumerate(concerned)
            )
        ]
        self._choices.append(-1)

    def of(self, stream: str, what: str, block: int, micro_batch: int = 0) -> Effect:
        """The effect of an op."""
        return self.known(stream, what, block, micro_batch).effect

    def known(self, stream: str, what: str, block: int, micro_batch: int = 0) -> KnownOp:
        """The effect of an op, with the numbers of its items."""
        key = stream, what, block, micro_batch, self._choices[block]
        found = self._known.get(key)
        if found is None:
            kind = kind_of(stream, what)
            effect = kind.effect(self, block, micro_batch)
            if kind.workspace is not None:
                effect = replace(effect, workspace=kind.workspace(self, block, micro_batch))
            found = KnownOp(effect, self.numbers((*effect.makes, *effect.adds)), self.numbers(effect.reads))
            if (stream, what) in BUILT_IN:  # others may depend on all choices
                self._known[key] = found
        return found

    def choice(self, block: int) -> int:
        """A number for all choices on which the effects of a block's ops depend."""
        return self._choices[block]

    def numbers(self, items: Iterable[Item]) -> tuple[int, ...]:
        """The places in `items` of those that take bytes of a memory."""
        return tuple(self._number(item) for item in items if ITEMS[item.kind].memory is not None)

    def _number(self, item: Item) -> int:
        found = self._numbers.get(item)
        if found is None:
            found = self._numbers[item] = len(self.items)
            memory = str(ITEMS[item.kind].memory)
            facts = ItemFacts(item, memory, self._nbytes(item), self._shared_storage(item), self._outlives(item))
            self.items.append(facts)
            self.facts.append(facts)
            self.ranks.append((item.micro_batch, _RANKS[item.kind], item.number))
        return found

    def value(self, index: int, micro_batch: int, *, is_forward: bool) -> Item:
        """A value as forward or backward finds it on the device: a parked one goes and comes back."""
        kind = "value" if index not in self._parked_values else "original" if is_forward else "returned"
        return Item(kind, index, micro_batch)

    def _standing(self) -> Iterator[Item]:
        for number in range(self.kind.micro_batches):
            for index, value in enumerate(self.workload.values):
                is_backward = self.kind.mode == "backward"
                if value.is_output if is_backward else value.is_there:
                    yield Item("value", index, number)
                if is_backward and value.is_output and self.has_gradient[index]:
                    yield Item("gradient", index, number)
        yield from (Item("waiting", b) for b in self.gradient_blocks if self._waits(b))

    def _outlives(self, item: Item) -> bool:
        if item.kind == "value":
            value = self.workload.values[item.number]
            return value.is_output and (self.kind.outputs == "keep" or value.is_committed)
        if item.kind == "gradient":
            return self.workload.values[item.number].is_there
        return item.kind == "landed" and (self._waits(item.number) or not self.owners[item.number])

    def _waits(self, block: int) -> bool:
        """Whether a block's gradients wait for an update in the next step."""
        return not self.deferred.isdisjoint(self.owners[block])

    def _nbytes(self, item: Item) -> int:
        """Of a value the bytes of its storage, which aliases share and which counts once.

        After a return, and of gradients, those of the value itself. A value on the host takes none here, nor does its
        gradient: see `host_value_bytes`.
        """
        if item.kind in ("value", "original", "returned", "gradient"):
            value = self.workload.values[item.number]
            whole = self.workload.storages[value.storage] if item.kind in ("value", "original") else value.nbytes
            return 0 if value.on_host else whole
        work = self.workload.blocks[item.number]
        if item.kind in ("landed", "waiting"):
            return work.gradient_bytes if self.kind.transfer == "bind" else work.landing_bytes
        return {"parameters": work.gradient_bytes, "saved": work.saved_bytes}[item.kind]

    def _shared_storage(self, item: Item) -> int | None:
        if item.kind not in ("value", "original"):
            return None
        storage = self.workload.values[item.number].storage
        return storage if self._sharers[storage] > 1 else None

    def loss_reads(self, what: str, block: int, micro_batch: int) -> list[Item]:
        """Outputs from which the caller computes a loss before an op, and which it then releases."""
        has_loss = self.kind.outputs != "keep" and self.turn == (what, block)
        values = enumerate(self.workload.values if has_loss else ())
        return [Item("value", i, micro_batch) for i, v in values if v.is_output and not v.is_committed]

    def loss_workspace(self, what: str, block: int, micro_batch: int) -> int:
        """Device bytes that the caller's loss takes before an op, beyond its items: its gradients come afterwards."""
        is_turn = self.turn == (what, block) and what == "B"
        if self.kind.mode != "train" or self.kind.outputs == "keep" or not is_turn:
            return 0
        return max(0, self.workload.loss_bytes - _gradients_made(self, block, micro_batch)[0])

    def parked_bytes(self, block: int) -> int:
        """Bytes that an `A` of a block moves."""
        return self.copied(sum(self.workload.values[value].nbytes for value in self.parked.get(block, ())))

    def copied(self, nbytes: int) -> int:
        """Bytes that a transfer moves: none where weights are used in place."""
        return 0 if self.kind.transfer == "bind" else nbytes

    def _filed(self, block: int) -> int:  # bytes that an op of the disk moves
        return self.workload.blocks[block].moment_bytes

    def squared_on_host(self, block: int) -> int:
        """Host bytes that are read for the norm of a block's gradients; the device has taken those of whole ones."""
        work = self.workload.blocks[block]
        return work.gradient_bytes if self.kind.transfer == "bind" else work.partial_gradient_bytes

    def state(self, block: int) -> list[Item]:
        """What holds a block's state in host memory: its own part, and those of the blocks that update the rest."""
        return [Item("state", owner) for owner in dict.fromkeys((block, *self.owners[block]))]

    def weights(self, block: int) -> list[Item]:
        """What an F or B reads of a block's state: a slot, or host memory as well."""
        return [Item("weights", block), *(self.state(block) if self.kind.transfer == "bind" else ())]


def _prefetch(step: Effects, block: int, micro_batch: int) -> Effect:
    work = step.workload.blocks[block]
    stays = work.state_bytes if block in step.device_updates else work.frozen_bytes if block in step.persistent else 0
    moves = step.copied(work.state_bytes - stays)
    return Effect(tuple(step.state(block)), (Item("weights", block),), moves=moves)


def _forward(step: Effects, block: int, micro_batch: int) -> Effect:
    reads = [step.value(index, micro_batch, is_forward=True) for index in step.inputs[block]]
    kept = step.kept[block] if block in step.results else ()
    makes = [step.value(index, micro_batch, is_forward=True) for index in (*step.outputs[block], *kept)]
    makes += [Item(kind, block, micro_batch) for kind in ("record", *(["saved"] if block in step.saves else []))]
    reads += step.loss_reads("F", block, micro_batch)
    work, is_recorded = step.workload.blocks[block].forward, block in step.recorded
    return Effect((*reads, *step.weights(block)), tuple(makes), work=work, is_recorded=is_recorded)


def _forward_workspace(step: Effects, block: int, micro_batch: int) -> int:
    return step.workload.blocks[block].measured(block in step.results).forward_workspace_bytes


def _backward(step: Effects, block: int, micro_batch: int) -> Effect:
    """A backward adds gradients of its inputs and parameters; it repeats the forward unless its graph is retained."""
    work, is_saved, has_results = step.workload.blocks[block], block in step.saves, block in step.results
    held = [*step.inputs[block], *(step.outputs[block] if is_saved else step.kept[block] if has_results else ())]
    reads = [step.value(index, micro_batch, is_forward=False) for index in held]
    reads += [Item("gradient", index, micro_batch) for index in step.outputs[block] if step.has_gradient[index]]
    reads += [Item("saved" if is_saved else "record", block, micro_batch), *step.weights(block)]
    reads += step.loss_reads("B", block, micro_batch)
    adds = [Item("gradient", index, micro_batch) for index in step.inputs[block] if step.has_gradient[index]]
    if work.gradient_bytes > 0:
        adds.append(Item("parameters", block))
    # The caller hands in the gradients of the outputs when the backward of their micro-batch starts.
    values = step.workload.values if step.turn == ("B", block) and step.kind.mode == "train" else ()
    handed = (index for index, value in enumerate(values) if value.is_output and step.has_gradient[index])
    makes = [Item("gradient", index, micro_batch) for index in handed]
    kernels = work.whole_backward(is_saved, micro_batch, has_results)
    return Effect(tuple(reads), tuple(makes), tuple(adds), work=kernels, is_recorded=block in step.recorded)


def _backward_workspace(step: Effects, block: int, micro_batch: int) -> int:
    """The measured bytes, and each summand that exists for a moment in addition to its sum.

    The workspace of a backward was measured with its recompute, whose saved values are part of it; those of a retained
    graph are live already. Later micro-batches make gradients of the parameters in addition to the sum so far.
    """
    work, summands = step.workload.blocks[block], _gradients_made(step, block, micro_batch)[1]
    saved = work.saved_bytes if block in step.saves else 0
    own = max(0, work.measured(block in step.results).backward_workspace_bytes - saved) + summands
    return max(own, step.loss_workspace("B", block, micro_batch))


def _gradients_made(step: Effects, block: int, micro_batch: int) -> tuple[int, int]:
    """Bytes of the gradients that a B makes: those that are sums from now on, and those that it adds to such sums."""
    work = step.workload.blocks[block]
    first, further = (work.gradient_bytes, 0) if micro_batch == 0 else (0, work.gradient_bytes)
    for index in step.inputs[block] if work.has_backward else ():
        value = step.workload.values[index]
        if step.has_gradient[index] and not value.on_host:
            is_added = value.is_output or step.workload.backward_readers(index)[-1] != block
            first, further = (first, further + value.nbytes) if is_added else (first + value.nbytes, further)
    return first, further


def _parked(step: Effects, kind: str, block: int, micro_batch: int) -> tuple[Item, ...]:
    return tuple(Item(kind, index, micro_batch) for index in step.parked.get(block, ()))


def _park(step: Effects, block: int, micro_batch: int) -> Effect:
    values = _parked(step, "original", block, micro_batch)
    return Effect(values, (Item("parked", block, micro_batch),), moves=step.parked_bytes(block))


def _return(step: Effects, block: int, micro_batch: int) -> Effect:
    values = _parked(step, "returned", block, micro_batch)
    return Effect((Item("parked", block, micro_batch),), values, moves=step.parked_bytes(block))


def _evict(step: Effects, block: int, micro_batch: int) -> Effect:
    moves = chunk_bytes(step.workload, step.parked.get(block, ()))
    return Effect((Item("parked", block, micro_batch),), (Item("evicted", block, micro_batch),), moves=moves)


def _reload(step: Effects, block: int, micro_batch: int) -> Effect:
    evicted = _evict(step, block, micro_batch)
    return replace(evicted, reads=evicted.makes, makes=evicted.reads)


def _offload(step: Effects, block: int, micro_batch: int) -> Effect:
    makes = (Item("landed", block), Item("left", NO_BLOCK)) if step.kind.holds_gradients else ()
    moves = step.copied(step.workload.blocks[block].gradient_bytes)
    return Effect((Item("parameters", block),), makes, moves=moves)


def _squares_there(step: Effects, block: int, micro_batch: int) -> Effect:
    """The device takes the norms of gradients that stay there, in a moment, and a few numbers leave."""
    return Effect((Item("parameters", block),), (Item("squares", block),))


def _squares(step: Effects, block: int, micro_batch: int) -> Effect:
    # Gradients that several blocks share are whole with the last of them, which reads the sum. Of others the device has
    # taken the norms, which land with them.
    return Effect((Item("landed", block),), (Item("squares", block),), moves=step.squared_on_host(block))


def _norm(step: Effects, block: int, micro_batch: int) -> Effect:
    summing = step.workload.update_blocks() if step.kind.reports_norm else step.gradient_blocks
    return Effect(tuple(Item("squares", b) for b in summing), (Item("norm", NO_BLOCK),))


def _update(step: Effects, block: int, micro_batch: int) -> Effect:
    kind = "waiting" if block in step.deferred else "landed"
    group, blocks = step.workload.update_group(block), step.workload.blocks
    reads = [Item(kind, b) for b in group if blocks[b].has_backward and blocks[b].gradient_bytes > 0]
    reads += [Item("norm", NO_BLOCK)] * step.kind.clip + [Item("left", NO_BLOCK)] * (step.kind.updates == "serial")
    also = ["squares"] * step.kind.reports_norm
    moves = blocks[block].update_bytes + step.squared_on_host(block) * step.kind.reports_norm
    moments = [Item("moments", block)] * (step._filed(block) > 0)
    makes = (Item("state", block), *moments, *(Item(what, block) for what in also))
    return Effect((*reads, *moments), makes, moves=moves, num_parameters=blocks[block].num_gradients)


def _device_update(step: Effects, block: int, micro_batch: int) -> Effect:
    norm = [Item("norm", NO_BLOCK)] * step.kind.clip
    reads = (Item("parameters", block), Item("weights", block), *norm)
    return Effect(reads, work=step.workload.blocks[block].device_update)


KINDS: dict[tuple[str, str], OpKind] = {
    (kind.stream, kind.what): kind
    for kind in (
        OpKind(Stream.H2D, "W", _prefetch, has_slot=True),
        OpKind(Stream.H2D, "A", _return, per_micro_batch=True),
        OpKind(Stream.COMPUTE, "F", _forward, _forward_workspace, per_micro_batch=True),
        OpKind(Stream.COMPUTE, "B", _backward, _backward_workspace, per_micro_batch=True),
        OpKind(Stream.COMPUTE, "U", _device_update, lambda step, b, _: step.workload.blocks[b].update_workspace_bytes),
        OpKind(Stream.D2H, "A", _park, per_micro_batch=True),
        OpKind(Stream.D2H, "G", _offload),
        OpKind(Stream.D2H, "S", _squares_there),
        OpKind(Stream.HOST, "S", _squares),
        OpKind(Stream.HOST, "N", _norm, has_block=False),
        OpKind(Stream.HOST, "U", _update),
        OpKind(Stream.DISK, "R", lambda s, b, _: Effect((), (Item("moments", b),), moves=s._filed(b)), has_slot=True),
        OpKind(Stream.DISK, "E", _evict, per_micro_batch=True, has_slot=True),
        OpKind(Stream.DISK, "L", _reload, per_micro_batch=True, has_slot=True),
        OpKind(Stream.DISK, "K", lambda s, b, _: Effect((Item("moments", b),), moves=s._filed(b))),
    )
}
"""Every kind of op, by stream and letter; `megatrain.extending.register_op` adds more."""
BUILT_IN = frozenset(KINDS)


def kind_of(stream: str, what: str) -> OpKind:
    """The row of an op; a `ScheduleError` if there is none, or none any more."""
    if (stream, what) not in KINDS:
        raise ScheduleError(
            f"there is no op `{what}` on the stream `{stream}`.\n  A schedule has only ops of registered kinds.\n"
            "  Call megatrain.extending.register_op, and keep the kind as long as its schedules."
        )
    return KINDS[stream, what]


def register_kind(kind: OpKind) -> None:
    """Adds a row to the table."""
    KINDS[kind.stream, kind.what] = kind
    _order_streams()


def unregister_kind(kind: OpKind) -> None:
    """Removes a row of the table."""
    del KINDS[kind.stream, kind.what]
    _order_streams()


_STREAMS: list[Stream] = []


def _order_streams() -> None:
    _STREAMS[:] = dict.fromkeys(kind.stream for kind in KINDS.values())


_order_streams()


def streams() -> tuple[Stream, ...]:
    """All streams, in the order of a table's columns."""
    return tuple(_STREAMS)
