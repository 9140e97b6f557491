"""chunked_log_probs(): the log-probabilities of labels under a linear head, without all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatrain.passes.rewrites.head.linear_head import Head
from megatrain.passes.rewrites.parts import GradientSum
from megatrain.torch_private import log_softmax_backward


class LogitsByCalls:
    """Log-probabilities of a linear layer's rows, and the gradients of its logits, by autograd.

    Args:
        head: What is computed.
        weight: Of the linear layer, of shape [words, width].
        bias: Likewise, of shape [words]; or None.
        class_weight: Factors of the words in sums of rows, of shape [words]; None for 1.
        operands: Further tensors that the calls read; in a backward leaves.
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
        """See `LogitsInPlace`."""
        return self._head.log_probs(F.linear(rows, self._weight, self._bias), self._operands)

    def gradients(
        self, rows: torch.Tensor, labels: torch.Tensor, of_results: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """See `LogitsInPlace`; returns those of the operands that need one, too."""
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
        bias: Likewise, of shape [words]; or None.
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
            rows: As for `log_probs`.
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
