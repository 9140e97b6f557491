"""schedule() and workload(): describes programs by the figures that scheduling needs, and schedules them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from megatrain.base.checks import checked, count, one_of, optional
from megatrain.base.counts import counted
from megatrain.base.native.native_kernel import LANES
from megatrain.base.sizes import SIZE, aligned, parse_bytes
from megatrain.errors import MicroBatchError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import UPDATE_TRAFFIC, most, update_scratch, update_traffic
from megatrain.passes.interpret import reads_values
from megatrain.passes.kept_results import kept_results
from megatrain.passes.program import Block, Program, has_backward, trained_holders
from megatrain.scheduler.builder.build import STEP, build
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import BlockWork, KeptWork, ValueWork, Workload
from megatrain.tracer.block_image import optimizer_image, state_image
from megatrain.tracer.spec import NORMED

_BLOCK_SIZES = ("saved_bytes", "forward_workspace_bytes", "backward_workspace_bytes")
_BLOCK_WORKS = ("forward", "backward")
_BLOCK_KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Merged:
    """One workload for several.

    Args:
        places: Per workload, and per value of `workload`: its index in that workload; None where that one lacks it.
    """

    workload: Workload
    places: tuple[tuple[int | None, ...], ...]


def merge(workloads: Sequence[Workload]) -> Merged:
    """Merges the workloads of micro-batches that are different captures: each size is the largest of them.

    A table for the result serves each of them: memory only grows with sizes, and a value that a micro-batch lacks (a
    mask, where it has no padding) is one of no bytes. Their blocks must have the same structure; that these hold the
    same *parameters*, only programs can tell. Names are those of the first that has the block or the value.

    Raises:
        ScheduleError: At the first difference in structure of the blocks.

    >>> layer = BlockWork("layer", 1024, 1024, 8, 0, 0, True)
    >>> other = BlockWork("layer", 1024, 1024, 4, 16, 0, True)
    >>> merge([Workload((layer,), (), ()), Workload((other,), (), ())]).workload.blocks[0].saved_bytes
    8
    """
    if not workloads:
        raise ScheduleError("an empty list of workloads can't be merged.\n  A step has at least one micro-batch.")
    refuse(_differences(workloads[0], other) for other in workloads)
    storages = _Storages(workloads[0])
    places = [storages.places_of(each) for each in workloads]
    values = storages.values
    return Merged(
        Workload(
            blocks=tuple(map(_largest, zip(*(w.blocks for w in workloads), strict=True))),
            values=tuple(values),
            storages=tuple(storages.nbytes),
            loss_bytes=max(w.loss_bytes for w in workloads),
            last_reads_values=any(w.last_reads_values for w in workloads),
        ),
        tuple(tuple(own.get(index) for index in range(len(values))) for own in places),
    )


def refuse(differences: Iterable[Iterator[str]]) -> None:
    """Refuses micro-batches that differ from the first in more than sizes and values."""
    for number, found in enumerate(differences):
        for difference in found:
            raise MicroBatchError(
                f"micro-batch {number} differs from micro-batch 0: {difference}.\n"
                "  All micro-batches of a step use the weights of a block while they are on the device, and hand on "
                "their buffers.\n"
                "  Use micro-batches for which the model runs the same layers in the same order, or separate steps."
            )


class _Storages:
    """The storages of several workloads, and their values. Storages whose values are made and read alike are one."""

    def __init__(self, first: Workload) -> None:
        self.values = list(first.values)
        self.nbytes = list(first.storages)
        self._alike: dict[object, list[tuple[int, list[int]]]] = defaultdict(list)
        for storage, indices in enumerate(_values_of_storages(first)):
            self._alike[_kind(first, indices)].append((storage, indices))

    def places_of(self, workload: Workload) -> dict[int, int]:
        """Makes room for a workload; returns the index of each of its values, by the index here."""
        free = {kind: deque(known) for kind, known in self._alike.items()}
        own: dict[int, int] = {}
        for nbytes, indices in zip(workload.storages, _values_of_storages(workload), strict=True):
            kind = _kind(workload, indices)
            storage, places = free[kind].popleft() if free.get(kind) else self._new(workload, indices)
            self.nbytes[storage] = max(self.nbytes[storage], nbytes)
            for place, index in zip(places, indices, strict=True):
                known = self.values[place]
                self.values[place] = replace(known, nbytes=max(known.nbytes, workload.values[index].nbytes))
                own[place] = index
        return own

    def _new(self, workload: Workload, indices: Sequence[int]) -> tuple[int, list[int]]:
        storage, places = len(self.nbytes), [len(self.values) + number for number in range(len(indices))]
        self.nbytes.append(0)
        self.values += [replace(workload.values[index], storage=storage) for index in indices]
        self._alike[_kind(workload, indices)].append((storage, places))
        return storage, places


def _values_of_storages(workload: Workload) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in workload.storages]
    for index, value in enumerate(workload.values):
        found[value.storage].append(index)
    return found


# What values may differ in and yet be one.
_VALUE_SIZES = ("name", "nbytes", "storage")


def _kind(workload: Workload, indices: Sequence[int]) -> tuple[tuple[object, ...], ...]:
    """Who makes and reads the values of a storage, and how: what storages must have in common to be one."""
    names = [field.name for field in fields(ValueWork) if field.name not in _VALUE_SIZES]
    return tuple(tuple(getattr(workload.values[index], name) for name in names) for index in indices)


def _largest(same: Sequence[BlockWork]) -> BlockWork:
    sizes = {name: max(getattr(work, name) for work in same) for name in _BLOCK_SIZES}
    works = {name: most([getattr(work, name) for work in same]) for name in _BLOCK_WORKS}
    return replace(same[0], **sizes, **works, kept=_most_kept(same))


def _most_kept(same: Sequence[BlockWork]) -> KeptWork | None:
    """The largest of them where results are kept; a micro-batch that has none runs as it does otherwise."""
    if all(work.kept is None for work in same):
        return None
    each = [
        work.kept or KeptWork(work.forward_workspace_bytes, work.backward_workspace_bytes, work.forward)
        for work in same
    ]
    return KeptWork(
        max(kept.forward_workspace_bytes for kept in each),
        max(kept.backward_workspace_bytes for kept in each),
        most([kept.repeated for kept in each]),
    )


def _differences(first: Workload, other: Workload) -> Iterator[str]:
    """Says in what the blocks of another workload differ."""
    if len(first.blocks) != len(other.blocks):
        yield f"it has {counted(len(other.blocks), 'block')}, not {len(first.blocks)}"
    for index, (here, there) in enumerate(zip(first.blocks, other.blocks, strict=False)):
        for part in fields(here):
            expected, found = getattr(here, part.name), getattr(there, part.name)
            if part.name not in ("name", *_BLOCK_SIZES, *_BLOCK_WORKS, _BLOCK_KEPT) and found != expected:
                yield f"of block {index} ({here.name}), {part.name} is {found}, not {expected}"


@checked(update_traffic=optional(count(1, 2**20)), masters=one_of(*UPDATE_TRAFFIC))
def workload(
    program: Program, *, update_traffic: int | None = None, masters: str = "exact", updates_there: bool = False
) -> Workload:
    """Describes `program` by bytes and dependencies only.

    Args:
        program: After `measure`.
        update_traffic: Bytes that an update reads and writes per byte of a parameter; None counts those of AdamW.
        masters: The kind of master of bf16 parameters: `"exact"`, `"rounded"`, or `"whole"` for none.
        updates_there: Whether the device may update blocks whose parameters are theirs alone; the state is AdamW's.

    Raises:
        OptionError: If an argument has a wrong type or value.
    """
    updates, whole = _updates(program, update_traffic, masters), _whole_gradients(program)
    return Workload(
        blocks=tuple(
            replace(
                _block_work(program, block, updates[block.index], whole),
                **(_updated_there(program, block, updates[block.index], masters) if updates_there else {}),
            )
            for block in program.blocks
        ),
        values=(*_value_works(program), *_result_works(program)),
        storages=(*_storages(program), *(spec.nbytes for _, found in kept_results(program) for _, spec in found)),
        last_reads_values=any(reads_values(program.templates[b.template].graph) for b in program.blocks[-1:]),
    )


@checked(**STEP, memory=optional(SIZE))
def schedule(
    program: Program | Workload,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | str | None = None,
    activations: str = "auto",
    transfer: str = "copy",
    mode: str = "train",
    micro_batches: int = 1,
    updates: str = "none",
    clip: bool = False,
    reports_norm: bool = False,
    outputs: str = "keep",
    hardware: Hardware | None = None,
) -> Schedule:
    """Places one step on the streams: all copies, computations, offloads and updates, with their order.

    Touches no tensor and no device.

    Args:
        program: The program to run, or its blocks, values and their sizes alone.
        num_slots: Blocks whose weights may be on the device at the same time. 1 overlaps nothing. None means
            2, or 1 if only that fits `memory`. Then the memory of a training step also holds weights of further
            blocks from their forward to their backward (resident blocks), or from step to step (persistent ones).
        keep: The inputs of the last `keep` blocks, counted from the last block with a backward, stay on the
            device; older ones are parked on the host. None leaves it to `activations`.
        memory: Device bytes, or text like `"10GiB"`, that the step may take, weights, activations, gradients and
            workspace included.
        activations: `"recompute"` retains the graph of no block but the last, and parks inputs only if
            they don't fit otherwise; `"keep"` retains all graphs; `"offload"` parks all it can; `"auto"`
            parks as few inputs as possible, and then retains graphs, where they save more time than weights that stay.
            In a budget it also keeps or parks results of attention, where that takes less time than to compute them
            again.
        transfer: `"copy"` the weights into slots, or `"bind"` them in place, where nothing moves.
        mode: `"train"`, `"forward"` for inference, or `"backward"` for the backward of a forward that ran
            earlier; `backward_schedule` makes the last to match a schedule.
        micro_batches: Number of batches of the workload's size in one step (gradient accumulation). All of them run
            through a block before the next block, so weights cross as often as with one batch; the gradients of a block
            are summed on the device and leave once.
        updates: When the host updates the parameters of a block. `"none"`: the step doesn't; `"overlap"`: when
            its gradients have left; `"serial"`: when all gradients have left; `"deferred"`: at the head of the
            next step, so this table begins with the updates of the previous step, each before the weights are copied.
        clip: The host sums the squares of each block's gradients once these have left, and takes the norm of all.
            Updates of this step wait for it.
        reports_norm: The updates of this step also sum the squares of their gradients, and the host takes the norm of
            all at the end; no update waits for it.
        outputs: `"keep"` the model's outputs on the device until the step ends, or `"release"` them once the
            backward of their micro-batch begins, when the caller has made a loss of them.
        hardware: The machine. Of plans that fit `memory` the step takes the fastest one found for it, which may park
            inputs to retain graphs. Without it compute and copies are weighed as on an RTX 4090.

    Returns:
        A schedule that passes its check. Ticks count from 0; lifetimes include both ends.

    Raises:
        OptionError: If an option is unknown, a count isn't one, or options exclude each other.
        ScheduleError: If the workload is inconsistent, or `memory` too small; the message says how much is
            needed at least, and by which block. Or if a buffer can't go from one micro-batch to the next, because a
            block reads it before the one that computes its new value.
    """
    kind = StepKind(mode, transfer, micro_batches, updates, clip, outputs, reports_norm)
    return build(
        step_workload([program] * micro_batches) if isinstance(program, Program) else program,
        kind,
        num_slots=num_slots,
        keep=keep,
        memory=None if memory is None else parse_bytes(memory, "memory"),
        activations=activations,
        hardware=hardware,
    )


def step_workload(
    programs: Sequence[Program],
    *,
    loss_bytes: int = 0,
    masters: str = "exact",
    updates_there: bool = False,
    filed: Mapping[str, int] = MappingProxyType({}),
) -> Workload:
    """The workload of a step whose micro-batches are captures of one model, one each.

    Args:
        programs: The captures.
        loss_bytes: Of the caller's loss.
        masters: As for `workload`.
        updates_there: Likewise.
        filed: Bytes of optimizer state that are in a file between the host's updates, by the key of the parameter.

    Raises:
        ScheduleError: If they don't, or a buffer can't go from one micro-batch to the next.
    """
    for program in {id(each): each for each in programs}.values() if len(programs) > 1 else ():
        check_buffers(program)
    merged = merge_programs(programs, masters, updates_there=updates_there)
    blocks = merged.workload.blocks
    if filed:
        pairs = zip(blocks, updated_bytes(programs[0], filed), strict=True)
        blocks = tuple(replace(block, moment_bytes=nbytes) for block, nbytes in pairs)
    return replace(merged.workload, blocks=blocks, loss_bytes=loss_bytes)


def filed_state(program: Program, work: Workload, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Of bytes of optimizer state by key those of the blocks whose state is in a file."""
    filed = {b for b, block in enumerate(work.blocks) if block.moment_bytes}
    keys = (key for key, (owner, *_) in trained_holders(program).items() if owner in filed)
    return {key: nbytes[key] for key in keys if key in nbytes}


