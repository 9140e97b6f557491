"""FastPath: how an optimizer's update of one parameter is done without the optimizer's own code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatrain.base.checks import checked, instance_of
from megatrain.errors import OptimizerError
from megatrain.optim.masters.halves import CHUNK, Master, pieces
from megatrain.optim.proxy import Optimizer

Piece = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]
"""Values and gradient in scratch memory, and views of the moments; all fp32 and flat."""


def in_pieces(
    master: Master, gradient: torch.Tensor, moments: Sequence[torch.Tensor], *, scale: float = 1.0, start: int = 0
) -> Iterator[Piece]:
    """Yields a parameter piece by piece; the master takes a piece over when the next one is asked for.

    A piece whose loop body raises, or leaves by `break`, is not taken over.

    Args:
        master: Any kind.
        gradient: Contiguous, of the master's shape, fp32 or bf16; not written to.
        moments: fp32, contiguous, of the master's shape.
        scale: Factor of the gradient, rounded to fp32.
        start: The element to begin at.
    """
    numel, flat = gradient.numel() - start, gradient.reshape(-1)
    size = min(numel, CHUNK * torch.get_num_threads())
    values, wide, spare = torch.empty(size), torch.empty(size), torch.empty(size, dtype=torch.int32)
    for begin, end in ((one + start, other + start) for one, other in pieces(numel)):
        part, room = master.part(begin, end), slice(0, end - begin)
        part.load(values[room], spare[room])
        wide[room].copy_(flat[begin:end])
        if scale != 1.0:
            wide[room].mul_(scale)
        yield values[room], wide[room], tuple(moment.view(-1)[begin:end] for moment in moments)
        part.store(values[room], spare[room])


@dataclass(frozen=True, slots=True, eq=False)
class ParameterUpdate:
    """The tensors and numbers that the update of one parameter reads and writes.

    All tensors are in the order of the parameter's memory. Those of the master, `moments` and `numbers` are the
    parameter's and the optimizer's own memory: an update writes into them.

    Args:
        master: The parameter's values: `WholeMaster` of an fp32 parameter, `SplitMaster` or `RoundedMaster` of bf16.
        gradient: Contiguous, of the master's shape, fp32 or bf16; not to be written to.
        moments: Contiguous, of the master's shape; in the order of `FastPath.moments`, and of their dtypes.
        numbers: In the order of `FastPath.numbers`; most are fp32 tensors without dimensions.
        options: The result of `FastPath.options`.
        scale: Factor of the gradient, such as the coefficient of clipping.
        threads: How many threads code that isn't torch's may take; None is as many as torch.
    """

    master: Master
    gradient: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    numbers: tuple[torch.Tensor, ...]
    options: Any
    scale: float = 1.0
    threads: int | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yields values, gradient and moments of one piece after the other, all fp32 and flat, for any kind of master.

        Values and gradient are scratch memory. The gradient is scaled, and may be written to. The master takes the
        values over when the next piece is asked for; moments are changed in place. Pieces end where caches do, so an
        update that treats elements differently by their place belongs elsewhere.
        """
        return in_pieces(self.master, self.gradient, self.moments, scale=self.scale)


class PreparedUpdate(Protocol):
    """Updates the parameters for which it was prepared, and their state, in place; see `FastPath.prepare`."""

    def __call__(self, gradients: Sequence[torch.Tensor], options: Sequence[Any], scales: Sequence[float]) -> None:
        """Takes gradients, options and scale of each parameter, as of `ParameterUpdate`, in the order of `given`."""
        ...


class FastPath(ABC):
    """An optimizer's fused update of one parameter, in one object; `register` puts it to use.

    The update has the bits of the optimizer's own code over an fp32 parameter, or says in its documentation how far it
    is from them. State has the names that the optimizer's own code gives, so that a checkpoint fits both.

    Attributes:
        moments: Names of state of the parameter's shape (`exp_avg`).
        numbers: Names of state that is one fp32 number (`step`), or of a shape of its own; before the moments in a
            parameter's state.
        dtypes: Of the moments that aren't fp32.
    """

    moments: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    @abstractmethod
    def matches(self, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
        """Tells whether it updates the parameters of this group that are bf16 and have masters.

        Args:
            optimizer: Of the user, or one of the same class that has only some of its parameters.
            group: One of its param groups.
        """

    def matches_whole(self, group: Mapping[str, Any]) -> bool:
        """Tells whether it updates fp32 parameters of a group that `matches`, too. Yes, unless it is overridden."""
        del group
        return True

    def options(self, group: Mapping[str, Any]) -> Any:
        """Reads the numbers of a step from a group; it returns the group itself, unless it is overridden.

        Errors in the options are raised here, before anything is written.
        """
        return group

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Makes the state of a parameter before its first update: zeros, laid out as the parameter is."""
        numbers = {name: torch.tensor(0.0) for name in self.numbers}
        zeros = {
            name: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False, device="cpu")
            for name in self.moments
        }
        return {**numbers, **zeros}

    @abstractmethod
    def update(self, given: ParameterUpdate) -> None:
        """Updates one parameter and its state in place; gradients are not recorded."""

    def prepare(self, given: Sequence[ParameterUpdate]) -> PreparedUpdate | None:
        """Prepares the updates of several parameters, for later steps; None (the default) if it doesn't.

        Only for updates that, once they write, are sure to reach their end. The tensors of `given` keep their memory as
        long as the result is called. Each call gets gradients of its own.
        """
        del given
        return None

    def is_sure(self, master: type[Master], gradient: torch.dtype) -> bool:
        """Tells whether an update, once it writes, is sure to reach its end.

        If it isn't (the default), the tensors that a block's update writes are copied first, to be restored after a
        failure.

        Args:
            master: The kind of master.
            gradient: The gradient's dtype.
        """
        del master, gradient
        return False


_PATHS: list[FastPath] = []


@checked(path=instance_of(FastPath, "an object of a subclass of FastPath", "that object, not its class"))
def register(path: FastPath) -> None:
    """Puts a fast path to use, before all registered ones; existing training steps use it, too.

    Raises:
        OptimizerError: If it is registered already.
    """
    if any(known is path for known in _PATHS):
        raise OptimizerError(
            f"{type(path).__name__} is registered already.\n"
            "  A fast path is registered once, for all optimizers of a process.\n"
            "  Call unregister() with it first."
        )
    _PATHS.insert(0, path)


@checked(path=instance_of(FastPath, "an object of a subclass of FastPath", "that object, not its class"))
def unregister(path: FastPath) -> None:
    """Takes a fast path out of use; its optimizers' own code updates their parameters from then on.

    Raises:
        OptimizerError: If it isn't registered.
    """
    if not any(known is path for known in _PATHS):
        raise OptimizerError(
            f"{type(path).__name__} is not registered.\n"
            "  A fast path is identified by the registered object, not by its class.\n"
            "  Keep the object that you pass to register(), and pass it to unregister()."
        )
    _PATHS[:] = [known for known in _PATHS if known is not path]


def fast_path(optimizer: Optimizer, group: Mapping[str, Any], *, is_whole: bool = False) -> FastPath | None:
    """Returns the latest registered fast path that matches a group; None if none does.

    Args:
        optimizer: As of `FastPath.matches`.
        group: One of its param groups.
        is_whole: The parameter is fp32, so it has no other master than itself.
    """
    for path in _PATHS:
        if path.matches(optimizer, group) and (not is_whole or path.matches_whole(group)):
            return path
    return None
