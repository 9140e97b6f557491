"""The text of a compiled model: its options, and each of its captures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from megatrain.base.counts import counted
from megatrain.base.host_limits import locked_bytes
from megatrain.base.sizes import format_bytes
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import LowerError, OptionError, ScheduleError
from megatrain.hardware.machine import slot_share, unknown_card
from megatrain.optim.masters.registry import Masters
from megatrain.optim.trained_model import TrainedModel
from megatrain.passes.program import Program
from megatrain.planning.host_plan import host_plan
from megatrain.planning.options import Limits
from megatrain.planning.plan import Plan
from megatrain.planning.step_programs import lowered
from megatrain.runtime.engine import Engine
from megatrain.runtime.on_demand import WalkFigures
from megatrain.scheduler.text import workload_text
from megatrain.tracer.traced import TracedModule
from megatrain.training.compiled.captures import Variant

NOTHING = "nothing is captured yet: call the model once, or give compile(example_args=..., example_kwargs=...)"


def compiled_text(
    options: Limits,
    budget: DeviceBudget,
    variants: Sequence[Variant],
    latest: Variant | None,
    engine: Engine | None = None,
    walk: WalkFigures | None = None,
) -> str:
    """Prints a line for the options, and two for each capture, in the order of their making.

    Args:
        options: Of `compile`.
        budget: The bound of the device memory that schedules take.
        variants: The captures that are kept.
        latest: That of the latest call.
        engine: None if nothing has run yet.
        walk: The latest run of the model's own code, which has no capture.
    """
    precision = f"{options.precision}, masters rounded" if options.masters == "rounded" else options.precision
    first = (
        f"compiled by megatrain for {options.device}, memory {budget}, {precision}, activations {options.activations}"
    )
    first += ", steps planned by their time" if options.hardware is not None else ""
    first += f", kernels {options.kernels}" if options.kernels != "eager" else ""
    share = slot_share(options.device)
    first += f"\n  the slot of the card has {share:.3g} of the card's link to the host" if share < 1 else ""
    unknown = "" if options.hardware is not None else unknown_card(options.device)
    first += f"\n  {unknown}" if unknown else ""
    refused = engine.bus.note if engine is not None else ""
    limit = locked_bytes() if options.device.lock_bytes and not refused else None
    first += f"\n  {refused}" if refused else ""
    in_files = engine.store.note if engine is not None and engine.store is not None else ""
    first += f"\n  {in_files}" if in_files else ""
    if limit is not None:
        first += f"\n  this system page-locks {format_bytes(limit[0])}: larger weights pass through a small locked ring"
    first += f"\n  latest {walk}; the model's own code, no schedule" if walk is not None else ""
    if not variants:
        return f"{first}\n  {NOTHING}"
    lines = (line for variant in variants for line in _variant_lines(variant, variant is latest, engine))
    return "\n".join([first, *lines])


def _variant_lines(variant: Variant, is_latest: bool, engine: Engine | None) -> list[str]:
    traced, program = variant.traced, variant.program
    given = ", ".join(f"{node.name}: {node.meta['spec']}" for node in traced.inputs)
    parameters = sum(e.spec.nbytes for e in traced.state.values() if e.kind == "parameter")
    others = sum(e.spec.nbytes for e in traced.state.values() if e.kind != "parameter")
    # A training step has another schedule, and may fit where a call doesn't, so this text makes no schedule.
    scheduled = "no call is scheduled yet"
    if variant.lowered.is_planned:
        planned = variant.schedule
        scheduled = (
            f"{counted(planned.num_slots, 'slot')}, device {planned.device_bytes} B, peak {planned.peak_bytes} B"
        )
        scheduled = f"{planned.kind.mode}: {scheduled}"
    lines = [
        f"  capture {variant.number}: {traced.name}({given})" + (", of the latest call" if is_latest else ""),
        f"    {counted(len(program.blocks), 'block')}, {counted(len(program.templates), 'template')}; "
        f"parameters {parameters} B, buffers {others} B; {scheduled}",
    ]
    lines += [f"    kernels of calls: {why}" for why in filter(None, [variant.lowered.why_kernels])]
    lines += [f"    kernels of steps: {why}" for why in variant.lowered.why_kernels_of_steps]
    eager = {} if engine is None else engine.runners.on_eager_kernels(program)
    lines += [f"    template {name} on eager's kernels: {reason}" for name, reason in eager.items()]
    return lines + [f"    because {reason}" for reason in variant.reasons]


# What a dump writes, and an earlier one may have left.
_OURS = re.compile(r"capture-\d+-\d\d-[\w.-]+\.txt")


def dump(
    folder: str | os.PathLike[str], variants: Sequence[Variant], model: nn.Module, options: Limits, masters: Masters
) -> list[Path]:
    """Writes the stages of each variant, numbered, and returns the files; those of an earlier dump are removed.

    Raises:
        OptionError: If `folder` can't be written, or holds other files.
        LowerError: If the passes don't give the program again that is in use.
    """
    texts = {
        f"capture-{variant.number}-{index:02d}-{name}.txt": text
        for variant in variants
        for index, (name, text) in enumerate(_stages(variant, model, options, masters))
    }
    place = Path(folder)
    try:
        return _written(place, texts)
    except OSError as error:
        raise OptionError(
            f'folder="{place}" can\'t be written: {error.strerror or error}.\n'
            "  A dump is a folder of text files.\n  Give another folder, or make room."
        ) from error


def _written(place: Path, texts: dict[str, str]) -> list[Path]:
    place.mkdir(parents=True, exist_ok=True)
    there = sorted(path.name for path in place.iterdir())
    others = [name for name in there if not _OURS.fullmatch(name)]
    if others:
        raise OptionError(
            f'folder="{place}" holds other files: {", ".join(others[:3])}{", ..." if len(others) > 3 else ""}.\n'
            "  A dump replaces only files of an earlier dump.\n"
            "  Give a folder that doesn't exist, or an empty one."
        )
    for name in there:
        (place / name).unlink()
    for name, text in texts.items():
        (place / name).write_text(f"{text}\n", encoding="utf-8")
    return [place / name for name in texts]


def _stages(variant: Variant, model: nn.Module, options: Limits, masters: Masters) -> Iterator[tuple[str, str]]:
    """Yields name and text of each stage, from the capture to the plan of memory."""
    yield "traced", str(variant.traced)
    passes: list[tuple[str, str]] = []

    def keep(name: str, value: TracedModule | Program) -> None:
        passes.append((re.sub(r"[^\w.-]", "_", name)[:100], str(value)))

    again = lowered(variant.traced, options, after_pass=keep)
    if str(again) != str(variant.program):
        raise LowerError(
            f"the passes made a program from capture {variant.number} that differs from the one in use.\n"
            "  A pass must give the same program for the same capture each time; a dump shows this program.\n"
            "  Find the one of `passes` that remembers values or draws random numbers, or print(compiled.program) "
            "instead."
        )
    yield from passes
    yield "program", str(variant.program)
    try:
        schedule = variant.schedule
    except ScheduleError as error:
        # A training step may fit all the same; its schedule is step.schedule.
        yield "schedule", f"no schedule of a call: {error}"
        return
    yield "workload", workload_text(schedule.known_workload())
    yield "schedule", str(schedule)
    yield "instructions", str(schedule.instructions)
    trained, is_host = TrainedModel.of(model, options.master_kind), options.device.is_host
    host = host_plan(variant.program, schedule, trained, on_host=is_host, held_bytes=masters.held_bytes)
    yield "plan", str(Plan(variant.program, schedule, host, options.device_memory, None, options.precision))
