"""Compiled models inside ordinary code: what comes out, what callers do with it, what surrounds the call."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megatrain
from megatrain.errors import ExecuteError
from tests.comparing import assert_same_state
from tests.models import MODELS
from tests.runtime.parity import PATHS, assert_parity_of, seeded
from tests.runtime.test_backwards import Trunk, batch


@dataclass
class Result:
    loss: Any
    parts: dict[str, Any]


class Outputs(nn.Module):
    """Returns every kind of thing that a model can return."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        result = self.second(hidden) * self.scale
        return {
            "result": result,
            "again": result,
            "input": x,
            "input view": x[:2],
            "parameter": self.first.weight,
            "parameter view": self.second.weight[0],
            "buffer": self.scale,
            "buffer view": self.scale[1:],
            "count": self.calls,
            "detached": hidden.detach(),
            "indices": result.argmax(-1),
            "none": None,
            "number": 3,
            "nested": [Result(hidden.sum(), {"flat": hidden.view(-1)}), (hidden,), "text"],
        }


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Headed(Plain):
    """Ends in a layer whose result no backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(super().forward(x))


class Aliased(Headed):
    def forward(self, x):
        y = super().forward(x)
        return y, y.view(-1)


class Traced(Plain):
    """Returns what the next layer reads."""

    def forward(self, x):
        x = self.layers[0](x)
        return x, self.layers[2](self.layers[1](x))


def test_every_kind_of_output() -> None:
    def drive(call, model):
        x = batch(requires_grad=True)
        out = call(x)
        loss = (out["result"] * out["again"]).sum() + (out["input"] * 2).sum() + out["input view"].square().sum()
        loss = loss + out["parameter"].square().sum() + out["parameter view"].sum() * 3
        loss = loss + out["nested"][0].loss + out["nested"][0].parts["flat"].square().sum() + out["nested"][1][0].sum()
        loss.backward()
        assert (out["none"], out["number"], out["nested"][2]) == (None, 3, "text")
        return out, x.grad

    assert_parity_of(seeded(Outputs), drive)


def test_identities_are_kept() -> None:
    def drive(call, model):
        x = batch()
        out = call(x)
        assert out["again"] is out["result"]
        assert out["input"] is x
        assert out["parameter"] is model.first.weight
        assert out["buffer"] is model.scale
        assert out["count"] is model.calls
        with torch.no_grad():
            y = batch(requires_grad=True)
            assert call(y)["input"] is y

    assert_parity_of(seeded(Outputs), drive)


@pytest.mark.parametrize("model", [Plain, Aliased, Traced])
def test_writing_where_it_would_matter_is_refused_or_right(model) -> None:
    """A result that autograd saved, one with a second name, one that the next block reads."""
    eager, compiled = seeded(model), megatrain.compile(seeded(model), device="cpu", **PATHS["offload"])
    for call in (eager, compiled):
        found = call(batch())
        y, loss = (found, (found * 2).sum()) if model is Plain else (found[0], (found[1] * 2).sum())
        with torch.no_grad():
            y.mul_(3)
        try:
            loss.backward()
        except RuntimeError:
            assert call is eager
        except ExecuteError as error:
            assert "modified in place between forward and backward" in str(error)  # noqa: PT017  # it may be right, too
            return
    assert_same_state(eager, compiled.megatrain.model)


def test_other_weights_at_the_backward_are_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    compiled = megatrain.compile(model, device="cpu")
    for change in ("data", "assign", "statistics"):
        loss = compiled.eval()(batch()).square().sum()
        with torch.no_grad():
            if change == "data":
                model[0].weight.data = model[0].weight.data * 2
            elif change == "assign":
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
            (compiled.train() if change == "statistics" else compiled)(batch())
        with pytest.raises(ExecuteError, match=r"(parameter|buffer) `.*` was modified between forward and backward"):
            loss.backward()
    compiled(batch()).sum().backward()


def test_hooks_around_the_backward_hide_no_spoiled_graph() -> None:
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x).tanh()
            doubled = y * 2
            return doubled + y.mul_(3).detach()

    model = nn.Sequential(Layer(6, 6), Layer(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))  # the last may keep its graph
    loss = megatrain.compile(model, device="cpu", **PATHS["offload"])(torch.ones(2, 6)).sum()
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with identity, pytest.raises(ExecuteError, match="modified in place by the model's own forward"):
        loss.backward()


def test_checkpoint_around() -> None:
    def drive(call, model):
        def run(x):
            return torch.tanh(call(x * 2)[0]).square() * x[:, :2]

        x = batch(requires_grad=True)
        for use_reentrant in (False, True):
            checkpoint(run, x, use_reentrant=use_reentrant).sum().backward()
        return x.grad

    assert_parity_of(seeded(Trunk), drive)


def test_autocast_around_the_forward_alone() -> None:
    def drive(call, model):
        with torch.autocast("cpu", torch.bfloat16):
            left, right, _ = call(batch())
        (left.float().sum() + right.float().square().sum()).backward(retain_graph=True)
        left.float().sum().backward()
        return left, right

    assert_parity_of(seeded(Trunk), drive)


def test_forward_and_backward_on_different_threads() -> None:
    def drive(call, model):
        losses = [call(batch(rows))[0].square().sum() for rows in (5, 3)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

    assert_parity_of(seeded(Trunk), drive)


def both(name: str = "gpt_loss", **options: Any) -> tuple[Any, Any, Any, Any]:
    """An eager model, its compiled copy, and their inputs."""
    model, args, kwargs = MODELS[name]()
    options = {"device": "cpu", "transfer": "copy", "activations": "recompute", **options}
    streamed = copy.deepcopy(model)
    return model, megatrain.compile(streamed, **options), args, kwargs


def test_other_shapes_compile_variants_over_the_same_weights() -> None:
    eager, compiled, _, _ = both()
    for length in (8, 5, 8, 12):
        ids = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))
        for call in (eager, compiled):
            torch.manual_seed(length)
            call(ids, targets=ids)[1].backward()
        assert compiled.traced.inputs[0].meta["spec"].shape == (2, length)
    assert_same_state(eager, compiled)
    assert len(list(compiled.megatrain._variants)) == 3


class Hands(torch.autograd.Function):
    """Gives the parameter a gradient that is somebody else's memory."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, ctx.saved_tensors[0]


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Hands.apply(x, self.weight) + self.bias


