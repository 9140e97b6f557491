"""`megatrain plan`: the memory and the time of a training step, from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.base.counts import counted
from megatrain.base.garbage import paused_collection
from megatrain.base.progress import stage
from megatrain.base.sizes import format_bytes
from megatrain.device.accelerator import of_card
from megatrain.errors import MegatrainError, OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import GIB, PRESETS
from megatrain.planning.advice import Spelling, alternatives, missing, refusal, size
from megatrain.planning.model_sizes import LORA, MICRO_BATCH, SEQUENCE, ModelSizes
from megatrain.planning.options import given_bytes
from megatrain.planning.plan import Plan
from megatrain.planning.plan_text import verdict
from megatrain.planning.planned_step import UNBOUNDED, StepLimits, micro_batch_sizes, shortest_step
from megatrain.planning.planner import Planner
from megatrain.scheduler.bands import format_s
from megatrain.tools.sizing.sized_models import sized_model
from megatrain.tools.sizing.sizing_options import ALL, SizingOptions

_HEADS = ("machine", "memory", "micro-batches", "device", "host", "a step", "tokens/s", "bound by")
_MAX_GRAD_NORM = 1.0
# A unified memory is shared out between device and host so often, until both parts fit.
_SHARINGS = 4

_IN_COMMAND: Spelling = {
    "device_memory": lambda value: f"--memory {size(value)}",
    "block_bytes": lambda value: f"--block-bytes {size(value)}",
    "micro_batches": lambda value: f"{counted(value, 'micro-batch')} a step",
    "precision": lambda value: f"--precision {value}",
    "masters": lambda value: f"--masters {value}",
    "max_grad_norm": lambda value: "--no-clipping",
    "overlap": lambda value: "" if value else "--no-overlap",
    "activations": lambda value: f"--activations {value}",
    "kernels": lambda value: f"--kernels {value}",
    "optimizer": lambda value: f"--optimizer {value.lower()}",
    "offload": lambda value: "--offload",
    MICRO_BATCH: lambda value: f"--micro-batch {value}",
    SEQUENCE: lambda value: f"--sequence {value}",
    LORA: lambda value: f"--lora {value}" if value else "no --lora",
}
"""Options of a plan as the command has them."""


def print_sizing(options: SizingOptions) -> None:
    """Plans, and prints what was found.

    Raises:
        OptionError: If the model can't be made.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
    """
    paths = [path for path in (options.report, options.trace) if path is not None]
    if paths:
        from megatrain.tools.reporting.step_report import check_report_path

        for path in paths:
            check_report_path(path)
    with stage("making the model"), paused_collection():
        source = sized_model(options)
    planner, sizes = Planner(source), _given_sizes(options, source)
    samples = _samples(options, source)
    if options.hardware == ALL:
        print(_step_line(samples, source, None))
        print(_row_text(_HEADS), flush=True)
        for name in Hardware.presets():
            with stage(f"planning for {name}"):
                row = row_of(planner, options, sizes, samples, name)
            print(_row_text(row.cells()), flush=True)
        return
    with stage("planning"), paused_collection():
        found = _split_on(planner, options, sizes, samples, options.hardware)
    print(summary(found.plan, options, samples * source.sizes.get(SEQUENCE, 1)))
    print(f"\n{_step_line(samples, source, found)}")
    print(f"\n{found.plan}", flush=True)
    _print_more(options, found.plan)
    with stage("looking for ways out"):
        error = refusal(found.plan, _IN_COMMAND)
    if error is not None:
        raise error


def _print_more(options: SizingOptions, plan: Plan) -> None:
    """Prints and draws what else is asked for."""
    if options.why:
        with stage("planning"):
            print(f"\n{plan.why()}")
    if options.alternatives:
        with stage("planning alternatives"):
            print(f"\n{alternatives(plan, _IN_COMMAND)}")
    if options.largest is not None:
        with stage("planning sizes"):
            print(f"\n{plan.largest(options.largest)}")
    if options.report is not None and plan.fits:
        from megatrain.tools.reporting.step_report import report  # imports training and verification

        made = report(plan, options.report)
        print(f"\n{made}\nwritten: {options.report} ({format_bytes(Path(options.report).stat().st_size)})")
        if options.trace is not None:
            made.perfetto(options.trace)
            print(f"written: {options.trace} ({format_bytes(Path(options.trace).stat().st_size)})")


def _given_sizes(options: SizingOptions, source: ModelSizes) -> Mapping[str, int]:
    """Sizes that are given; the micro-batch is left to the search if it isn't and can change."""
    given = {name: size for name, size in source.sizes.items() if name in (SEQUENCE, LORA)}
    fixed = options.micro_batch is not None or MICRO_BATCH not in source.sizes
    return {**given, **({MICRO_BATCH: options.micro_batch or 1} if fixed else {})}


