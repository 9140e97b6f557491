"""Writes docs/machines.md: which machines train which models, and how fast, next to what others publish.

    python -m benchmarks.machines              # plans all rows, in some minutes, and writes the page
    python -m benchmarks.machines --only 8B    # prints the rows of one model
    python -m benchmarks.machines --published  # writes the table of published steps, in a second

The plans are those of `megatrain plan`, of configurations on meta: no weights, no GPU. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm
from transformers import LlamaConfig

from benchmarks.llamas import LlamaShape
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import PRESETS
from megatrain.planning.planner import Planner
from megatrain.tools.sizing.plan_command import MachineRow, row_of
from megatrain.tools.sizing.sized_models import ConfigModel
from megatrain.tools.sizing.sizing_options import SizingOptions
from tests.hardware.published import LENGTH as PUBLISHED_LENGTH
from tests.hardware.published import PUBLISHED, seconds_of

PAGE = Path(__file__).parents[1] / "docs" / "machines.md"
START, END = "<!-- of python -m benchmarks.machines -->\n", "<!-- end -->\n"
STEPS = "<!-- of python -m benchmarks.machines --published -->\n"
# One of each generation and kind: others of the table of rates are near one of these.
SHOWN = (
    "rtx-3080", "rtx-3090", "rtx-4090", "rtx-5090", "a100", "h100-pcie", "h100-sxm", "h200", "gh200", "b200", "gb10",
    "m3-max", "m4-max",
)  # fmt: skip
LENGTH, TOKENS = 4096, 16384
RANK = 16

SHAPES: Mapping[str, LlamaShape] = {
    "8B": LlamaShape(32, 4096, 14336, 32, 8, 128256),
    "14B": LlamaShape(48, 5120, 13824, 40, 8, 152064),
    "32B": LlamaShape(64, 5120, 27648, 40, 8, 152064),
    "70B": LlamaShape(80, 8192, 28672, 64, 8, 128256),
    "120B": LlamaShape(88, 12288, 28672, 96, 8, 32768),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A training of one model on one machine.

    Args:
        machine: Its name.
        device_gib: What the step takes of the device.
        host_gib: And of the host.
        least_gib: The smallest host that a slower step takes; None where device and host have one memory.
        tokens_per_s: Predicted; None if it doesn't fit.
        bound: The stream that works longest.
        lacks: What is missing; empty if it fits.
    """

    machine: str
    device_gib: float
    host_gib: float
    least_gib: float | None
    tokens_per_s: float | None
    bound: str
    lacks: str = ""


def asked(size: str, rank: int = 0) -> tuple[SizingOptions, ConfigModel]:
    """What is planned of a model, and the model."""
    shape = SHAPES[size]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = SizingOptions(
            folder, hardware="all", sequence=LENGTH, tokens_per_step=TOKENS, micro_batch=1, lora=rank
        )
        return options, ConfigModel(options)


def cells(size: str, rank: int, machines: tuple[str, ...] | None = None) -> Iterator[Cell]:
    """Plans a model on machines, by default those of the page."""
    options, source = asked(size, rank)
    planner = Planner(source)
    for name in tqdm(machines or SHOWN, desc=f"{size} {'LoRA' if rank else 'full'}", disable=None):
        row = row_of(planner, options, source.sizes, TOKENS // LENGTH, name)
        if PRESETS[name].is_unified or row.lacks():
            yield _cell(row, None)
            continue
        # Of a host that is too small for any plan, the plan that lacks least.
        least = row_of(planner, replace(options, host_memory=1), source.sizes, TOKENS // LENGTH, name)
        assert least.batch is not None, least.refused
        yield _cell(row, least.batch.plan.host.total_bytes / 2**30)


def _cell(row: MachineRow, least_gib: float | None) -> Cell:
    assert row.batch is not None, row.refused
    plan = row.batch.plan
    assert plan.simulation is not None
    device, host = plan.schedule.device_bytes / 2**30, plan.host.total_bytes / 2**30
    lacks = row.lacks()
    rate = None if lacks else TOKENS / plan.simulation.step_s
    return Cell(row.machine, device, host, least_gib, rate, str(plan.simulation.bound), lacks)


def table(rows: Mapping[str, list[Cell]]) -> str:
    """A row for each machine, two columns for each model: tokens a second with the host's memory; the smallest host."""
    names = list(rows)
    lines = [f"| | {' | '.join(f'{name} | smallest host' for name in names)} |", f"| --- |{' --- |' * 2 * len(names)}"]
    for number, machine in enumerate(cell.machine for cell in rows[names[0]]):
        texts = [text for name in names for text in _texts(rows[name][number])]
        lines.append(f"| {machine} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def _texts(cell: Cell) -> tuple[str, str]:
    if cell.tokens_per_s is None:
        return f"no: {cell.lacks}", ""
    least = "" if cell.least_gib is None else f"{min(cell.least_gib, cell.host_gib):.0f} GiB"
    return f"{cell.tokens_per_s:,.0f}, {cell.host_gib:.0f} GiB", least


def written(found: Mapping[str, Mapping[str, list[Cell]]]) -> str:
    """The part of the page that this script writes: a table for each way of training."""
    parts = [f"{what}\n\n{table(rows)}" for what, rows in found.items()]
    return "\n".join(parts)


def published() -> str:
    """Steps that others published, next to what the simulator says of the same steps."""
    lines = [
        "| machine | model | system | tokens a step | *published* tokens/s | *simulated* | of it |",
        f"|{' --- |' * 7}",
    ]
    for row in PUBLISHED:
        tokens = row.sequences * row.count * PUBLISHED_LENGTH
        said = tokens / seconds_of(row, Hardware.preset(row.machine))
        head = f"| {row.machine} | {row.model} | {row.system.name} | {tokens:,}"
        lines.append(f"{head} | {row.tokens_per_s:,.0f} | {said:,.0f} | {said / row.tokens_per_s:.2f} |")
    return "\n".join([*lines, ""])


def _write(start: str, text: str) -> None:
    """Writes the part of the page after a mark, up to the next end."""
    before, _, after = PAGE.read_text().partition(start)
    PAGE.write_text(f"{before}{start}\n{text}\n{after[after.index(END) :]}")


def main() -> None:
    """Plans, and writes the page or prints rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES, help="print the rows of one model, and write nothing")
    parser.add_argument("--published", action="store_true", help="write only the steps that others published")
    options = parser.parse_args()
    if options.published:
        _write(STEPS, published())
        return
    sizes = [options.only] if options.only else list(SHAPES)
    found: dict[str, dict[str, list[Cell]]] = {}
    for what, rank in (("All weights", 0), (f"LoRA, rank {RANK}, on all linear layers", RANK)):
        found[f"**{what}**: *predicted* tokens/s and host memory of a step; the smallest host that fits"] = {
            size: list(cells(size, rank)) for size in sizes
        }
    text = written(found)
    if options.only:
        print(text)
        return
    _write(START, text)
    _write(STEPS, published())


if __name__ == "__main__":
    main()
