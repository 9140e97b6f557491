"""ModelSizes: a model and an example of its call at any sizes, such as longer sequences and fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from megatrain.errors import OptionError
from megatrain.planning.equal_layers import Layers
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.inventory import inventory

MICRO_BATCH, SEQUENCE, DEPTH, LORA = "micro_batch", "sequence", "depth", "lora"
"""Names of sizes: samples of a micro-batch, tokens of a sample, layers, and the rank of adapters (0 for none)."""

# A plan takes next to no memory: an example of more rows and columns has no values.
_MOST_ELEMENTS = 2**20


class ModelSizes(Protocol):
    """Makes a model and an example of its call at any sizes."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that can change, as they are."""
        ...

    @property
    def fixed(self) -> Mapping[str, str]:
        """Of the sizes that can't change: why, in words."""
        ...

    def check(self) -> None:
        """Refuses to go on if the model isn't the one that was planned first."""
        ...

    def made(self, sizes: Mapping[str, int]) -> tuple[nn.Module, Arguments]:
        """The model, which may be on meta, and the arguments of one micro-batch."""
        ...

    def few(self, sizes: Mapping[str, int]) -> tuple[nn.Module, Arguments, Layers] | None:
        """The same with only some of its equal layers, and which layers it has; None if they aren't plainly equal."""
        ...


class ExampleSizes:
    """A model with an example of its call, whose first dimension is the micro-batch, and the second the sequence.

    An example of another size has this one's rows and columns, again and again: its values stay of the same kind (ids
    of the vocabulary, masks of ones). A size that some of the tensors don't have can't change.
    """

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._model, self._arguments = model, arguments
        self._state = inventory(model)[0]
        self.sizes: Mapping[str, int] = {}
        self.fixed: Mapping[str, str] = {
            DEPTH: "a model that is made already has the layers that it has",
            LORA: "adapters are put into a model before it is planned",
        }
        for name, dimension in ((MICRO_BATCH, 0), (SEQUENCE, 1)):
            found = {tuple(t.shape) for t in arguments.tensors if t.ndim > dimension}
            lengths = {shape[dimension] for shape in found}
            if dimension == 1 and not any(t.ndim > 2 or _is_ids(t) for t in arguments.tensors):
                self.fixed = {**self.fixed, name: "the example has neither token ids nor sequences of vectors"}
            elif len(lengths) == 1 and min(lengths) > 0:
                self.sizes = {**self.sizes, name: lengths.pop()}
            else:
                shapes = ", ".join(map(str, sorted(found))) or "of fewer dimensions"
                self.fixed = {**self.fixed, name: f"the example's tensors don't share dimension {dimension}: {shapes}"}

    def check(self) -> None:
        """As `ModelSizes.check`."""
        if inventory(self._model)[0] != self._state:
            raise OptionError(
                "the model has changed since it was planned: other parameters, or others of them are trained.\n"
                "  A plan is planned again from the same model.\n  Plan the model as it is now with megatrain.plan."
            )

    def made(self, sizes: Mapping[str, int]) -> tuple[nn.Module, Arguments]:
        """As `ModelSizes.made`."""
        tensors = [self._resized(tensor, sizes) for tensor in self._arguments.tensors]
        args, kwargs = self._arguments.rebuild(tensors)
        return self._model, Arguments.of(self._model, args, kwargs)

    def few(self, sizes: Mapping[str, int]) -> None:
        """None: a model that is made has its layers."""
        del sizes

    def _resized(self, tensor: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        made = tensor.detach()
        shape = [sizes.get(name, size) for name, size in zip((MICRO_BATCH, SEQUENCE), tensor.shape, strict=False)]
        if prod(shape) > _MOST_ELEMENTS:
            made = made.to("meta")
        for name, dimension in ((MICRO_BATCH, 0), (SEQUENCE, 1)):
            if name in sizes and made.ndim > dimension and sizes[name] != made.shape[dimension]:
                at = torch.arange(sizes[name], device=made.device) % made.shape[dimension]
                made = made.index_select(dimension, at)
        return tensor if made.shape == tensor.shape else made.requires_grad_(tensor.requires_grad)


def num_tokens(arguments: Arguments) -> int | None:
    """Tokens of an example: the elements of its first tensor of whole numbers in two dimensions; None without one."""
    return next((tensor.numel() for tensor in arguments.tensors if _is_ids(tensor)), None)


def _is_ids(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def model_and_inputs(made: Any, who: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Takes `(model, inputs)` apart: a tensor, a tuple of arguments, a dict of keyword arguments, or the last two."""
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        kinds = ", ".join(type(x).__qualname__ for x in (made if isinstance(made, tuple) else (made,)))
        what = f"({kinds})" if isinstance(made, tuple) else f"a {kinds}"
        raise OptionError(
            f"{who} returned {what}.\n  The function must return (model, inputs), where model is an nn.Module.\n"
            "  Write `return model, (x,)`."
        )
    model, inputs = made
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and _is_keywords(inputs[1]):
        return model, inputs[0], dict(inputs[1])
    if isinstance(inputs, tuple):
        return model, inputs, {}
    if _is_keywords(inputs):
        return model, (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return model, (inputs,), {}
    raise OptionError(
        f"{who} returned inputs of type {type(inputs).__qualname__}.\n"
        "  Inputs are a tensor, a tuple of arguments, a dict of keyword arguments by name, or a pair (tuple, dict).\n"
        "  Write `return model, (x,)` or `return model, {'input_ids': ids}`."
    )


def _is_keywords(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)