def updated_bytes(program: Program, nbytes: Mapping[str, int]) -> list[int]:
    """By block, the sum of bytes of the parameters that its update changes, which are by key."""
    found = [0] * len(program.blocks)
    for key, (owner, *_) in trained_holders(program).items():
        found[owner] += nbytes.get(key, 0)
    return found


def merge_programs(programs: Sequence[Program], masters: str = "exact", *, updates_there: bool = False) -> Merged:
    """Merges the workloads of captures of one model, which all use the state that comes for the first of them.

    Raises:
        ScheduleError: If a block of one has other state than that of the first, or they write other buffers.
    """
    made = partial(workload, masters=masters, updates_there=updates_there)
    works = {key: made(program) for key, program in {id(each): each for each in programs}.items()}
    merged = merge([works[id(program)] for program in programs])
    refuse(_differences_of_state(programs[0], other) for other in programs)
    return merged


def _differences_of_state(first: Program, other: Program) -> Iterator[str]:
    for here, there in zip(first.blocks, other.blocks, strict=True):
        expected, found = ([p.state[key] for key in b.binding] for p, b in ((first, here), (other, there)))
        if found != expected:
            named = [", ".join(entry.key for entry in entries) for entries in (found, expected)]
            yield f"block {here.index} ({here.name}) has the state [{named[0]}], not [{named[1]}]"
    written, expected = (sorted(key for key, _ in program.commits) for program in (other, first))
    if written != expected:
        yield f"it writes the buffers {written}, not {expected}"


