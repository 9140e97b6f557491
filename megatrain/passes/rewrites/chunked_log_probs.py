"""How the log-probabilities of words come of hidden states, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatrain.base.torch_private import log_softmax_backward
from megatrain.passes.rewrites.parts import GradientSum, computed_parts

# Ignored rows have been given a word; no other label is ignored.
_NO_INDEX = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Logits:
    """Stands for the logits among the arguments of a call."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for another tensor among the arguments of a call, such as a bias."""

    index: int


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call that computes each row of logits from this row alone.

    Args:
        args: Its arguments, with `Logits` for the logits.
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
        """Returns each row's log-probability of its label and, with `sums`, the sum of all, each of shape [rows]."""
        # A label that is no word is the same error as without chunks.
        found = [-F.nll_loss(log_probs, labels, ignore_index=_NO_INDEX, reduction="none")]
        if self.sums:
            found.append((log_probs if class_weight is None else log_probs * class_weight).sum(1))
        return found

    def _number(self, num_rows: int) -> int:
        return max(1, -(-num_rows // self.rows))


class LogitsByCalls:
    """Log-probabilities of a linear layer's rows, and the gradients of its logits, by autograd.

    The operands are further tensors that the calls read; in a backward leaves.
    """

    def __init__(
        self,
        head: Head,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        operands: Sequence[torch.Tensor],
    ) -> None:
        self._head, self._weight, self._bias = head, weight, bias
        self._class_weight, self._operands = class_weight, operands

    def log_probs(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of all words."""
        return self._head.log_probs(F.linear(rows, self._weight, self._bias), self._operands)

    def gradients(
        self, rows: torch.Tensor, labels: torch.Tensor, of_results: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns those of a chunk's logits, and of the operands that need one."""
        with self._head.recomputing():
            logits = F.linear(rows, self._weight, self._bias).detach().requires_grad_()
            log_probs = self._head.log_probs(logits, self._operands)
            results = self._head.results(log_probs, labels, self._class_weight)
        del log_probs
        wanted = [logits, *(operand for operand in self._operands if operand.requires_grad)]
        return torch.autograd.grad(results, wanted, of_results)


class LogitsInPlace:
    """Log-probabilities of a linear layer's rows, and the gradients of its logits, made in memory that stays.

    The memory is that of the logits, and of their log-probabilities where these have another dtype. The results have
    the bits of torch's own calls. On a CPU new memory for each chunk would take longer than the softmax: the system
    gives it page by page.

    Args:
        weight: Of the linear layer, of shape [words, width].
        bias: Of the linear layer, of shape [words]; or None.
        class_weight: Factors of the words in sums of rows, of shape [words]; None for 1.
        dtype: Of the log-probabilities.
        rows: Of the largest chunk.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        dtype: torch.dtype,
        rows: int,
    ) -> None:
        self._weight, self._bias, self._class_weight = weight, bias, class_weight
        self._logits = weight.new_empty(rows, len(weight))
        is_cast = dtype != weight.dtype
        self._log_probs = torch.empty_like(self._logits, dtype=dtype) if is_cast else self._logits
        self._gradients: torch.Tensor | None = None

    def log_probs(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of all words; the next call writes over them.

        Args:
            rows: Hidden states of a chunk, of shape [rows, width].
        """
        logits, log_probs = self._logits[: len(rows)], self._log_probs[: len(rows)]
        if self._bias is None:
            torch.mm(rows, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, rows, self._weight.t(), out=logits)
        if log_probs.dtype != logits.dtype:
            log_probs.copy_(logits)
        return torch.log_softmax(log_probs, -1, out=log_probs)  # pyright: ignore  # the stubs lack `out`

    def gradients(
        self, rows: torch.Tensor, labels: torch.Tensor, of_results: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        """Returns the gradient of a chunk's logits, which are computed once more; the next call writes over it.

        Args:
            labels: Of the chunk, of shape [rows].
            of_results: Gradients of `Head.results`, each of shape [rows].
        """
        log_probs, (of_selected, *of_sums) = self.log_probs(rows), of_results
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._log_probs)
        logits, gradients = self._logits[: len(rows)], self._gradients[: len(rows)]
        places, marks = labels.unsqueeze(1), of_selected.unsqueeze(1)
        for of_sum in of_sums:
            gradients.copy_(of_sum.unsqueeze(1).expand_as(gradients))
            if self._class_weight is not None:
                gradients.mul_(self._class_weight)
            marks = marks + gradients.gather(1, places)
        gradients.scatter_(1, places, marks)
        log_softmax_backward(gradients, log_probs, -1, log_probs.dtype, out=log_probs)
        gradients.scatter_(1, places, 0.0)  # without sums all zeros again, for the next chunk
        return (log_probs if log_probs.dtype == logits.dtype else logits.copy_(log_probs),)


def chunked_log_probs(head: Head, *operands: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the log-probability of each row's label, chunk by chunk, and that of all words summed if `head` says so.

    The operands are `(hidden, labels, weight, bias, class_weight, *others)`: hidden states of shape [rows, width],
    labels int64 [rows], each the number of a word, weight [words, width], bias and class_weight [words] or None, and
    what the calls between read, broadcast along rows. The results have the shape [rows].

    The backward computes the logits of a chunk once more (recomputation), so one chunk of logits exists at a time. Each
    row, and the gradient of each hidden state, has the bits of the unchunked computation where a product of matrices
    computes a row alike among any number of rows; those of the CPU do from about 32 rows on. Gradients of weight, bias
    and operands are sums over chunks, in fp32 or wider, rounded once.
    """
    return _ChunkedLogProbs.apply(head, *operands)  # pyright: ignore[reportReturnType]


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
        logits = _logits(head, len(hidden), weight, bias, class_weight, operands)
        results: list[list[torch.Tensor]] = []
        for is_computed, at in head.chunks(hidden):
            if is_computed:
                results.append(head.results(logits.log_probs(hidden[at]), labels[at], class_weight))
            else:  # its results take memory until the last
                results.append(list(map(torch.empty_like, results[-1])))
        selected, *sums = map(torch.cat, zip(*results, strict=True))
        return selected, sums[0] if sums else None

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
        logits = _logits(head, len(hidden), weight, bias, class_weight, leaves)
        for is_computed, at in head.chunks(hidden):
            if not is_computed:
                continue
            rows, of_results = hidden[at], [gradient[at] for gradient in gradients[: 1 + head.sums]]
            of_logits, *others = logits.gradients(rows, labels[at], of_results)
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


def _logits(
    head: Head,
    num_rows: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    operands: Sequence[torch.Tensor],
) -> LogitsInPlace | LogitsByCalls:
    if head.cast is None:
        return LogitsByCalls(head, weight, bias, class_weight, operands)
    return LogitsInPlace(weight, bias, class_weight, head.cast, head.most_rows(num_rows))
