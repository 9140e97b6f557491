"""Laws: a capture that recalls equal calls says what a capture says that runs every call, and refuses the same."""

from __future__ import annotations

import copy
import importlib.util
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatrain.passes.pipeline import lower
from megatrain.tracer.calls import literal_text
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.recording.recall import Recall
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from tests.zoo.collect import cases


@contextmanager
def every_call_run() -> Generator[None]:
    """Captures in the body recall nothing."""
    with patch.object(Recall, "asked", lambda *_: None):
        yield


@contextmanager
def counted_recalls() -> Generator[list[str]]:
    """Lists the names of the calls that captures in the body recall."""
    found: list[str] = []
    made = Recall.bind

    def count(recall: Any, recipe: Any, *rest: Any) -> None:
        found.append(str(recipe.node.target))
        made(recall, recipe, *rest)

    with patch.object(Recall, "bind", count):
        yield found


def told(traced: TracedModule) -> list[str]:
    """All that a capture says, a fact a line: nodes with their whole meta, guards, assumptions."""
    lines = [str(traced), str(traced.outputs), str(traced.gradient_order), str(traced.side_outputs.names)]
    lines += [f"{key}: {entry}" for key, entry in traced.state.items()]
    lines += [f"{node.name}: {_target(node)} {node.args} {node.kwargs} {_meta(node)}" for node in traced.graph.nodes]
    lines += [f"guard {guard} at {guard.place}: {guard.args}" for guard in traced.guards]
    lines += [str(traced.assumptions), *map(str, traced.assumptions.values)]
    lines += [f"{unset.path}: {sorted(unset.names)}" for unset in traced.assumptions.unset]
    others = "name input_names written_inputs writes_back block_modules device returned_argument num_numbers rebinds"
    lines += [f"{name}: {_sorted(getattr(traced, name))}" for name in others.split()]
    return [re.sub(r" at 0x[0-9a-f]+", "", line) for line in lines]


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _target(node: fx.Node) -> str:
    if isinstance(node.target, Opaque | Observer):
        return type(node.target).__name__  # made anew by each capture
    return literal_text(node.target) if hasattr(node.target, "call_text") else f"{node.op} {node.target}"


def _meta(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in sorted(node.meta)}


def both(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, copies: bool = False
) -> Iterator[Any]:
    """Captures with every call run, and with recall: yields what each says, or its error.

    With `copies` each is of a copy: a first forward of some models changes their configuration.
    """
    for is_whole in (True, False):
        state = torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with every_call_run() if is_whole else nullcontext():
                    found = told(trace(copy.deepcopy(model) if copies else model, args, kwargs))
        except Exception as error:
            found = [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        assert torch.equal(state, torch.get_rng_state())
        yield found


WIDTH = 4


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.relu else result


class Layer(nn.Module):
    """A layer that does something of which captures must take note, and some plain arithmetic."""

    def __init__(self, quirk: str, index: int):
        super().__init__()
        self.quirk, self.index = quirk, index
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.full((WIDTH,), float(index)))
        self.calls = 0

    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        y = self.norm(x)
        y = QUIRKS[self.quirk](self, y, shared)
        return x + F.gelu(self.linear(y).view(-1, 2, 2).transpose(1, 2).reshape(x.shape))


Quirk = Callable[[Layer, torch.Tensor, dict[str, Any]], torch.Tensor]
QUIRKS: dict[str, Quirk] = {"none": lambda layer, x, shared: x}


def quirk(do: Quirk) -> Quirk:
    QUIRKS[do.__name__.replace("_", " ")] = do
    return do


