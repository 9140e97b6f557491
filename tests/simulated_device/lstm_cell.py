"""The cell of an LSTM, which torch has for the CPU only as part of whole layers: written with other operations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

Tensor = torch.Tensor


@contextmanager
def lstm_cell() -> Generator[None]:
    """Gives the simulated device the two kernels that an LSTM needs there."""
    with torch.library._scoped_library("aten", "IMPL") as library:  # pyright: ignore[reportPrivateUsage]
        library.impl("_thnn_fused_lstm_cell", _forward, "PrivateUse1")
        library.impl("_thnn_fused_lstm_cell_backward_impl", _backward, "PrivateUse1")
        yield


def _forward(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, bias: Tensor | None = None, other_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the hidden state, the cell, and the four gates for the backward; all operands are `f32[batch, ...]`."""
    total = of_input + of_hidden
    total = total if bias is None or other_bias is None else total + bias + other_bias
    enters, stays, made, leaves = total.chunk(4, 1)
    gates = (enters.sigmoid(), stays.sigmoid(), made.tanh(), leaves.sigmoid())
    new_cell = gates[1] * cell + gates[0] * gates[2]
    return gates[3] * new_cell.tanh(), new_cell, torch.cat(gates, 1)


def _backward(
    of_output: Tensor | None, of_cell: Tensor | None, cell: Tensor, new_cell: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of the four gates' sums, of the cell, and of a bias."""
    if of_output is None and of_cell is None:
        return None, None, None
    enters, stays, made, leaves = gates.chunk(4, 1)
    shown = new_cell.tanh()
    of_output = torch.zeros_like(cell) if of_output is None else of_output
    inner = of_output * leaves * (1 - shown * shown)
    inner = inner if of_cell is None else inner + of_cell
    sums = torch.cat(
        [
            inner * made * (1 - enters) * enters,
            inner * cell * (1 - stays) * stays,
            inner * enters * (1 - made * made),
            of_output * shown * (1 - leaves) * leaves,
        ],
        1,
    )
    return sums, inner * stays, sums.sum(0) if has_bias else None
