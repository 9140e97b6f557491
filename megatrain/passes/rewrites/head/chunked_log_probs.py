"""chunked_log_probs(): the log-probabilities of labels under a linear head, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatrain.passes.rewrites.alike_parts import AlikeParts, computed_parts
from megatrain.passes.rewrites.gradient_sum import GradientSum
from megatrain.passes.rewrites.head.logits_in_place import LogitsInPlace

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
        alike: Says which chunks a measurement computes.
    """

    calls: tuple[RowCall, ...]
    dtype: torch.dtype | None
    rows: int
    sums: bool
    cast: torch.dtype | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    alike: AlikeParts | None = field(default=None, compare=False, repr=False)

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

    def chunks(self, num_rows: int) -> Iterator[tuple[bool, slice]]:
        """Cuts rows into chunks of about one size; a batch without rows is one chunk.

        A small last chunk would take another kernel, with other bits.

        Yields:
            Whether the chunk is computed, and its rows.
        """
        number = self._number(num_rows)
        few, more = divmod(num_rows, number)
        ends = list(accumulate(few + (index < more) for index in range(number)))
        chunks = list(map(slice, [0, *ends], ends))
        # All are rows of the same tensors: those of one length are alike.
        return computed_parts(self.alike, chunks, lambda rows: rows.stop - rows.start)

    def in_place(self, num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> LogitsInPlace | None:
        """The memory for a chunk; None if some call does more than cast."""
        largest = -(-num_rows // self._number(num_rows))
        return None if self.cast is None else LogitsInPlace(weight, bias, self.cast, largest)

    def _number(self, num_rows: int) -> int:
        return max(1, -(-num_rows // self.rows))


def chunked_log_probs(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    operands: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the log-probability of each row's label, chunk by chunk.

    The backward computes the logits of a chunk once more (recomputation), so one chunk of logits exists at a time. Each
    row, and the gradient of each hidden state, has the bits of the unchunked computation where a product of matrices
    computes a row alike among any number of rows; those of the CPU do from about 32 rows on. Gradients of weight, bias
    and operands are sums over chunks, in fp32 or wider, rounded once.

    Args:
        head: What is computed.
        hidden: Hidden states, floating point, of shape [rows, width].
        labels: int64, of shape [rows], each the number of a word.
        weight: Of the linear layer, of shape [words, width].
        bias: Likewise, of shape [words]; or None.
        class_weight: Factors of the words in the sums of rows, of shape [words]; None for 1.
        operands: Further tensors that the calls between read, each broadcast along rows.

    Returns:
        The log-probabilities, of shape [rows], and those of all words summed, of shape [rows], or None.
    """
    selected, sums = _ChunkedLogProbs.apply(head, hidden, labels, weight, bias, class_weight, *operands)  # pyright: ignore
    return selected, sums if head.sums else None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.head = head
        ctx.save_for_backward(hidden, labels, weight, bias, class_weight, *operands)
        selected: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        in_place = head.in_place(len(hidden), weight, bias)
        for is_computed, at in head.chunks(len(hidden)):
            if not is_computed:  # its results take memory until the last
                selected.append(torch.empty_like(selected[-1]))
                sums += map(torch.empty_like, sums[-1:])
                continue
            if in_place is None:
                log_probs = head.log_probs(F.linear(hidden[at], weight, bias), operands)
            else:
                log_probs = in_place.log_probs(hidden[at])
            selected.append(_of(labels[at], log_probs))
            if head.sums:
                sums.append(_summed(log_probs, class_weight))
            del log_probs  # before the next chunk's
        return torch.cat(selected), torch.cat(sums) if sums else None

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, labels, weight, bias, class_weight, *operands = ctx.saved_tensors
        _, needs_hidden, _, needs_weight, needs_bias, _, *needs_operands = ctx.needs_input_grad
        head: Head = ctx.head
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = GradientSum(weight) if needs_weight else None
        of_bias = GradientSum(bias) if needs_bias else None
        of_operands = [
            GradientSum(tensor) if needs else None for tensor, needs in zip(operands, needs_operands, strict=True)
        ]
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(operands, needs_operands, strict=True)]
        in_place = head.in_place(len(hidden), weight, bias)
        for is_computed, at in head.chunks(len(hidden)):
            if not is_computed:
                continue
            rows, of_results = hidden[at], [gradient[at] for gradient in gradients[: 1 + head.sums]]
            if in_place is None:
                of_logits, *others = _differentiated(
                    head, rows, labels[at], weight, bias, class_weight, leaves, of_results
                )
            else:
                others = []
                in_place.log_probs(rows)
                of_sums = of_results[1] if head.sums else None
                of_logits = in_place.gradient(labels[at], of_results[0], of_sums, class_weight)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[at])
            if of_weight is not None:
                of_weight.add_product(of_logits.t(), rows)
            if of_bias is not None:
                of_bias.add_rows(of_logits)
            for total, part in zip((total for total in of_operands if total is not None), others, strict=True):
                total.add(part)
            del of_logits, others
        sums = [None if total is None else total.rounded() for total in (of_weight, of_bias, *of_operands)]
        return None, of_hidden, None, *sums[:2], None, *sums[2:]


def _differentiated(
    head: Head,
    rows: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    operands: Sequence[torch.Tensor],
    of_results: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Recomputes a chunk under autograd; returns the gradient of its logits, and those of operands that need one."""
    with head.recomputing():
        logits = F.linear(rows, weight, bias).detach().requires_grad_()
        log_probs = head.log_probs(logits, operands)
        results = [_of(labels, log_probs), *([_summed(log_probs, class_weight)] if head.sums else [])]
    del log_probs
    wanted = [logits, *(operand for operand in operands if operand.requires_grad)]
    return torch.autograd.grad(results, wanted, of_results)


def _of(words: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    # A label that is no word is the same error as without chunks.
    return -F.nll_loss(log_probs, words, ignore_index=_NO_INDEX, reduction="none")


def _summed(log_probs: torch.Tensor, class_weight: torch.Tensor | None) -> torch.Tensor:
    return log_probs.sum(1) if class_weight is None else (log_probs * class_weight).sum(1)
