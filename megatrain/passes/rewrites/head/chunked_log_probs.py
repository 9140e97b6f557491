"""chunked_log_probs(): the log-probabilities of labels under a linear head, without all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain.passes.rewrites.gradient_sum import GradientSum
from megatrain.passes.rewrites.head.linear_head import Head
from megatrain.passes.rewrites.head.logits_by_calls import LogitsByCalls
from megatrain.passes.rewrites.head.logits_in_place import LogitsInPlace


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
        for is_computed, at in head.chunks(len(hidden)):
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
        for is_computed, at in head.chunks(len(hidden)):
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