def check_buffers(program: Program) -> None:
    """Refuses buffers that no order of blocks can serve: each micro-batch begins with the previous one's buffers.

    All micro-batches of a block run before the next block, so a buffer's new value must come in no later a block than
    the first that reads the old one. An old value that the model returns is read before any block runs.

    Raises:
        ScheduleError: Naming the buffer and the blocks.
    """
    readers, values = program.readers(), program.values
    returned = {o.name for o in program.outputs if o.kind == "value"}
    new_values = dict(program.commits)
    for old, key in program.buffers:
        producer = values[new_values[key]].producer
        first = min(readers[old], default=producer)
        if producer is None or first is None or (first >= producer and old not in returned):
            continue
        reader = f"block {first} ({program.blocks[first].name}) reads" if first < producer else "the model returns"
        raise ScheduleError(
            f"buffer {key} can't go from one micro-batch to the next: {reader} the old value, "
            f"but block {producer} ({program.blocks[producer].name}) computes the new one.\n"
            "  All micro-batches of a block run before the next block, so the old value would be read too early.\n"
            "  Use one micro-batch a step, a larger block_bytes that puts both in one block, or don't update the "
            "buffer (`.eval()` of its module)."
        )


@dataclass(slots=True)
class _Update:
    """Bytes that the update of a block's parameters reads and writes, and other blocks that hold some of them."""

    nbytes: int = 0
    shares: set[int] = field(default_factory=set[int])


