"""`megatrain plan`: the memory and the time of a training step, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from megatrain.counts import counted
from megatrain.device.accelerator import of_card
from megatrain.errors import MegatrainError, OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import GIB, PRESETS
from megatrain.planning.advice import Alternative, Variation, alternatives, refusal
from megatrain.planning.bands import format_s
from megatrain.planning.host_plan import LORA, MICRO_BATCH, SEQUENCE, ModelSizes
from megatrain.planning.largest import missing
from megatrain.planning.plan import Plan
from megatrain.planning.planned_step import UNBOUNDED
from megatrain.planning.planner import Planner, StepOptions
from megatrain.progress import stage
from megatrain.reporting.step_report import check_report_path, report
from megatrain.scheduler.step_kind import MOST_MICRO_BATCHES
from megatrain.sizes import format_bytes, parse_bytes
from megatrain.sizing.sized_models import sized_model
from megatrain.sizing.sizing_options import ALL, IN_COMMAND, SizingOptions, check_options

_HEADS = ("machine", "memory", "micro-batches", "device", "host", "a step", "tokens/s", "bound by")


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A step on one machine.

    Args:
        machine: Its name.
        batch: The best that was found; None if nothing could be planned.
        refused: Why not, in a line.
    """

    machine: str
    batch: StepSplit | None
    refused: str = ""

    def lacks(self) -> str:
        """What the step lacks on this machine; empty if it fits."""
        if self.batch is None:
            return self.refused
        plan, machine = self.batch.plan, PRESETS[self.machine]
        if machine.is_unified and not plan.fits:
            memory = int(machine.gib * GIB)
            needed = plan.schedule.device_bytes + plan.host.total_bytes + of_card(memory)
            if needed > memory:
                return f"{format_bytes(needed - memory)} of the memory are missing"
        return missing(plan) or ""

    def cells(self) -> tuple[str, ...]:
        """The row as text; where the step doesn't fit, what is missing."""
        memory = format_bytes(int(PRESETS[self.machine].gib * GIB))
        if self.batch is None:
            return self.machine, memory, self.refused
        plan, lacks = self.batch.plan, self.lacks()
        if lacks:
            return self.machine, memory, f"doesn't fit: {lacks}"
        assert plan.simulation is not None
        step_s, tokens = plan.simulation.step_s, plan.tokens_per_step
        busy = plan.simulation.busy[plan.simulation.bound]
        return (
            self.machine,
            memory,
            f"{self.batch.count} x {self.batch.size}",
            format_bytes(plan.schedule.device_bytes),
            format_bytes(plan.host.total_bytes),
            format_s(step_s),
            "" if tokens is None else f"{tokens / step_s:.0f}",
            f"{plan.simulation.bound} {busy:.0%}",
        )


def table_text(rows: Sequence[MachineRow]) -> str:
    """The rows under each other; a text that takes the place of figures runs over their columns."""
    cells = [_HEADS, *(row.cells() for row in rows)]
    whole = [row for row in cells if len(row) == len(_HEADS)]
    widths = [max(len(row[i]) for row in (whole if i > 1 else cells)) for i in range(len(_HEADS))]
    right = range(3, len(_HEADS) - 1)
    return "\n".join(
        "  ".join(
            text.rjust(widths[i]) if i in right and len(row) > i else text.ljust(widths[i])
            for i, text in enumerate(row)
        ).rstrip()
        for row in cells
    )


