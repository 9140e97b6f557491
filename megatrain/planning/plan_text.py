"""The printed form of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from torch import fx

from megatrain.base.counts import counted
from megatrain.base.sizes import format_bytes
from megatrain.device.accelerator import beside
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import unknown_card
from megatrain.hardware.work import Works
from megatrain.passes.program import Block, Program
from megatrain.passes.rewrites.head_loss import HeadLoss
from megatrain.passes.rewrites.masked_attention import ATTENTION, BandedAttention, MaskNote
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.planning.host_plan import in_columns
from megatrain.planning.planned_step import PlannedStep
from megatrain.scheduler.bands import band_of, format_s
from megatrain.scheduler.builder.search import result_bytes, spared_seconds
from megatrain.scheduler.lifetimes import find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import OpSeconds
from megatrain.scheduler.text import ranges


def reserve_text(plan: PlannedStep) -> str:
    """Says what a device needs besides the memory that a schedule may take, and whether a plan knows its card."""
    if plan.asked is None:
        return ""
    limits, memory = plan.asked.limits, plan.device_memory
    device, nbytes = limits.device, plan.schedule.device_bytes if memory is None else memory
    if not limits.has_device:
        # Without a device there is no figure of a card: the smallest on which so much may be planned.
        return f"{format_bytes(beside(nbytes))} of a card besides, assumed: a tenth of its memory, at least 1 GiB"
    unknown = unknown_card(device) if plan.hardware is None else ""
    if device.can_bind:
        return unknown
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in device.uncounted())
    total = format_bytes(device.reserve(device.memory().total))
    text = f"{total} of {device} besides{f', of which {parts}' if parts else ''}"
    return f"{text}\n  {unknown}" if unknown else text


def ring_text(machine: Hardware) -> str:
    """Says how weights cross that the system can't page-lock."""
    assert machine.locked_bytes is not None
    return (
        f"the system page-locks {format_bytes(machine.locked_bytes)}, less than the weights, which pass through a "
        f"small locked ring: {machine.h2d_bytes_per_s / 1e9:.1f} GB/s"
    )


def verdict(nbytes: int, memory: int | None) -> str:
    """Says whether so many bytes fit."""
    if memory is None:
        return format_bytes(nbytes)
    lacking = nbytes - memory
    verdict = (
        f"fits, {format_bytes(-lacking)} left" if lacking <= 0 else f"doesn't fit, {format_bytes(lacking)} missing"
    )
    return f"{format_bytes(nbytes)} of {format_bytes(memory)}: {verdict}"


def _counted(sizes: Iterable[int]) -> Iterator[str]:
    for size, equal in groupby(sizes):
        count = len(list(equal))
        yield format_bytes(size) if count == 1 else f"{count} x {format_bytes(size)}"


def device_lines(table: Schedule, hardware: Hardware | None) -> list[str]:
    """What takes the device's memory at the peak, and what stays, parks and moves."""
    workload = table.known_workload()
    peak = find_peak(table)
    rows = [(f"at {peak.op}", "bytes", "size"), *((name, str(n), format_bytes(n)) for name, n in peak.parts)]
    kept = f"graphs of {len(table.saves)} of {len(workload.backward_blocks())} blocks, inputs of the last {table.keep}"
    if table.kind.transfer == "copy":
        kept += f", weights of {len(table.resident())}"
        kept += f" (frozen ones of {len(table.persistent)} across steps)" if table.persistent else ""
    number, parked = table.kind.micro_batches, table.parked()
    num_parked = number * sum(map(len, parked.values()))
    num_evicted = number * sum(len(parked[block]) for block in table.evicted)
    in_file = f", {num_evicted} of them in a file" if num_evicted else ""
    return [
        *in_columns(rows),
        f"slots: {', '.join(_counted(slot.nbytes for slot in table.slots))}",
        f"keeps: {kept}; parks {counted(num_parked, 'activation')}{in_file}",
        *results_lines(table, hardware),
        *(f"updates: {line}" for line in [updates_there(table)] if line),
        f"moves: {format_bytes(table.h2d_bytes)} to the device, {format_bytes(table.d2h_bytes)} to the host",
    ]