@quirk
def dropout(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return F.dropout(x, 0.5)


@quirk
def an_index_that_is_read(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return x * (layer.index + 1) if layer.index % 2 else x.relu()


@quirk
def a_buffer_that_is_written(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        layer.buffer.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)
    return x + layer.buffer


@quirk
def a_write_into_a_view(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    y = torch.ones_like(layer.linear.weight).expand(2, WIDTH, WIDTH).clone()
    if layer.index > 1:  # the calls of the layers before are recalled then
        y[0].mul_(x.sum())
    return x * y[0].sum()


@quirk
def a_view_of_what_is_written_later(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    y = layer.linear(x)
    first = y[..., :1]
    y += 1  # the history of the view is made anew when somebody asks for it
    return x + y + first


@quirk
def a_write_into_what_another_layer_has_left(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    held = shared.setdefault("held", [])
    memory = torch.zeros_like(x)
    held.append((memory, memory.view(-1)))
    if len(held) < 4:
        return x
    held[2][1].add_(x.view(-1))  # from now on the memory has a history
    return x + held[2][0]


@quirk
def no_gradients(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    with torch.set_grad_enabled(layer.index % 2 == 0):
        return layer.linear(x)


@quirk
def detached(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return layer.linear(x.detach()) if layer.index % 3 else layer.linear(x)


@quirk
def other_strides(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    y = x.transpose(0, 1).contiguous().transpose(0, 1) if layer.index % 2 else x
    return y.relu()


@quirk
def autocast(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=layer.index % 2 == 0):
        return layer.linear(x).float()


@quirk
def another_kernel_of_attention(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    q = x.view(*x.shape[:2], 2, 2).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH if layer.index % 2 else SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)


@quirk
def a_checkpoint(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(layer.linear(y).relu(), 0.1), x, use_reentrant=bool(layer.index % 2))


@quirk
def a_gradient_inside(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    if layer.index < 2:
        return x
    with torch.enable_grad():
        y = layer.linear(x).square().sum()
        return torch.autograd.grad(y, x, create_graph=True)[0] if x.requires_grad else x


@quirk
def a_gradient_that_is_tried(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    try:
        return a_gradient_inside(layer, x, shared)
    except Exception:
        return x * 3


@quirk
def a_mode(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    if layer.index % 2:
        with Doubling():
            return F.relu(x)
    return F.relu(x)


@quirk
def a_mode_that_counts(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    with FlopCounterMode(display=False) as mode:
        y = layer.linear(x)
    return y * (1 + mode.get_total_flops())


@quirk
def pieces_by_value(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    places = torch.tensor([1 + layer.index % 2])
    return torch.cat(torch.tensor_split(x, places, -1)[::-1], -1)


@quirk
def a_choice_by_value(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return x[shared["keep"]].sum() + x


@quirk
def a_counter_of_all_layers(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    shared["count"] = shared.get("count", 0) + 1
    return x * shared["count"]


@quirk
def a_value_that_is_kept(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    layer.kept = layer.linear(x).mean()
    return x


@quirk
def a_guess_by_weights(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return x * 2 if layer.linear.weight.sum() > -1000 else x


@quirk
def a_number_of_numpy(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return x * float(np.random.rand())


@quirk
def a_seed(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    if layer.index == 3:
        torch.manual_seed(0)
    return F.dropout(x, 0.5)


@quirk
def an_error(layer: Layer, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
    return x @ layer.norm.weight.view(2, 2) if layer.index == 3 else x


NEED_ALL = {"a gradient inside", "a gradient that is tried", "a choice by value", "a guess by weights"}


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


class Stack(nn.Module):
    def __init__(self, quirks: list[str], order: list[int], ties: bool, hooked: int | None, overridden: int | None):
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer(name, i) for i, name in enumerate(quirks)]
        self.layers = nn.ModuleList(layers)
        self.order = order
        if ties:
            layers[-1].linear = layers[0].linear
            layers[-2].norm.weight = layers[0].norm.weight
        if hooked is not None:
            layers[hooked].linear.register_forward_hook(_doubled)
        if overridden is not None:
            layers[overridden].norm.forward = lambda input: input * 3  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shared: dict[str, Any] = {"keep": mask[..., 0]}
        for i in self.order:
            x = self.layers[i](x, shared)
        return x


def check(model: nn.Module, *args: torch.Tensor) -> list[str]:
    """Returns the calls that were recalled."""
    whole, found = (None, None), []
    with counted_recalls() as recalled:
        whole, found = both(model, args)
    assert found == whole
    return recalled


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, WIDTH, generator=generator)
    return x, x > 0


@pytest.mark.parametrize("name", QUIRKS)
def test_layers_with_a_quirk(name: str) -> None:
    """The calls around the quirk are recalled, but where the forward needs every call, or values of weights."""
    recalled = check(Stack([name] * 4, [0, 1, 2, 3], False, None, None), *inputs())
    assert len(recalled) > 10 or name in NEED_ALL


@settings(max_examples=5)
@given(st.data())
def test_layers_of_any_kinds_in_any_order(data: st.DataObject) -> None:
    kinds = st.sampled_from([name for name in QUIRKS if name not in ("an error", "a number of numpy")])
    quirks = data.draw(st.lists(kinds, min_size=3, max_size=4))
    places = st.integers(0, len(quirks) - 1)
    order = data.draw(st.lists(places, min_size=3, max_size=5))
    some = st.one_of(st.none(), st.none(), places)
    check(Stack(quirks, order, data.draw(st.booleans()), data.draw(some), data.draw(some)), *inputs())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # what models say about themselves
@pytest.mark.parametrize("name", cases())
def test_models_of_the_zoo(name: str) -> None:
    case = cases()[name]
    if any(importlib.util.find_spec(package) is None for package in case.needs):
        pytest.skip("its package isn't installed")
    torch.manual_seed(0)
    model = case.build()
    args, kwargs = case.inputs(0)
    whole, found = both(model, args, kwargs, copies=True)
    assert found == whole


def test_a_program_and_its_order_are_those_of_whole_captures() -> None:
    model, args = Stack(["dropout"] * 4, [0, 1, 2, 3], True, None, None), inputs()
    with every_call_run():
        whole = str(lower(trace(model, args)))
    with counted_recalls() as recalled:
        assert str(lower(trace(model, args))) == whole
    assert recalled
