"""Held: one parameter and its low half, through other memory and writes of other code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatrain.base.torch_private import StorageWeakRef, storage_of
from megatrain.errors import ExecuteError
from megatrain.optim.masters.halves import laid_out_like
from megatrain.runtime.versions import sums_of_bytes, version
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """A low half whose parameter has other memory now, while somebody holds the earlier one and may give it back."""

    memory: StorageWeakRef
    low: torch.Tensor
    sums: torch.Tensor


@dataclass(slots=True, eq=False)
class Held:
    """One parameter.

    Attributes:
        key: Its name in the model.
        parameter: The object, in fp32 or bf16.
        low: The bits that it lacks to its master, int16 of its shape; None is zero.
        mark: Its version and address when `low` was last known to belong to it.
        generator: Draws for the stochastic rounding of its updates, once it has been asked for.
        aside: Low halves of memory that parameters of the model had before, by address.
    """

    key: str
    parameter: torch.Tensor
    low: torch.Tensor | None = None
    mark: tuple[int, int] = (0, 0)
    generator: torch.Generator | None = None
    aside: dict[int, Aside] = field(default_factory=dict[int, Aside])
    _memory: StorageWeakRef | None = None

    def wrote(self) -> None:
        """Notes that the parameter's present values belong to `low`."""
        self.mark = self._mark()
        storage = self.parameter.untyped_storage()
        if self._memory is None or self._memory.cdata != storage._cdata:
            self._memory = StorageWeakRef(storage)

    def drop_old_low(self) -> None:
        """Sets `low` to zero if other code has written the parameter; with other memory it has that memory's `low`."""
        if self.is_as_left:
            return
        if self.has_other_memory:
            self.put_aside()
            if self._take_back():
                return
        if self.low is not None:
            self.low.zero_()
        self.wrote()

    @property
    def is_as_left(self) -> bool:
        """Whether nobody has written the parameter since `low` was last known to belong to it."""
        parameter = self.parameter
        return self.mark == (version(parameter), parameter.data_ptr())

    @property
    def has_other_memory(self) -> bool:
        """Whether the parameter has other memory than when `low` was last known to belong to it."""
        return self.mark[1] != self.parameter.data_ptr()

    def put_aside(self) -> None:
        """Puts `low` aside if the parameter has other memory now, and somebody holds the earlier one."""
        if self.low is None or self._memory is None or not self.has_other_memory:
            return
        memory = storage_of(self._memory.cdata)
        if memory is not None:
            sums = sums_of_bytes(_bytes(memory, self.mark[1], 2 * self.low.numel()))
            self.aside[self.mark[1]] = Aside(self._memory, self.low, sums)
            self.low = None

    def _take_back(self) -> bool:
        storage, address = self.parameter.untyped_storage(), self.parameter.data_ptr()
        known = self.aside.get(address)
        if known is None or known.memory.cdata != storage._cdata or known.low.shape != self.parameter.shape:
            return False
        del self.aside[address]
        # The holder of the memory may have written into it.
        if not torch.equal(sums_of_bytes(_bytes(storage, address, self.parameter.nbytes)), known.sums):
            return False
        self.low = known.low
        self.wrote()
        return True

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


def _bytes(storage: torch.UntypedStorage, address: int, nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8).set_(storage, address - storage.data_ptr(), (nbytes,), (1,))
