"""LogitsInPlace: the memory of a chunk's logits, which all chunks use one after the other."""

from __future__ import annotations

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
        dtype: Of the log-probabilities.
        rows: Of the largest chunk.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rows: int) -> None:
        self._weight, self._bias = weight, bias
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

    def gradient(
        self,
        labels: torch.Tensor,
        of_selected: torch.Tensor,
        of_sums: torch.Tensor | None,
        class_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the gradient of the logits whose log-probabilities were computed last, and writes over these.

        Args:
            labels: Of the chunk, of shape [rows].
            of_selected: Gradient of each label's log-probability, of shape [rows].
            of_sums: Gradient of the sum of each row's log-probabilities, of shape [rows]; None if there is no sum.
            class_weight: Factors of the words in these sums, of shape [words]; None for 1.
        """
        rows = len(labels)
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._log_probs)
        logits, log_probs, gradients = self._logits[:rows], self._log_probs[:rows], self._gradients[:rows]
        places = labels.unsqueeze(1)
        marks = of_selected.unsqueeze(1)
        if of_sums is not None:
            gradients.copy_(of_sums.unsqueeze(1).expand_as(gradients))
            if class_weight is not None:
                gradients.mul_(class_weight)
            marks = marks + gradients.gather(1, places)
        gradients.scatter_(1, places, marks)
        log_softmax_backward(gradients, log_probs, -1, log_probs.dtype, out=log_probs)
        gradients.scatter_(1, places, 0.0)  # all zeros again, for the next chunk
        return log_probs if log_probs.dtype == logits.dtype else logits.copy_(log_probs)