# Of the sizes with which the samples of a step can be split, so many are planned, the smallest first.
_MOST_SIZES = 6
# A step shorter by less than this part isn't worth larger micro-batches.
_NEAR = 0.002


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The micro-batches of a step.

    Args:
        size: Samples of a micro-batch.
        count: Micro-batches.
        plan: Of the step.
        tried: All ways that were planned; of one of these, none.
    """

    size: int
    count: int
    plan: Plan = field(repr=False)
    tried: tuple[StepSplit, ...] = ()


def best_batch(planner: Planner, options: StepOptions, sizes: Mapping[str, int], num_samples: int) -> StepSplit:
    """Plans each way to split the samples of a step, and takes the shortest step that fits.

    If none fits, it is the one that lacks least.

    Args:
        planner: Of the model.
        options: Of the step; its `micro_batches` is chosen.
        sizes: Of the model; its micro-batch is chosen if it is missing.
        num_samples: Of a step.
    """
    found: list[StepSplit] = []
    for size in _sizes(sizes, num_samples):
        count = num_samples // size
        plan = planner.plan(replace(options, micro_batches=count), {**sizes, MICRO_BATCH: size})
        found.append(StepSplit(size, count, plan))
    best = found[0]
    for each in found[1:]:
        best = each if _is_better(each.plan, best.plan) else best
    return replace(best, tried=tuple(found))


def _is_better(one: Plan, other: Plan) -> bool:
    if one.fits != other.fits:
        return one.fits
    if not one.fits:
        return _lacking(one) < _lacking(other)
    return _seconds(one) < _seconds(other) * (1 - _NEAR)


def _lacking(plan: Plan) -> int:
    return plan.missing_device_bytes + plan.missing_host_bytes


def _seconds(plan: Plan) -> float:
    return Alternative.of(Variation(), plan).step_s or 0.0


def _sizes(sizes: Mapping[str, int], num_samples: int) -> list[int]:
    if MICRO_BATCH in sizes:
        return [sizes[MICRO_BATCH]]
    return list(_divisors(num_samples))[:_MOST_SIZES]


def _divisors(number: int) -> Iterator[int]:
    """Those that make no more micro-batches than a step may have."""
    return (n for n in range(1, number + 1) if number % n == 0 and number // n <= MOST_MICRO_BATCHES)


def samples_of(tokens_per_step: int, micro_batch: int, length: int) -> int:
    """How many sequences a step has: as many whole micro-batches as its tokens allow.

    Raises:
        OptionError: If there is less than one micro-batch.
    """
    if tokens_per_step < micro_batch * length:
        raise OptionError(
            f"--tokens-per-step {tokens_per_step} is less than one micro-batch: {micro_batch} x {length} tokens.\n"
            "  A step has one micro-batch or more.\n"
            f"  Give --tokens-per-step {micro_batch * length}, or a smaller --sequence or --micro-batch."
        )
    return tokens_per_step // (micro_batch * length) * micro_batch


_MAX_GRAD_NORM = 1.0
# A unified memory is shared out between device and host so often, until both parts fit.
_SHARINGS = 4
_Made = TypeVar("_Made")


def print_sizing(options: SizingOptions) -> None:
    """Plans, and prints what was found.

    Args:
        options: What is asked for.

    Raises:
        OptionError: If the model can't be made, or a report can't be written.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
    """
    for path in (options.report, options.trace):
        if path is not None:
            check_report_path(path)
    source = _staged("making the model", lambda: sized_model(options))
    planner, sizes = Planner(source), _given_sizes(options, source)
    samples = _samples(options, source)
    if options.hardware == ALL:
        rows = [
            row_of(planner, options, sizes, samples, name)
            for name in tqdm(Hardware.presets(), desc="planning", unit="machine", leave=False, disable=None)
        ]
        print(_step_line(samples, source, None))
        print(table_text(rows))
        return
    found = _staged("planning", lambda: batch_on(planner, options, sizes, samples, options.hardware))
    print(_step_line(samples, source, found))
    print(f"\n{found.plan}")
    _print_more(options, found)
    if found.plan.fits:
        _draw(options, found.plan)
    error = _staged("looking for ways out", lambda: refusal(found.plan, IN_COMMAND))
    if error is not None:
        raise error


def _draw(options: SizingOptions, plan: Plan) -> None:
    """Writes the page and the trace that are asked for."""
    if options.report is None:
        return
    made = report(plan, options.report)
    print(f"\n{made}\nwritten: {options.report} ({format_bytes(Path(options.report).stat().st_size)})")
    if options.trace is not None:
        made.perfetto(options.trace)
        print(f"written: {options.trace} ({format_bytes(Path(options.trace).stat().st_size)})")


def _print_more(options: SizingOptions, found: StepSplit) -> None:
    if options.why:
        print(f"\n{_staged('planning', found.plan.why)}")
    if options.alternatives:
        print(f"\n{_staged('planning alternatives', lambda: alternatives(found.plan, IN_COMMAND))}")
    if options.largest is not None:
        name = options.largest
        print(f"\n{_staged('planning sizes', lambda: found.plan.largest(name))}")


def row_of(planner: Planner, options: SizingOptions, sizes: Mapping[str, int], samples: int, name: str) -> MachineRow:
    """The row of a machine in the table of all."""
    try:
        return MachineRow(name, batch_on(planner, options, sizes, samples, name))
    except MegatrainError as error:
        return MachineRow(name, None, str(error).splitlines()[0])


def batch_on(
    planner: Planner, options: SizingOptions, sizes: Mapping[str, int], samples: int, name: str | None
) -> StepSplit:
    """The best way to split a step on a machine of the table, or on so much memory."""
    step = _step_options(options, name)
    if name is None or not PRESETS[name].is_unified:
        return best_batch(planner, step, sizes, samples)
    assert step.device_memory is not None
    given = step.device_memory if options.host_memory is None else parse_bytes(options.host_memory, "host_memory")
    return _shared(planner, step, sizes, samples, min(step.device_memory, given))


def _shared(planner: Planner, options: StepOptions, sizes: Mapping[str, int], samples: int, total: int) -> StepSplit:
    """The best way on a machine whose device and host share one memory: what the host holds, the device can't have.

    Args:
        planner: Of the model.
        options: Of the step; its two budgets are chosen.
        sizes: As in `best_batch`.
        samples: See there.
        total: Bytes of the memory.
    """

    def split(device_memory: int, host_memory: int) -> StepSplit:
        budgets = {"device_memory": max(1, device_memory), "host_memory": max(1, host_memory)}
        return best_batch(planner, replace(options, **budgets), sizes, samples)

    least = split(1, UNBOUNDED).plan
    device, host = least.schedule.device_bytes, least.host.total_bytes - least.host.bytes_of("parks")
    for _ in range(_SHARINGS):
        if device + host > total:
            # No room for both: the least that a device needs, and what it leaves.
            return split(device, total - device)
        plan = split(total - host, UNBOUNDED).plan
        if plan.host.total_bytes <= total - plan.schedule.device_bytes:
            return split(total - host, total - plan.schedule.device_bytes)
        host = max(host, plan.host.total_bytes)
    return split(total - host, host)


def _step_options(options: SizingOptions, name: str | None) -> StepOptions:
    machine = None if name is None else Hardware.preset(name)
    if machine is not None and options.host_bandwidth is not None:
        machine = replace(machine, host_bytes_per_s=float(parse_bytes(options.host_bandwidth, "host_bandwidth")))
    memory = None if options.memory is None else parse_bytes(options.memory, "memory")
    if memory is None:
        assert machine is not None
        assert machine.memory_bytes is not None
        memory = machine.memory_bytes - of_card(machine.memory_bytes)
    return StepOptions(
        device_memory=memory,
        host_memory=UNBOUNDED if options.host_memory is None else parse_bytes(options.host_memory, "host_memory"),
        optimizer=options.torch_optimizer,
        precision=options.precision,
        masters=options.masters,
        max_grad_norm=None if options.no_clipping else _MAX_GRAD_NORM,
        overlap=not options.no_overlap,
        activations=options.activations,
        block_bytes=None if options.block_bytes is None else parse_bytes(options.block_bytes, "block_bytes"),
        chunking=options.chunking,
        hardware=machine,
    )


def _given_sizes(options: SizingOptions, source: ModelSizes) -> Mapping[str, int]:
    """Sizes that are given; the micro-batch is left to the search if it isn't and can change."""
    given = {name: size for name, size in source.sizes.items() if name in (SEQUENCE, LORA)}
    fixed = options.micro_batch is not None or MICRO_BATCH not in source.sizes
    return {**given, **({MICRO_BATCH: options.micro_batch or 1} if fixed else {})}


