"""Workloads for tests: the example of the design, chains of any length, and a strategy for all shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from megatrain.hardware.work import MEMORY, Kernels, Works, products
from megatrain.scheduler.builder.build import ACTIVATIONS
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import OUTPUTS, UPDATES
from megatrain.scheduler.workload import BlockWork, KeptWork, ValueWork, Workload

ACT, LAYER, EMBED = 8192, 132864, 65536


def block(name: str, state: int, *, has_backward: bool = True, **sizes: int) -> BlockWork:
    works = (products(10**6), products(2 * 10**6) if has_backward else ())
    default = BlockWork(name, state, state if has_backward else 0, 2 * ACT, ACT, 4 * ACT, has_backward, *works)
    return replace(default, **sizes)


def chain(sizes: list[int], *, act: int = ACT) -> Workload:
    """A model whose blocks each read what the one before computes; the last one's output is returned."""
    last = len(sizes) - 1
    values = [ValueWork("ids", 256, 0, None, (0,), False, False, False)]
    values += [
        ValueWork(f"v{i}", act, i + 1, i, () if i == last else (i + 1,), i == last, True, i != last)
        for i in range(len(sizes))
    ]
    blocks = tuple(block(f"layers.{i}", size) for i, size in enumerate(sizes))
    return Workload(blocks, tuple(values), (256, *[act] * len(sizes)))


def example() -> Workload:
    """The four blocks of the design: embedding, two layers, and a head tied to the embedding."""
    return chain([EMBED, LAYER, LAYER, EMBED])