def updates_there(table: Schedule) -> str:
    """What the device updates, in words; empty if that is nothing."""
    blocks = [table.known_workload().blocks[block] for block in table.device_updates]
    nbytes = format_bytes(sum(block.state_bytes + block.optimizer_bytes for block in blocks))
    number = f"{len(blocks)} of {counted(len(table.known_workload().update_blocks()), 'block')}"
    return f"{number} on the device, where weights and optimizer state ({nbytes}) stay" if blocks else ""


def time_text(plan: PlannedStep) -> list[str]:
    """The lines about time and its bound, if there is a machine."""
    found = plan.simulation
    if found is None or plan.hardware is None:
        return []
    step_s, bound = found.step_s, plan.lower_bound
    rate = f"; {plan.tokens_per_s:.0f} tokens/s" if plan.tokens_per_s else ""
    busy = ", ".join(f"{stream} {fraction:.0%}" for stream, fraction in found.busy.items())
    text = f"time: step {format_s(step_s)}; busy: {busy}; bound by {found.bound}"
    lines = [f"{text}; predicted for {plan.hardware.name}{rate}"]
    if plan.hardware.is_staged and plan.reads is None:
        lines.append(f"copies: {ring_text(plan.hardware)}")
    if bound is not None:
        more = f"{bound.above(step_s):.1%} more"
        lines.append(f"bound: {format_s(bound.seconds)}, {bound.reason}; the step takes {more}")
    return lines


class _Kept(NamedTuple):
    """The results that are kept in a step, the part that is parked, and the seconds of compute that this spares."""

    nbytes: int
    parked_bytes: int
    seconds: float | None


def results_lines(table: Schedule, hardware: Hardware | None) -> list[str]:
    """A line about the results that are kept, if any are."""
    if not table.results:
        return []
    kept = _kept(table, hardware)
    where = f"in block{'s' * (len(table.results) > 1)} {', '.join(ranges(table.results))}"
    spared = "" if kept.seconds is None else f", {format_s(kept.seconds)} of compute less"
    sizes = f"{format_bytes(kept.nbytes)}, of which {format_bytes(kept.parked_bytes)} parked"
    return [f"results: of attention {where} kept instead of computed again, {sizes}{spared}"]


def results_reason(table: Schedule, hardware: Hardware | None) -> str:
    """Says why results are kept; empty if none are."""
    if not table.results:
        return ""
    kept = _kept(table, hardware)
    text = (
        f"Of {counted(len(table.results), 'block')} the results of attention are kept ({format_bytes(kept.nbytes)}, of "
        f"which {format_bytes(kept.parked_bytes)} are parked on the host), so that attention isn't recomputed"
    )
    if kept.seconds is None or hardware is None:
        return f"{text}."
    there, back = kept.parked_bytes / hardware.d2h_bytes_per_s, kept.parked_bytes / hardware.h2d_bytes_per_s
    crossing = f"they cross in {format_s(there)} and {format_s(back)}" if kept.parked_bytes else "none of them crosses"
    return f"{text}: that spares {format_s(kept.seconds)} of compute a step, and {crossing}."


def _kept(table: Schedule, hardware: Hardware | None) -> _Kept:
    workload, number = table.known_workload(), table.kind.micro_batches
    values = [workload.values[value] for values in table.parked().values() for value in values]
    seconds = None
    if hardware is not None:
        costs = OpSeconds(hardware)
        seconds = number * sum(spared_seconds(workload, block, costs) for block in table.results)
    return _Kept(
        number * sum(result_bytes(workload, block) for block in table.results),
        number * sum(value.nbytes for value in values if value.is_result),
        seconds,
    )


def piece_lines(program: Program) -> list[str]:
    """A line for smaller blocks, for each head whose loss is computed in chunks, for tiles of a template, for masks."""
    return [*_blocks(program), *_chunks(program), *_tiles(program), *_masks(program)]


def _blocks(program: Program) -> Iterator[str]:
    if program.block_bytes is not None:
        largest = max(map(program.state_bytes, program.blocks), default=0)
        yield (
            f"blocks: {len(program.blocks)} of about {format_bytes(program.block_bytes)} of state instead of the "
            f"model's own modules, the largest with {format_bytes(largest)}"
        )