def _updates(program: Program, traffic: int | None, masters: str) -> list[_Update]:
    sizes: dict[str, int] = {}
    for entry in program.state.values():
        each = traffic or update_traffic(str(entry.spec.dtype), masters)
        sizes[entry.owner] = sizes.get(entry.owner, 0) + each * entry.spec.nbytes
    found = [_Update() for _ in program.blocks]
    for name, (owner, *others) in trained_holders(program).items():
        found[owner].nbytes += sizes[name]
        found[owner].shares.update(others)
    return found


def _whole_gradients(program: Program) -> frozenset[str]:
    """Keys of the parameters whose gradient is whole as it leaves the device, so that its norm can be taken there."""
    uses, state = Counter(key for block in program.blocks for key in block.binding), program.state
    return frozenset(k for k, n in uses.items() if n == 1 and state[k].base is None and state[k].spec.dtype in NORMED)


def _updated_there(program: Program, block: Block, update: _Update, masters: str) -> dict[str, int]:
    """The sizes of a block that the device can update: one that shares and returns nothing of what it trains."""
    entries, others = [program.state[key] for key in block.binding], {o.name for o in program.outputs}
    trained = {entry.key: entry.spec for entry in entries if entry.requires_grad}
    holders, specs = trained_holders(program), trained.values()
    is_alone = update.nbytes > 0 and all(holders.get(key) == (block.index,) for key in trained)
    if not is_alone or masters == "rounded" or others.intersection(trained):
        return {}
    if len(set(block.binding)) < len(entries) or any(spec.numel == 0 or spec.numel % LANES for spec in specs):
        return {}
    scratch = max(spec.nbytes for spec in specs) + update_scratch(spec.numel for spec in specs)
    layout = optimizer_image(state_image(entries, program.alignment), trained)
    return {"optimizer_bytes": layout.nbytes, "update_workspace_bytes": scratch}