def kernels() -> st.SearchStrategy[Works]:
    """Up to three kinds of kernels, products and others."""
    figure, count = st.integers(0, 40).map(lambda n: 1000 * n), st.integers(1, 9)
    of_products = st.builds(Kernels, st.sampled_from(["bf16", "fp32", "bf16 attention"]), figure, figure, count)
    return st.lists(of_products | st.builds(Kernels, st.just(MEMORY), st.just(0), figure, count), max_size=3).map(tuple)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockWork, ...]:
    """Up to seven blocks: without state, without backward, frozen, or with a huge state among them."""
    count = draw(st.integers(1, 7))
    found: list[BlockWork] = []
    for index in range(count):
        size = st.integers(0, 40)
        state = draw(st.sampled_from([0, 64, 64, 128, 192, 640]))
        has_backward = draw(st.sampled_from([True, True, True, False]))
        saved, forward, backward = draw(st.tuples(size, size, size))
        works = draw(kernels()), draw(kernels()) if has_backward else ()
        gradient = draw(st.sampled_from([0, state // 4, state, state])) if has_backward else 0
        frozen = draw(st.sampled_from([0, (state - gradient) // 2, state - gradient, state - gradient]))
        sizes = (state, gradient, saved, forward, backward)
        found.append(BlockWork(f"b{index}", *sizes, has_backward, *works, frozen_bytes=frozen))
    for index, work in enumerate(found):
        if work.gradient_bytes > 0 and draw(st.integers(0, 4)) > 0:
            # A backward of a block that holds a trained parameter makes a gradient of it.
            others = [(i, other) for i, other in enumerate(found) if i != index and other.state_bytes > 0]
            holders = [i for i, other in others if other.gradient_bytes > 0 or not other.has_backward]
            shares = draw(st.sets(st.sampled_from(holders), max_size=2)) if holders and draw(st.booleans()) else ()
            found[index] = replace(work, update_bytes=7 * work.gradient_bytes, shares=tuple(sorted(shares)))
    shared = {other for work in found for other in work.shares}
    for index, work in enumerate(found):
        if work.update_bytes and not (work.shares or index in shared) and draw(st.booleans()):
            sizes = draw(st.integers(1, 99)), draw(st.integers(0, 60))
            found[index] = replace(work, optimizer_bytes=sizes[0], update_workspace_bytes=sizes[1])
    return tuple(found)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Chains with skip links, several readers, far links, aliases, several outputs, unread values, some on the host."""
    works = draw(blocks())
    count = len(works)
    values: list[ValueWork] = []
    storages: list[int] = []
    producers = [None] * draw(st.integers(1, 2)) + [b for b in range(count) for _ in range(draw(st.integers(1, 2)))]
    for index, producer in enumerate(producers):
        first = 0 if producer is None else producer + 1
        later = st.sets(st.integers(first, count - 1), max_size=3) if first < count else st.just(set[int]())
        readers = draw(later) | ({first} if first < count and draw(st.booleans()) else set())
        nbytes = draw(st.integers(0, 30))
        if storages and draw(st.integers(0, 5)) == 0:
            storage = draw(st.integers(0, len(storages) - 1))
        else:
            storage = len(storages)
            storages.append(0)
        storages[storage] = max(storages[storage], nbytes + draw(st.sampled_from([0, 0, 0, 7])))
        has_gradient = draw(st.booleans()) if producer is None else works[producer].has_backward
        is_output = not readers or draw(st.integers(0, 6)) == 0
        values.append(
            ValueWork(
                f"v{index}",
                nbytes,
                storage,
                producer,
                tuple(sorted(readers)),
                is_output,
                has_gradient,
                is_parkable=False,
                is_committed=is_output and draw(st.integers(0, 3)) == 0,
            )
        )
    used = [value.storage for value in values]
    on_host = {s for s in range(len(storages)) if draw(st.integers(0, 4)) == 0}
    final = tuple(
        replace(
            v,
            is_parkable=v.producer is not None
            and not v.is_output
            and used.count(v.storage) == 1
            and v.storage not in on_host,
            on_host=v.storage in on_host,
        )
        for v in values
    )
    loss_bytes, reads_values = draw(st.sampled_from([0, 0, 20, 90])), draw(st.booleans())
    made = Workload(works, final, tuple(storages), loss_bytes, last_reads_values=reads_values)
    for index, work in enumerate(works):
        if work.has_backward and draw(st.integers(0, 2)) == 0:
            kept = draw(st.builds(KeptWork, st.integers(0, 40), st.integers(0, 40), kernels()))
            made = with_results(made, index, kept, draw(st.lists(st.integers(0, 30), min_size=1, max_size=2)))
    return made


def with_results(workload: Workload, block: int, kept: KeptWork, sizes: Sequence[int]) -> Workload:
    """The workload with a block that may keep results of these bytes."""
    works, values, storages = list(workload.blocks), list(workload.values), list(workload.storages)
    works[block] = replace(works[block], kept=kept)
    for number, nbytes in enumerate(sizes):
        storages.append(nbytes)
        name, storage = f"result {number} of {block}", len(storages) - 1
        values.append(ValueWork(name, nbytes, storage, block, (), False, False, True, is_result=True))
    return replace(workload, blocks=tuple(works), values=tuple(values), storages=tuple(storages))


@dataclass(frozen=True)
class Options:
    num_slots: int
    keep: int | None
    activations: str
    transfer: str
    mode: str
    micro_batches: int = 1
    updates: str = "none"
    clip: bool = False
    outputs: str = "keep"
    staying: frozenset[int] = frozenset()
    reports_norm: bool = False
    has_giants_alone: bool = False
    results: frozenset[int] = frozenset()
    device_updates: frozenset[int] = frozenset()

    def build(self, workload: Workload) -> Schedule:
        made = self._with_weights(workload)
        recomputed = set(workload.backward_blocks()).difference(made.saves) if made.kind.mode != "forward" else ()
        results = tuple(b for b in sorted(self.results & set(recomputed)) if workload.blocks[b].kept is not None)
        if not results:
            return made
        builder = Builder(workload, made.kind)
        resident = made.resident() if made.kind.transfer == "copy" and made.kind.is_training_step else ()
        kept = tuple(b for b in resident if b not in (*made.persistent, *made.device_updates))
        plan = Choices(self.num_slots, made.keep, made.saves, kept, made.persistent, self.has_giants_alone)
        return schedule_of(builder.table(replace(plan, results=results, device_updates=made.device_updates)))

    def _with_weights(self, workload: Workload) -> Schedule:
        made = self._built(workload)
        if made.kind.transfer == "bind" or not made.kind.is_training_step:
            return made
        there = self.device_updates if made.kind.may_update_there else ()
        there = tuple(sorted(b for b, work in enumerate(workload.blocks) if b in there and work.optimizer_bytes))
        if not (self.staying or self.has_giants_alone or there):
            return made
        blocks = [b for b in sorted(self.staying) if b < len(workload.blocks) and b not in there]
        frozen = tuple(b for b in blocks if workload.blocks[b].frozen_bytes > 0)
        builder = Builder(workload, made.kind)
        plan = Choices(self.num_slots, made.keep, made.saves, tuple(blocks[::2]), frozen, self.has_giants_alone)
        return schedule_of(builder.table(replace(plan, device_updates=there)))

    def _built(self, workload: Workload) -> Schedule:
        not_of_schedule = ("staying", "has_giants_alone", "results", "device_updates")
        return schedule(workload, **{name: part for name, part in vars(self).items() if name not in not_of_schedule})


def options() -> st.SearchStrategy[Options]:
    return st.builds(
        Options,
        num_slots=st.integers(1, 4),
        keep=st.one_of(st.none(), st.integers(0, 8)),
        activations=st.sampled_from(ACTIVATIONS),
        transfer=st.sampled_from(["copy", "copy", "copy", "bind"]),
        mode=st.sampled_from(["train", "train", "train", "forward", "backward"]),
        results=st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 6))),
    )


def whole_steps() -> st.SearchStrategy[Options]:
    def made(norm: str, updates: str, **chosen: Any) -> Options:
        reports = norm == "reported" and updates in ("overlap", "serial")
        return Options(updates=updates, clip=norm == "clipped" and updates != "spread", reports_norm=reports, **chosen)

    return st.builds(
        made,
        num_slots=st.integers(1, 3),
        keep=st.one_of(st.none(), st.integers(0, 8)),
        activations=st.sampled_from(ACTIVATIONS),
        transfer=st.sampled_from(["copy", "copy", "copy", "bind"]),
        mode=st.just("train"),
        micro_batches=st.integers(1, 4),
        updates=st.sampled_from(UPDATES),
        norm=st.sampled_from(["none", "clipped", "reported"]),
        outputs=st.sampled_from(OUTPUTS),
        staying=st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 6))),
        has_giants_alone=st.booleans(),
        results=st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 6))),
        device_updates=st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 6), min_size=3)),
    )


def schedules() -> st.SearchStrategy[Schedule]:
    """Schedules of one micro-batch that leave the parameters alone."""
    return st.builds(lambda workload, chosen: chosen.build(workload), workloads(), options())


def step_schedules() -> st.SearchStrategy[Schedule]:
    """Schedules of whole steps: micro-batches, updates, norms."""
    return st.builds(lambda workload, chosen: chosen.build(workload), workloads(), whole_steps())


def with_updates(workload: Workload) -> Workload:
    """The workload with an update of all that is trained."""
    blocks = tuple(replace(b, update_bytes=7 * b.gradient_bytes) for b in workload.blocks)
    return replace(workload, blocks=blocks)


def with_room_for_state(workload: Workload) -> Workload:
    """The same, whose blocks the device can update: AdamW's state of bf16 parameters takes five times their bytes."""
    sizes = [(5 * b.state_bytes, b.state_bytes // 8) for b in workload.blocks]
    pairs = zip(workload.blocks, sizes, strict=True)
    return replace(
        workload,
        blocks=tuple(replace(b, optimizer_bytes=s, update_workspace_bytes=w) for b, (s, w) in pairs),
    )


def trained(count: int, *, tied: bool = False) -> Workload:
    """A chain of layers, all of them trained; tied ones share parameters between the first and the last."""
    workload = with_updates(chain([LAYER] * count))
    if not tied:
        return workload
    first, last = replace(workload.blocks[0], shares=(count - 1,)), replace(workload.blocks[-1], update_bytes=0)
    return replace(workload, blocks=(first, *workload.blocks[1:-1], last))


def assert_checked_and_read_back(plan: Schedule, workload: Workload) -> None:
    """A schedule is right, and its text says all of it."""
    plan.check(workload, instructions=plan.instructions)
    assert Schedule.parse(str(plan), workload) == plan
