"""LogitsByCalls: a chunk's logits, made and differentiated by the model's own calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatrain.passes.rewrites.head.linear_head import Head


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
