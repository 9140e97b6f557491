"""The text of a compiled model: its options, and each of its captures."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.compiled.variants import Variant
from megatrain.counts import counted
from megatrain.hardware.machine import slot_share, unknown_card
from megatrain.memory.device_budget import DeviceBudget
from megatrain.options import Options
from megatrain.runtime.engine import Engine
from megatrain.runtime.walk.walk_figures import WalkFigures

NOTHING = "nothing is captured yet: call the model once, or give compile(example_args=..., example_kwargs=...)"


def compiled_text(
    options: Options,
    budget: DeviceBudget,
    variants: Sequence[Variant],
    latest: Variant | None,
    engine: Engine | None = None,
    walk: WalkFigures | None = None,
) -> str:
    """Prints a line for the options, and two for each capture.

    Args:
        options: Of `compile`.
        budget: The bound of the device memory that schedules take.
        variants: The captures that are kept, in the order of their making.
        latest: The capture of the latest call.
        engine: Runs the captures; None if nothing has run yet.
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
    first += f"\n  {engine.bus.note}" if engine is not None and engine.bus.note else ""
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
    eager = {} if engine is None else engine.runners.on_eager_kernels(program)
    lines += [f"    template {name} on eager's kernels: {reason}" for name, reason in eager.items()]
    return lines + [f"    because {reason}" for reason in variant.reasons]