def _chunks(program: Program) -> Iterator[str]:
    for block, node in _calls_of(program, HeadLoss):
        target: HeadLoss = node.target  # pyright: ignore[reportAssignmentType]
        weight = node.args[2].meta["spec"]  # pyright: ignore
        rows, num_rows = target.head.rows, target.shape.numel()
        row_bytes = weight.shape[0] * weight.nbytes // max(1, weight.numel)
        sizes = f"{format_bytes(rows * row_bytes)} instead of {format_bytes(num_rows * row_bytes)}"
        where = f"in block {block.index} ({block.name})"
        yield f"chunked: logits of {rows} of {num_rows} rows at a time {where}, {sizes}"


def _tiles(program: Program) -> Iterator[str]:
    regions: dict[tuple[str, int, int], dict[fx.Node, TiledRegion]] = {}
    blocks: dict[tuple[str, int, int], dict[int, None]] = {}
    for block, node in _calls_of(program, TiledRegion):
        region: TiledRegion = node.target  # pyright: ignore[reportAssignmentType]
        key = block.template, region.rows, region.num_tokens
        regions.setdefault(key, {})[node] = region  # blocks of one template share its nodes
        blocks.setdefault(key, {})[block.index] = None
    for key, found in regions.items():
        _, rows, tokens = key
        calls, inner = sum(r.num_calls for r in found.values()), sum(r.inner_bytes for r in found.values())
        sizes = f"{format_bytes(inner * rows // tokens)} instead of {format_bytes(inner)} between them"
        where = f"in block{'s' * (len(blocks[key]) > 1)} {', '.join(ranges(list(blocks[key])))}"
        yield f"tiled: {counted(calls, 'call')} on {rows} of {tokens} tokens at a time {where}, {sizes}"


def _masks(program: Program) -> Iterator[str]:
    blocks: dict[tuple[str, int, str], dict[int, None]] = {}
    for block in program.blocks:
        for node in program.templates[block.template].graph.nodes:
            note: MaskNote | None = node.meta.get("mask")
            is_banded = isinstance(node.target, BandedAttention)
            if note is None or not (is_banded or node.target is ATTENTION):
                continue
            keys = f" on {node.target.most_keys} keys" if is_banded else ""  # pyright: ignore
            blocks.setdefault((note.text + keys, note.nbytes, note.promise), {})[block.index] = None
    for (text, nbytes, _), found in blocks.items():
        where = f"in block{'s' * (len(found) > 1)} {', '.join(ranges(list(found)))}"
        yield f"masks: attention {where} with {text} instead of a mask of {format_bytes(nbytes)}"


def _calls_of(program: Program, kind: type) -> Iterator[tuple[Block, fx.Node]]:
    for block in program.blocks:
        for node in program.templates[block.template].graph.nodes:
            if isinstance(node.target, kind):
                yield block, node


GIB = 1 << 30


def reasons(plan: PlannedStep) -> str:
    """Says why a plan is as it is; the next GiB of memory is planned for that."""
    kept = [*_what_is_kept(plan), *_updates_there(plan)]
    parts = [_time(plan), *_kernels(plan), *_peak(plan), *kept, *_next_gib(plan), *_host(plan)]
    return "\n".join(parts)


def _time(plan: PlannedStep) -> str:
    if plan.simulation is None:
        return (
            "No time is known without hardware=: graphs are retained first, then weights stay, as far as memory goes."
        )
    step_s = plan.simulation.step_s
    rate = f", {plan.tokens_per_s:.0f} tokens/s" if plan.tokens_per_s else ""
    machine = plan.hardware.name if plan.hardware is not None and plan.hardware.name else "this machine"
    return f"On {machine} a step takes {format_s(step_s)}{rate}. {_bound(plan)}{_least(plan, step_s)}"


# A step that gets shorter by less isn't worth other numbers.
_WORTH = 0.05