def test_gradients_never_share_memory_with_what_others_hold() -> None:
    for transfer in ("bind", "copy"):
        model = Handed()
        x, gradient = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
        megatrain.compile(model, device="cpu", transfer=transfer)(x).backward(gradient)
        for parameter in model.parameters():
            parameter.grad.zero_()
        assert (x.tolist(), gradient.tolist()) == ([1, 2, 3], [4, 5, 6])


def test_inference_mode() -> None:
    eager, compiled, args, kwargs = both(activations="offload")
    for is_inference in (True, False, True, False):
        results = []
        for call in (eager, compiled):
            torch.manual_seed(0)
            if is_inference:
                with torch.inference_mode():
                    results.append(call(args[0].clone(), **kwargs)[1])
            else:
                call.zero_grad()
                results.append(call(*args, **kwargs)[1])
                results[-1].backward()
        assert torch.equal(*results)
    assert_same_state(eager, compiled)


def test_calls_from_several_threads_take_turns() -> None:
    _, compiled, args, kwargs = both()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            compiled(*args, **kwargs)[1].backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@dataclass
class Items(OrderedDict[str, Any]):
    """A class of outputs that are fields, attributes and items; a copy is made of the fields, in their order."""

    loss: Any = None
    image: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if self.__dict__.get(field.name) is not None:
                self[field.name] = self.__dict__[field.name]

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, field.name) for field in fields(self)), *rest


class Adding(nn.Linear):
    """Adds items to a result that is made already, and takes an attribute back."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        found = Items(logits=y, hidden=(y * 2, {"deep": Items(hidden=y * 3)}))
        found["image"] = y * 4
        found.loss = y.sum()
        found.hidden[1]["deep"].logits = y * 5
        found.hidden[1]["deep"].hidden = None
        return [found]


def test_items_of_a_result_keep_their_order_and_attributes() -> None:
    shown: list[Any] = []

    def show(outputs: Any) -> Any:
        items = [(key, show(value) if isinstance(value, Items) else type(value)) for key, value in outputs.items()]
        return type(outputs), items, {name: value is None for name, value in vars(outputs).items()}

    def loss(result: Any, batch: Any) -> torch.Tensor:
        shown.append((show(result[0]), show(result[0].hidden[1]["deep"])))
        return result[0].loss

    for compiles in (False, True):
        model: Any = Adding(4, 4)
        call = megatrain.compile(model, device="cpu") if compiles else model
        for _ in range(2):
            loss(call(torch.ones(2, 4)), None)
        if compiles:
            step = megatrain.TrainStep(call, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
            for _ in range(2):
                step(torch.ones(2, 4))
    assert [key for key, _ in shown[0][0][1]] == ["logits", "hidden", "image", "loss"]
    assert shown[1:] == [shown[0]] * (len(shown) - 1)