def _samples(options: SizingOptions, source: ModelSizes) -> int:
    """How many sequences a step has: as many whole micro-batches as its tokens allow.

    Raises:
        OptionError: If there is less than one micro-batch.
    """
    tokens, micro_batch, length = options.tokens_per_step, options.micro_batch or 1, source.sizes.get(SEQUENCE, 1)
    if tokens < micro_batch * length:
        raise OptionError(
            f"--tokens-per-step {tokens} is less than one micro-batch: {micro_batch} x {length} tokens.\n"
            "  A step has one micro-batch or more.\n"
            f"  Give --tokens-per-step {micro_batch * length}, or a smaller --sequence or --micro-batch."
        )
    return tokens // (micro_batch * length) * micro_batch


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The micro-batches of a step."""

    size: int
    count: int
    plan: Plan = field(repr=False)
    tried: tuple[int, ...] = ()


def _best_split(planner: Planner, limits: StepLimits, sizes: Mapping[str, int], samples: int) -> StepSplit:
    """Plans ways to split the samples of a step, and takes the shortest step that fits."""

    def plan(micro_batch: int) -> Plan:
        return planner.plan(replace(limits, micro_batches=samples // micro_batch), {**sizes, MICRO_BATCH: micro_batch})

    possible = [sizes[MICRO_BATCH]] if MICRO_BATCH in sizes else micro_batch_sizes(samples)
    micro_batch, found, tried = shortest_step(possible, plan, has_adapters=sizes.get(LORA) != 0)
    return StepSplit(micro_batch, samples // micro_batch, found, tuple(tried))


def _split_on(
    planner: Planner, options: SizingOptions, sizes: Mapping[str, int], samples: int, name: str | None
) -> StepSplit:
    """The best way to split a step on a machine of the table, or on so much memory."""
    limits = _step_limits(options, name)
    if name is None or not PRESETS[name].is_unified:
        return _best_split(planner, limits, sizes, samples)
    assert limits.device_memory is not None
    given = given_bytes(options.host_memory, "host_memory") or limits.device_memory
    return _shared(planner, limits, sizes, samples, min(limits.device_memory, given))


def _shared(planner: Planner, limits: StepLimits, sizes: Mapping[str, int], samples: int, total: int) -> StepSplit:
    """The best way on a machine whose device and host share one memory of `total` bytes.

    What the host holds, the device can't have: the two budgets of the step are chosen.
    """

    def split(device_memory: int, host_memory: int) -> StepSplit:
        budgets = {"device_memory": max(1, device_memory), "host_memory": max(1, host_memory)}
        return _best_split(planner, replace(limits, **budgets), sizes, samples)

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


def _step_limits(options: SizingOptions, name: str | None) -> StepLimits:
    machine = None if name is None else Hardware.preset(name)
    host_bandwidth = given_bytes(options.host_bandwidth, "host_bandwidth")
    if machine is not None and host_bandwidth is not None:
        machine = replace(machine, host_bytes_per_s=float(host_bandwidth))
    disk_bandwidth = given_bytes(options.disk_bandwidth, "disk_bandwidth")
    if machine is not None and disk_bandwidth is not None:
        machine = replace(machine, disk_bytes_per_s=float(disk_bandwidth))
    if machine is not None and options.disk_rating is not None:
        machine = replace(machine, disk_rating_bytes=given_bytes(options.disk_rating, "disk_rating"))
    locked = given_bytes(options.locked_memory, "locked_memory")
    if machine is not None and locked is not None:
        machine = replace(machine, locked_bytes=locked)
    memory = given_bytes(options.memory, "memory")
    if memory is None:
        assert machine is not None
        assert machine.memory_bytes is not None
        memory = machine.memory_bytes - of_card(machine.memory_bytes)
    host_memory = given_bytes(options.host_memory, "host_memory")
    return StepLimits(
        device_memory=memory,
        host_memory=UNBOUNDED if host_memory is None else host_memory,
        optimizer=options.torch_optimizer,
        precision=options.precision,
        masters=options.masters,
        max_grad_norm=None if options.no_clipping else _MAX_GRAD_NORM,
        overlap=not options.no_overlap,
        activations=options.activations,
        block_bytes=given_bytes(options.block_bytes, "block_bytes"),
        chunking=options.chunking,
        kernels=options.kernels,
        hardware=machine,
        offload=options.offload,
    ).with_kernels(None)


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A step on one machine.

    Args:
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
        bound = plan.simulation.bound
        return (
            self.machine,
            memory,
            f"{self.batch.count} x {self.batch.size}",
            format_bytes(plan.schedule.device_bytes),
            format_bytes(plan.host.total_bytes),
            format_s(plan.simulation.step_s),
            "" if plan.tokens_per_s is None else f"{plan.tokens_per_s:.0f}",
            f"{bound} {plan.simulation.busy[bound]:.0%}",
        )


def row_of(planner: Planner, options: SizingOptions, sizes: Mapping[str, int], samples: int, name: str) -> MachineRow:
    """The row of a machine in the table of all."""
    try:
        return MachineRow(name, _split_on(planner, options, sizes, samples, name))
    except MegatrainError as error:
        return MachineRow(name, None, str(error).splitlines()[0])


# Of the columns of the table; a text that takes the place of figures runs over its columns.
_WIDTHS = (max(map(len, PRESETS)), 10, 13, 10, 10, 8, 8, 12)
_RIGHT = range(3, len(_HEADS) - 1)


def _row_text(cells: Sequence[str]) -> str:
    is_whole = len(cells) == len(_HEADS)
    texts = [t.rjust(_WIDTHS[i]) if is_whole and i in _RIGHT else t.ljust(_WIDTHS[i]) for i, t in enumerate(cells)]
    return "  ".join(texts).rstrip()


_CHANGES = {
    "compute": "the card computes most of the time: a faster card, shorter sequences or --lora make a step shorter",
    "h2d": "weights arrive later than they are used: more --tokens-per-step share each copy, a faster slot shortens it",
    "files": "weights arrive later than they are used: more --tokens-per-step share each read, more memory holds more",
    "disk": "updates wait for the disk: more --tokens-per-step share an update, --optimizer adamw8bit moves a fourth",
    "d2h": "gradients leave later than they are made: more --tokens-per-step share each copy, --lora leaves fewer",
    "host": "updates wait for the host's memory: more --tokens-per-step share an update, --lora updates less",
}
"""What makes a step shorter, by the stream that it is bound by."""


def summary(plan: Plan, options: SizingOptions, tokens: int) -> str:
    """What people ask first: does it fit, how fast is it, what does it take, what bounds it, what to change."""
    where = "" if options.hardware is None else f" on {options.hardware}"
    if options.lora:
        where = f" with adapters of rank {options.lora}{where}"
    number = plan.host.num_parameters
    billions = f"{number / 1e9:.2f} billion parameters" if number >= 10**7 else counted(number, "parameter")
    host_memory = None if plan.host_memory == UNBOUNDED else plan.host_memory
    lines = [f"{'fits' if plan.fits else 'does not fit'}: {plan.program.name} of {billions}{where}"]
    found = plan.simulation
    if found is not None and plan.fits:
        rate = f"{plan.tokens_per_s:.0f} tokens/s, " if plan.tokens_per_s else ""
        lines.append(f"speed: {rate}{format_s(found.step_s)} for a step of {counted(tokens, 'token')} (predicted)")
    lines.append(f"memory of the device: {verdict(plan.schedule.device_bytes, plan.device_memory)}")
    lines.append(f"memory of the host: {verdict(plan.host.total_bytes, host_memory)}")
    if plan.reads is not None:
        lines.append(
            f"frozen weights: {format_bytes(plan.host.file_bytes)} stay in files; {plan.reads.text(plan.hardware)}"
        )
    if plan.moments is not None:
        lines.append(plan.moments.text(plan.hardware))
    if found is not None and plan.fits:
        lines.append(f"bound by: {found.bound}, busy for {found.busy[found.bound]:.0%} of a step")
        bound = "files" if plan.reads is not None and found.bound == "h2d" else found.bound
        lines.append(f"to change: {_CHANGES.get(bound, 'see --why')}; --alternatives plans other settings")
    elif not plan.fits:
        lines.append("to change: see the ways out at the end")
    return "\n".join(lines)


def _step_line(samples: int, source: ModelSizes, found: StepSplit | None) -> str:
    length = source.sizes.get(SEQUENCE, 1)
    text = f"step: {counted(samples * length, 'token')}, {counted(samples, 'sequence')} of {length}"
    if found is None:
        return text
    text += f", as {counted(found.count, 'micro-batch')} of {found.size}"
    others = ", ".join(map(str, found.tried))
    return text if len(found.tried) == 1 else f"{text}: the shortest step of {others} sequences in a micro-batch"