def _kernels(plan: PlannedStep) -> Iterator[str]:
    """How kernels are launched, and what a compiler would gain if that is much; the step is planned again for that."""
    if plan.kernels:
        yield f"Kernels are {plan.kernels}."
    if plan.asked is None or plan.step_s is None or plan.too_small is not None:
        return
    if plan.asked.limits.kernels == "inductor" or not plan.asked.limits.may_compile:
        return
    fused = plan.asked.again({"kernels": "inductor"})
    if fused.too_small is None and fused.step_s is not None and fused.step_s <= plan.step_s * (1 - _WORTH):
        yield (
            f'With kernels="inductor" (--kernels inductor) a step would take {format_s(fused.step_s)}, '
            f"{1 - fused.step_s / plan.step_s:.1%} less: norms, activations and other chains of element-wise calls "
            "would be one kernel each. Numbers then differ by rounding."
        )


def _least(plan: PlannedStep, step_s: float) -> str:
    """How far a plan is from the bound of all."""
    bound = plan.lower_bound
    if bound is None:
        return ""
    memory = "" if plan.device_memory is None else f" in {format_bytes(plan.device_memory)}"
    above = bound.above(step_s)
    found = "this one takes as long" if f"{above:.1%}" == "0.0%" else f"this one takes {above:.1%} more"
    return f" No plan of these blocks{memory} takes less than {format_s(bound.seconds)} ({bound.reason}): {found}."


def _bound(plan: PlannedStep) -> str:
    assert plan.simulation is not None
    band = band_of("plan", "", plan.schedule, plan.simulation.timeline)
    bound, share = next(iter(band.shares.items()))
    text = f"It is bound by {bound}, {share:.0%} of the time."
    if band.then is None:
        return text
    return f"{text} Without the time of {bound} it would take {format_s(band.then.step_s)}, bound by {band.then.name}."


def _peak(plan: PlannedStep) -> Iterator[str]:
    table = plan.schedule
    peak = find_peak(table)
    where = "" if peak.op is None else f" at {peak.op}"
    if peak.op is not None and peak.op.block >= 0:
        where += f", in block {peak.op.block} ({plan.program.blocks[peak.op.block].name})"
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in peak.parts)
    yield f"The device's peak is {format_bytes(table.device_bytes)}{where}: {parts}."


def _what_is_kept(plan: PlannedStep) -> Iterator[str]:
    table, machine = plan.schedule, plan.hardware
    work = table.known_workload()
    backward, numbers = work.backward_blocks(), table.kind.micro_batches
    recomputed = [b for b in backward if b not in table.saves]
    saved = sum(work.blocks[b].saved_bytes for b in table.saves)
    each = "" if numbers == 1 else " a micro-batch"
    text = f"The graphs of {len(table.saves)} of {len(backward)} blocks are retained ({format_bytes(saved)}{each})"
    if recomputed:
        more = sum(work.blocks[b].saved_bytes for b in recomputed)
        text += f"; the others would take {format_bytes(more)} more{each}, so they are recomputed"
        if machine is not None:
            seconds = numbers * sum(machine.seconds(_repeated(table, b)) for b in recomputed)
            text += f", {format_s(seconds)} a step"
    yield f"{text}."
    yield from filter(None, [results_reason(table, machine)])
    yield from _weights(table)
    yield from _parks(plan)


def _updates_there(plan: PlannedStep) -> Iterator[str]:
    if found := updates_there(plan.schedule):
        yield f"Updates of {found}: neither these weights nor their gradients cross."
    elif plan.why_host and plan.schedule.kind.updates != "none":
        yield f"The host makes all updates: {plan.why_host}."


def _repeated(table: Schedule, block: int) -> Works:
    """The kernels of the recompute of a block."""
    work = table.known_workload().blocks[block]
    return work.kept.repeated if work.kept is not None and block in table.results else work.forward


def _weights(table: Schedule) -> Iterator[str]:
    if table.kind.transfer == "bind":
        return
    resident = table.resident()
    text = f"Weights of {len(resident)} of {table.num_blocks} blocks cross to the device once a step, the others twice"
    if table.persistent:
        text += f"; frozen ones of {len(table.persistent)} blocks stay from step to step, and don't cross again"
    moved = f"{format_bytes(table.h2d_bytes)} to the device, {format_bytes(table.d2h_bytes)} to the host"
    yield f"{text}. A step moves {moved}, activations included."


