"""LogitsInPlace: the memory of a chunk's logits, which all chunks use one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.torch_private import log_softmax_backward


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