def _block_work(program: Program, block: Block, update: _Update, whole: frozenset[str]) -> BlockWork:
    cost = program.templates[block.template].cost
    assert cost is not None, "measure runs before scheduling"
    results = cost.results
    is_differentiable = has_backward(program, block)
    trained = {k for k in block.binding if program.state[k].requires_grad}
    gradients = [program.state[k].spec.nbytes for k in trained] if is_differentiable else []
    sizes = {k: aligned(program.state[k].spec.nbytes, program.alignment) for k in block.binding}
    return BlockWork(
        name=block.name,
        state_bytes=sum(sizes.values()),
        frozen_bytes=sum(sizes[k] for k in block.binding if not program.state[k].requires_grad),
        gradient_bytes=sum(gradients),
        gradient_padding=sum(map(aligned, gradients)) - sum(gradients),
        num_gradients=len(gradients),
        partial_gradient_bytes=sum(program.state[k].spec.nbytes for k in trained - whole) if is_differentiable else 0,
        saved_bytes=cost.saved_bytes,
        forward_workspace_bytes=cost.forward_workspace_bytes,
        backward_workspace_bytes=cost.backward_workspace_bytes,
        has_backward=is_differentiable,
        forward=cost.forward,
        backward=cost.backward_of(program.needs_gradients(block)) if is_differentiable else (),
        update_bytes=update.nbytes,
        shares=tuple(sorted(update.shares)),
        kept=None if results is None or not is_differentiable else KeptWork(*results.figures),
    )


def _value_works(program: Program) -> tuple[ValueWork, ...]:
    readers = program.readers()
    commits = {name for _, name in program.commits}
    ends = {o.name for o in program.outputs if o.kind == "value"} | commits
    sharers: dict[int, int] = {}
    for value in program.values.values():
        sharers[value.storage] = sharers.get(value.storage, 0) + 1
    return tuple(
        ValueWork(
            name=value.name,
            nbytes=value.spec.nbytes,
            storage=value.storage,
            producer=value.producer,
            readers=readers[value.name],
            is_output=value.name in ends,
            has_gradient=value.requires_grad,
            is_parkable=value.producer is not None
            and value.name not in ends
            and not value.spec.on_host
            and sharers[value.storage] == 1
            and value.storage_bytes == value.spec.nbytes,
            is_committed=value.name in commits,
            on_host=value.spec.on_host,
        )
        for value in program.values.values()
    )


def _result_works(program: Program) -> Iterator[ValueWork]:
    found = [(block, *each) for block, results in kept_results(program) for each in results]
    for storage, (block, name, spec) in enumerate(found, start=len(_storages(program))):
        facts: tuple[Any, ...] = (), False, False, True
        yield ValueWork(name, spec.nbytes, storage, block.index, *facts, is_result=True)


def _storages(program: Program) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for value in program.values.values():
        found[value.storage] = max(found.get(value.storage, 0), value.storage_bytes)
    return tuple(found[i] for i in range(len(found)))