def _parks(plan: PlannedStep) -> Iterator[str]:
    table = plan.schedule
    count = table.kind.micro_batches * sum(map(len, table.parked().values()))
    if not count:
        yield "No activation is parked on the host."
        return
    text = f"The host parks {counted(count, 'activation')} ({format_bytes(table.park_bytes)})"
    if table.evicted:
        text += f", and a file has {format_bytes(table.evicted_bytes)} of them between forward and backward"
    if plan.simulation is not None and plan.hardware is not None:
        busy = max(share for stream, share in plan.simulation.busy.items() if stream in ("h2d", "d2h"))
        text += f": the link is busy for {busy:.0%} of the step"
    yield f"{text}."


def _next_gib(plan: PlannedStep) -> Iterator[str]:
    if plan.device_memory is None:
        yield "The device's memory isn't bounded, so more of it buys nothing."
        return
    if plan.asked is None:
        return
    more = plan.asked.again({"device_memory": plan.device_memory + GIB})
    if more.too_small is not None:
        yield "With 1 GiB more of the device the step would still not fit."
        return
    if plan.too_small is not None:
        yield "With 1 GiB more of the device the step would fit."
        return
    gains = _gains(plan, more)
    if not gains:
        yield "With 1 GiB more of the device nothing would change."
        return
    text = f"With 1 GiB more of the device there would be {', '.join(gains)}"
    here, there = plan.step_s, more.step_s
    if here is not None and there is not None:
        less = f"{1 - there / here:.1%}"
        is_shorter = there < here and less != "0.0%"
        text += f": a step would take {format_s(there)}, {less} less" if is_shorter else ", and a step no shorter"
    yield f"{text}."


def _gains(plan: PlannedStep, more: PlannedStep) -> list[str]:
    """What changes, in words: each figure before and after."""
    found: list[str] = []
    for name, here, there in (
        ("blocks with results kept", len(plan.schedule.results), len(more.schedule.results)),
        ("retained graphs", len(plan.schedule.saves), len(more.schedule.saves)),
        ("blocks whose weights cross once", len(plan.schedule.resident()), len(more.schedule.resident())),
        ("blocks whose frozen weights stay", len(plan.schedule.persistent), len(more.schedule.persistent)),
        ("blocks updated on the device", len(plan.schedule.device_updates), len(more.schedule.device_updates)),
        ("slots", len(plan.schedule.slots), len(more.schedule.slots)),
    ):
        found += [f"{there} {name} in place of {here}"] if here != there else []
    parks = [table.park_bytes for table in (plan.schedule, more.schedule)]
    found += [f"{format_bytes(parks[1])} parked in place of {format_bytes(parks[0])}"] if parks[0] != parks[1] else []
    return found


def _host(plan: PlannedStep) -> Iterator[str]:
    largest = sorted(plan.host.rows, key=lambda row: -row.nbytes)[:3]
    parts = ", ".join(f"{row.name} {format_bytes(row.nbytes)}" for row in largest)
    yield f"The host holds {format_bytes(plan.host.total_bytes)}, most of it {parts}."
    yield from _cheaper(plan)


# The parts of what is parked that a cheaper plan goes without, the seconds that it may cost, and what it must spare.
_LESS_PARKED = (1.0, 0.5)
_SLOWER, _CHEAPER = 0.01, 0.05


def _cheaper(plan: PlannedStep) -> Iterator[str]:
    """Names a plan that takes hardly longer with less of the host, where what is parked there allows one."""
    parked, here, total = plan.schedule.park_bytes, plan.step_s, plan.host.total_bytes
    if plan.asked is None or here is None or not plan.fits:
        return
    for part in _LESS_PARKED:
        bound = total - int(part * parked)
        if total - bound < _CHEAPER * total:
            return
        other = plan.asked.again({"host_memory": bound})
        there, spared = other.step_s, total - other.host.total_bytes
        is_alike = other.fits and other.schedule.evicted_bytes <= plan.schedule.evicted_bytes  # no drive wears for that
        if is_alike and there is not None and there <= (1 + _SLOWER) * here and spared >= _CHEAPER * total:
            more = f"{there / here - 1:.1%}"
            longer = f"{more} more" if there > here and more != "0.0%" else "no more"
            yield (
                f"With {format_bytes(spared)} less of the host, by host_memory=, a step would take "
                f"{format_s(there)}, {longer}."
            )
            return
