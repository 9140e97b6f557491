"""GradientSum: the gradient of a tensor that several chunks or tiles read, summed in fp32."""

from __future__ import annotations

import torch

from megatrain.device import find


class GradientSum:
    """A sum of gradients in fp32 or wider, rounded once to the dtype of the tensor.

    Args:
        tensor: Whose gradient it is.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._is_empty = True
        self._total = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    def add(self, part: torch.Tensor) -> None:
        """Adds a gradient of the tensor."""
        self._is_empty = False
        self._total.add_(part)

    def add_at(self, part: torch.Tensor, dim: int, place: slice) -> None:
        """Adds the gradient of a range of the tensor along a dimension."""
        self._is_empty = False
        self._total.narrow(dim, place.start, place.stop - place.start).add_(part)

    def add_rows(self, gradients: torch.Tensor) -> None:
        """Adds the sum of all rows of a matrix, as for a bias."""
        self._is_empty = False
        self._total.add_(gradients.sum(0, dtype=self._total.dtype))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds a product of two matrices, which isn't rounded before."""
        self._is_empty = False
        find(left.device).add_product(self._total, left, right)

    def rounded(self) -> torch.Tensor | None:
        """The sum, in the dtype of the tensor; None if nothing was added."""
        return None if self._is_empty else self._total.to(self._dtype)
