"""print_sizing(): the plan of a step on one machine, or a table of all machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from megatrain.counts import counted
from megatrain.device.reserve import of_card
from megatrain.errors import MegatrainError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import PRESETS
from megatrain.planning.model_sizes import LORA, MICRO_BATCH, SEQUENCE, ModelSizes
from megatrain.planning.plan import Plan
from megatrain.planning.planned_step import UNBOUNDED
from megatrain.planning.planner import Planner, StepOptions
from megatrain.planning.what_if.alternatives import alternatives
from megatrain.planning.what_if.ways_out import refusal
from megatrain.progress import stage
from megatrain.reporting.step_report import check_report_path, report
from megatrain.sizes import format_bytes, parse_bytes
from megatrain.sizing.best_batch import StepSplit, best_batch, samples_of
from megatrain.sizing.machine_table import MachineRow, table_text
from megatrain.sizing.sized_models import sized_model
from megatrain.sizing.sizing_options import ALL, IN_COMMAND, SizingOptions

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
    planner, sizes = Planner(source), _sizes(options, source)
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


def _sizes(options: SizingOptions, source: ModelSizes) -> Mapping[str, int]:
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
