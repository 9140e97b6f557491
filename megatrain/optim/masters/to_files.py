"""Masters as sources: the values that a checkpoint stores, made piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatrain.counts import counted
from megatrain.errors import CheckpointError
from megatrain.files.weight_files import PIECE_BYTES, parts
from megatrain.optim.masters.halves import SplitMaster, read_
from megatrain.saving import Saved, Source
from megatrain.tracer.spec import TensorSpec

PIECE = PIECE_BYTES // 4
"""Elements that are worked on at a time."""


def low_source(parameter: torch.Tensor, low: torch.Tensor | None) -> Source:
    """Describes a low half, int16 of the parameter's shape; None is zero."""
    if low is not None:
        return Source.of(low)
    return Source(TensorSpec(tuple(parameter.shape), torch.int16), lambda: _zeros(parameter.numel()))


def master_source(parameter: torch.Tensor, low: torch.Tensor | None) -> Source:
    """Describes the fp32 values of a bf16 parameter with its low half; None is zero."""
    high = parameter.detach()
    spec = TensorSpec(tuple(high.shape), torch.float32)
    place = ("master", high.data_ptr(), high.shape, high.stride()) if high.numel() else None
    return Source(spec, lambda: _joined(high, low), place)


def generator_source(generator: torch.Generator) -> Source:
    """Describes the state of a generator, uint8."""
    return Source.of(generator.get_state())


def _zeros(numel: int) -> Iterator[torch.Tensor]:
    piece = torch.zeros(min(numel, PIECE), dtype=torch.int16, device="cpu")
    for start in range(0, numel, PIECE):
        yield piece[: numel - start]


def _joined(high: torch.Tensor, low: torch.Tensor | None) -> Iterator[torch.Tensor]:
    if low is None:
        for part in parts(high, PIECE):
            yield part.float().contiguous()
        return
    for upper, lower in zip(parts(high, PIECE), parts(low, PIECE), strict=True):
        yield read_(torch.empty(upper.shape, device="cpu"), SplitMaster(upper.contiguous(), lower.contiguous()))


def check_saved(expected: Mapping[str, Source], saved: Mapping[str, Saved]) -> None:
    """Compares the contents of a checkpoint with the sources that the masters would store.

    Raises:
        CheckpointError: Listing all differences.
    """
    problems = [
        f"missing: `{name}` {expected[name].spec} is not in the checkpoint" for name in expected.keys() - saved.keys()
    ]
    problems += [f"unexpected: `{name}` {saved[name]} belongs to no master" for name in saved.keys() - expected.keys()]
    problems += [
        f"differs: `{name}` {saved[name]}, but {source.spec} here"
        for name, source in expected.items()
        if name in saved and saved[name].spec != source.spec
    ]
    if problems:
        lines = [
            f"the checkpoint doesn't fit these masters: {counted(len(problems), 'difference')}.",
            *sorted(problems),
            "Each trainable bf16 parameter has a low half, or with masters='rounded' a generator.",
            "Compile the model with the saved precision and masters, and with the same parameters frozen.",
        ]
        raise CheckpointError("\n  ".join(lines))