def _samples(options: SizingOptions, source: ModelSizes) -> int:
    """Sequences of a step."""
    return samples_of(options.tokens_per_step, options.micro_batch or 1, source.sizes.get(SEQUENCE, 1))


def _step_line(samples: int, source: ModelSizes, found: StepSplit | None) -> str:
    length = source.sizes.get(SEQUENCE, 1)
    text = f"step: {counted(samples * length, 'token')}, {counted(samples, 'sequence')} of {length}"
    if found is None:
        return text
    text += f", as {counted(found.count, 'micro-batch')} of {found.size}"
    others = ", ".join(str(each.size) for each in found.tried)
    return text if len(found.tried) == 1 else f"{text}: the shortest step of {others} sequences in a micro-batch"


def _staged(name: str, make: Callable[[], _Made]) -> _Made:
    with stage(name):
        return make()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain plan` takes."""
    parser.add_argument(
        "config",
        help="config.json of a Hugging Face model, a folder with one, or module:function (or file.py:function), which "
        "returns a model, or (model, inputs); no weights are read",
    )
    _add(parser, "--hardware", str, f"a machine such as rtx-4090, or {ALL} for a table of all")
    _add(parser, "--memory", str, "device memory of a step (default: the machine's, less a reserve)")
    _add(parser, "--host-memory", str, "memory of the host, such as 128GiB (default: as much as it takes)")
    _add(parser, "--sequence", int, "tokens of a sequence (default: 4096, or what the model takes if that is less)")
    _add(parser, "--tokens-per-step", int, "tokens of a step (default: 65536)")
    _add(parser, "--micro-batch", int, "sequences in a micro-batch (default: those with the shortest step that fits)")
    _add(parser, "--host-bandwidth", str, "what the host's memory reads and writes in a second, such as 400GB")
    _add(parser, "--lora", int, "train adapters of this rank on all linear layers, and leave the model's own weights")
    _add(parser, "--optimizer", str, "an optimizer of torch.optim (default: adamw)")
    _add(parser, "--precision", str, "bf16, which computes in bf16 over fp32 masters, or fp32 (default: bf16)")
    _add(parser, "--masters", str, "exact, or rounded, which takes 2 bytes a parameter less (default: exact)")
    _flag(parser, "--no-clipping", "gradients aren't clipped by their norm, so updates don't wait for it")
    _flag(parser, "--no-overlap", "updates run after the backward")
    _add(parser, "--activations", str, "auto, keep, recompute or offload (default: auto)")
    _add(parser, "--block-bytes", str, "target size of a block's state, such as 64MiB (default: a repeated module)")
    _add(parser, "--chunking", str, "auto, always or never: chunks of a head's loss, tiles of tokens (default: auto)")
    _flag(parser, "--why", "also say why the plan is as it is, and what 1 GiB more would buy")
    _flag(parser, "--alternatives", "also print other budgets, micro-batches, precisions and updates")
    _add(parser, "--largest", str, "also find the largest micro_batch, sequence or depth that fits")
    _add(parser, "--report", str, "also draw the step on one page of HTML, this file")
    _add(parser, "--trace", str, "also write its trace for https://ui.perfetto.dev here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plans, and prints the plan.

    Returns:
        0.

    Raises:
        OptionError: If an option is wrong, or the model can't be made.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
    """
    # Only what was given on the command line is there; the class has the defaults.
    given = {field.name: getattr(options, field.name) for field in fields(SizingOptions) if field.name in options}
    check_options(given)
    print_sizing(SizingOptions(**given))
    return 0


def _add(parser: argparse.ArgumentParser, name: str, kind: Callable[[str], object], text: str) -> None:
    field = name.removeprefix("--").replace("-", "_")
    parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text, dest=field, metavar=name[2:].upper())


def _flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
