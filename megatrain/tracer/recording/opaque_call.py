"""OpaqueCall: the first run of a module that stays opaque, and what must hold for a second one to be like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.device import used_device
from megatrain.torch_private import disable_current_modes, pytree
from megatrain.tracer.python.contents import VALUES, GeneratorState
from megatrain.tracer.recording.obstacles import RUN_AGAIN, Obstacle, refuse_flag
from megatrain.tracer.recording.opaque import Escapes, Holder, Opaque, tensors_in
from megatrain.tracer.recording.random_numbers import kept_rng
from megatrain.tracer.source_line import user_line

# Arguments that are at each step what they were at the capture, whatever the module does with them.
_LASTING = (*VALUES, torch.Size, np.generic, Enum, type, BuiltinFunctionType)


class OpaqueCall:
    """One call of an opaque module during a capture.

    Args:
        name: Fully qualified name of the module.
        reason: Why it is opaque.
        module: The module, holding fake state.
        args: Positional arguments.
        kwargs: Keyword arguments.
        calls: Names of the module calls around it and itself, outermost first.

    Attributes:
        has_drawn: Whether its run moved a random generator: torch's on the CPU, Python's, NumPy's, or one of its own.
    """

    def __init__(self, name: str, reason: str, module: nn.Module, args: Any, kwargs: Any, calls: tuple[str, ...]):
        self._name = name
        self._place = f"`{name}`" if name else "the model"
        self._calls = calls
        self._arguments = (args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        strange = [x for x in leaves if not isinstance(x, (torch.Tensor, *_LASTING))]
        if strange:
            self._refuse(f"is given a {type(strange[0]).__qualname__}, which may contain tensors or change")
        state = _state_of(module)
        self._num_state = len(state)
        self.operands = [*(x for x in leaves if isinstance(x, torch.Tensor)), *(tensor for tensor, _ in state)]
        self.opaque = Opaque(name, reason, module, (args, kwargs), [places for _, places in state], calls)
        self._attributes = self.opaque.python_state()
        self.changed: set[tuple[Any, Any]] = set()
        self.has_drawn = False

    def run(
        self, tensors: Sequence[torch.Tensor], more: Mapping[int, torch.Tensor], escapes: Escapes
    ) -> tuple[Any, tuple[torch.Tensor, ...], list[tuple[Holder, torch.Tensor]]]:
        """Runs the module.

        Args:
            tensors: Stand-ins for the operands.
            more: Further stand-ins, by the id of what they replace.
            escapes: Gets to know what the module's own code computes.

        Returns:
            The module's result, the tensors that its node gives, and the buffers that it re-assigned.

        Raises:
            Obstacle: If the module does something that would be lost, or wrong, when it runs again.
        """
        memory = [_memory(t) for t in tensors]
        state = tensors[len(tensors) - self._num_state :]
        flags = [t.requires_grad for t in state]
        before = pytree.tree_flatten(self._arguments)
        cpu = _cpu_state()
        with kept_rng(used_device(tensors)) as moved:
            results, result, rebound = self.opaque.capture(
                tensors, dict(more), lambda tensor: escapes.note(tensor, self._calls)
            )
            self.has_drawn = cpu != _cpu_state()
        self.has_drawn |= bool(moved)
        after = pytree.tree_flatten(self._arguments)
        if before[1] != after[1] or any(a is not b for a, b in zip(before[0], after[0], strict=True)):
            self._refuse("changes a container that it is given")
        for change in self._attributes.changes():
            self.changed.add(change.where)
            self.has_drawn |= isinstance(change.holder, GeneratorState)
            if any(t.requires_grad for t in tensors_in(change.now)):
                self._refuse(f"keeps a tensor with a history in the attribute `{change.name}`")
        if any(now != then for now, then in zip(map(_memory, tensors), memory, strict=True)):
            raise Obstacle(
                f"gives a parameter other memory in the forward of {self._place}",
                "The parameter stays in host memory; the module gets a stand-in.",
                "Change parameters outside the forward.",
            )
        if [t.requires_grad for t in state] != flags:
            refuse_flag(f" in the forward of {self._place}")
        if any(t.is_leaf and t.grad is not None for t in tensors):
            raise Obstacle(
                f"runs a backward in the forward of {self._place}",
                "The gradients that this backward leaves in `.grad` would be lost.",
                "Use torch.autograd.grad, or run the backward outside the model.",
            )
        return result, results, rebound

    def _refuse(self, what: str) -> None:
        raise Obstacle(
            f"runs the module `{self._name}` again at each step, which {what},",
            "All tensors that enter or leave such a module must be in its arguments or its result.",
            "Pass and return tensors.",
            remedy=RUN_AGAIN,
            place=user_line(),
            calls=self._calls,
        )


def _cpu_state() -> bytes:
    """The state of torch's generator on the CPU."""
    with disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _state_of(module: nn.Module) -> list[tuple[torch.Tensor, list[Holder]]]:
    """Lists the state of a module with every place that holds it, tied tensors once."""
    found: dict[int, tuple[torch.Tensor, list[Holder]]] = {}
    for child in module.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(child)[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((child, kind, name))
    return list(found.values())
