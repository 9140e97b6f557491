"""Head: how the log-probabilities of words come of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from megatrain.passes.rewrites.parts import computed_parts

# Ignored rows have been given a word; no other label is ignored.
_NO_INDEX = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Logits:
    """Stands for the logits among the arguments of a call."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for another tensor among the arguments of a call, such as a bias.

    Args:
        index: Of the tensor, among the operands.
    """

    index: int


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call that computes each row of logits from this row alone.

    Args:
        target: The function, or the name of the method.
        args: Its arguments, with `Logits` for the logits.
        kwargs: Its keyword arguments.
        text: The printed call, which tells 1 from 1.0.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    text: str

    def __call__(self, logits: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Makes the call on some rows of logits, with the operands in their places."""

        def filled(argument: Any) -> Any:
            if isinstance(argument, Operand):
                return operands[argument.index]
            return logits if isinstance(argument, Logits) else argument

        args, kwargs = tuple(map(filled, self.args)), {name: filled(value) for name, value in self.kwargs}
        function: Any = getattr(torch.Tensor, self.target) if isinstance(self.target, str) else self.target
        return function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Head:
    """How log-probabilities come of hidden states: a linear layer, some calls, a softmax.

    Args:
        calls: Between the linear layer and the softmax.
        dtype: Of the log-probabilities; None for that of the logits.
        rows: Of a chunk, at most.
        sums: Whether each row's log-probabilities are summed, too, as label smoothing needs.
        cast: The dtype of the log-probabilities, if the calls and the softmax cast once at most and do nothing else;
            None if they do something else.
        autocast: The autocast regions that all of it runs in; operands of the linear layer are cast already.
    """

    calls: tuple[RowCall, ...]
    dtype: torch.dtype | None
    rows: int
    sums: bool
    cast: torch.dtype | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @contextmanager
    def recomputing(self) -> Generator[None]:
        """The modes of the forward, for a backward that repeats it."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    def log_probs(self, logits: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the log-probabilities of all words, for the result of the linear layer."""
        for call in self.calls:
            logits = call(logits, operands)
        return torch.log_softmax(logits, -1, dtype=self.dtype)

    def chunks(self, hidden: torch.Tensor) -> Iterator[tuple[bool, slice]]:
        """Cuts the rows of hidden states into chunks of about one size; a batch without rows is one chunk.

        A small last chunk would take another kernel, with other bits.

        Yields:
            Whether the chunk is computed, and its rows.
        """
        num_rows, number = len(hidden), self._number(len(hidden))
        few, more = divmod(num_rows, number)
        ends = list(accumulate(few + (index < more) for index in range(number)))
        chunks = list(map(slice, [0, *ends], ends))
        # All are rows of the same tensors: those of one length are alike.
        return computed_parts((hidden,), chunks, lambda rows: rows.stop - rows.start)

    def most_rows(self, num_rows: int) -> int:
        """Those of the largest chunk."""
        return -(-num_rows // self._number(num_rows))

    def results(
        self, log_probs: torch.Tensor, labels: torch.Tensor, class_weight: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Returns each row's log-probability of its label and, with `sums`, the sum of all, each of shape [rows].

        Args:
            log_probs: Of all words, of shape [rows, words].
            labels: As for `chunked_log_probs`, of these rows.
            class_weight: See there.
        """
        # A label that is no word is the same error as without chunks.
        found = [-F.nll_loss(log_probs, labels, ignore_index=_NO_INDEX, reduction="none")]
        if self.sums:
            found.append((log_probs if class_weight is None else log_probs * class_weight).sum(1))
        return found

    def _number(self, num_rows: int) -> int:
        return max(1, -(-num_rows // self.rows))
