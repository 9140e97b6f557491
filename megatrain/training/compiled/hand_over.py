"""Weights for an inference engine: a model's names and tensors between its steps, adapters merged layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError
from megatrain.runtime.stores.weights import has_adapters, plain_name
from megatrain.tracer.inventory import StateEntry


def handed_over(
    model: nn.Module,
    entries: Mapping[str, StateEntry],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    budget_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and saved buffers of a model by name, tied ones once, under their first name.

    Of a model with adapters of peft it yields what the model without them would have: names without peft's parts, and
    for each layer with adapters the weights to which its `merge()` adds them. A copy of the layer on the device is
    merged, one layer at a time, so neither the layer nor its bits change.

    Args:
        model: Nobody writes to its state meanwhile.
        entries: Of its inventory.
        tensors: Of its inventory; they have values.
        device: Where layers are merged.
        budget_bytes: What a layer and its merged weights may take there.

    Yields:
        The model's own tensors, without gradients; and merged ones, which are the caller's.

    Raises:
        ExecuteError: If the model has prompts as adapters or packed parameters, or a layer doesn't fit or shares a
            weight that would be merged.
    """
    if "prompt_encoder" in model._modules:
        raise ExecuteError(
            "the model's adapters are prompts (`prompt_encoder`), which no weight can hold.\n"
            "  An engine gets the weights of a model without adapters.\n"
            "  Generate with megatrain (compiled.generate), or give the engine the prompts yourself."
        )
    adapted = {name: module for name, module in model.named_modules() if has_adapters(module)}
    layers = {
        name: layer for name, layer in adapted.items() if not any(name.startswith(f"{outer}.") for outer in adapted)
    }
    inside = tuple(f"{name}." for name in layers)
    for key, entry in entries.items():
        if entry.packed_in is not None:
            raise ExecuteError(
                f"`{entry.packed_in}` is packed (quantized), and an engine reads plain tensors.\n"
                "  Other engines pack weights in other ways.\n"
                "  Save the adapters alone and give the engine these, over its own quantized weights."
            )
        if not entry.persistent or key.startswith(inside):
            continue
        name = plain_name(model, key)
        if name is not None:
            yield name, tensors[key].detach()
    for name, layer in layers.items():
        merged = _merged(name, layer, entries, device, budget_bytes)
        for key, tensor in merged.items():
            plain = plain_name(model, f"{name}.{key}")
            assert plain is not None, f"{name}.{key}"
            yield plain, tensor


def _merged(
    name: str, layer: nn.Module, entries: Mapping[str, StateEntry], device: torch.device, budget_bytes: int
) -> dict[str, torch.Tensor]:
    """Returns the state of the layer within adapters, by its names in that layer, on the device and merged."""
    for key, entry in entries.items():
        names = (key, *entry.ties)
        inside = [each for each in names if each.startswith(f"{name}.")]
        if inside and len(inside) < len(names):
            others = ", ".join(f"`{each}`" for each in names if each not in inside)
            raise ExecuteError(
                f"`{name}` has adapters, and its weight is also that of {others}.\n"
                "  Merged, the layer has another weight than what shares the present one.\n"
                "  Leave the layer out of target_modules, or untie the weights (tie_word_embeddings=False)."
            )
    own = [*layer.parameters(), *layer.buffers()]
    # The copies, and for the largest weight what adapters add to it, in fp32 at most.
    nbytes = sum(tensor.nbytes for tensor in own) + 4 * max(tensor.numel() for tensor in own)
    if nbytes > budget_bytes:
        raise ExecuteError(
            f"merging the adapters of `{name}` takes {format_bytes(nbytes)} of the device, and memory= allows "
            f"{format_bytes(budget_bytes)}.\n  A layer is merged where models compute.\n"
            "  Raise memory=, or give the engine the adapters alone."
        )
    with torch.no_grad():
        copies: dict[int, Any] = {id(tensor): _copy(tensor, device) for tensor in own}
        twin = copy.deepcopy(layer, copies)
        for module in twin.modules():
            if has_adapters(module):
                module.merge()  # pyright: ignore[reportCallIssue]
    while has_adapters(twin):
        twin = twin.get_submodule("base_layer")
    return {key: tensor.detach() for key, tensor in twin.state_dict(keep_vars=True).items()}


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = tensor.detach().to(device, copy=True)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
