"""Held: a parameter of the model, and the data that `Masters` keeps for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.errors import ExecuteError
from megatrain.optim.masters.memory_order import laid_out_like
from megatrain.runtime.call_start import version
from megatrain.tracer.spec import TensorSpec


@dataclass(slots=True, eq=False)
class Held:
    """One parameter.

    Attributes:
        key: Its name in the model.
        parameter: The object, in fp32 or bf16.
        low: The bits that it lacks to its master, int16 of its shape; None is zero.
        mark: Its version and address when `low` was last known to belong to it.
        generator: Draws for the stochastic rounding of its updates, once it has been asked for.
    """

    key: str
    parameter: torch.Tensor
    low: torch.Tensor | None = None
    mark: tuple[int, int] = (0, 0)
    generator: torch.Generator | None = None

    def wrote(self) -> None:
        """Notes that the parameter's present values belong to `low`."""
        self.mark = self._mark()

    def drop_old_low(self) -> None:
        """Sets `low` to zero if other code has written the parameter."""
        if self.low is not None and self.mark != self._mark():
            self.low.zero_()
            self.wrote()

    def room(self) -> torch.Tensor:
        """Returns `low`, made if there is none, and laid out like the parameter."""
        values = self.parameter.detach()
        if self.low is None:
            self.low = torch.zeros_like(values, dtype=torch.int16, device="cpu")
        self.low = laid_out_like(self.low, values)
        return self.low

    def check_values(self) -> None:
        """Refuses a parameter without memory.

        Raises:
            ExecuteError: If it is on meta.
        """
        if self.parameter.is_meta:
            raise ExecuteError(
                f"parameter `{self.key}` {TensorSpec.of(self.parameter)} is on the meta device and has no values.\n"
                "  A master is made from the values of its parameter.\n"
                "  Call load_weights() or the model first."
            )

    def _mark(self) -> tuple[int, int]:
        return version(self.parameter), self.parameter.data_ptr()
