"""Compiled models inside ordinary autograd code: what comes out, what callers do with it, what surrounds the call."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megatrain
from megatrain.errors import ExecuteError
from tests.comparing import assert_same_state
from tests.runtime.parity import assert_parity_of, moved, paths, seeded
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


# -- what comes out ------------------------------------------------------------------------------------------


@moved
@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_kind_of_output(options, requires_grad: bool) -> None:
    def drive(call, model):
        x = batch(requires_grad=requires_grad)
        out = call(x)
        loss = (out["result"] * out["again"]).sum() + (out["input"] * 2).sum() + out["input view"].square().sum()
        loss = loss + out["parameter"].square().sum() + out["parameter view"].sum() * 3
        loss = loss + out["nested"][0].loss + out["nested"][0].parts["flat"].square().sum() + out["nested"][1][0].sum()
        loss.backward()
        assert (out["none"], out["number"], out["nested"][2]) == (None, 3, "text")
        return out, x.grad

    assert_parity_of(seeded(Outputs), drive, **options)


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


@paths
def test_inference_mode_and_no_grad(options) -> None:
    def drive(call, model):
        found = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = call(batch())
            found.append([out[k] for k in ("result", "input view", "detached", "indices", "count")])
        call(batch())["result"].sum().backward()
        return found

    assert_parity_of(seeded(Outputs), drive, **options)


# -- what callers do with it ---------------------------------------------------------------------------------


@moved
def test_writing_into_an_output_with_autograd_looking(options) -> None:
    def drive(call, model):
        y = call(batch())
        y += 1
        y.mul_(2)
        y.square().sum().backward()
        return y

    assert_parity_of(seeded(Headed), drive, **options)


@paths
def test_writing_into_an_output_behind_its_back(options) -> None:
    def drive(call, model):
        y = call(batch())
        loss = y.sum()
        with torch.no_grad():
            y.zero_()
        loss.backward()

    assert_parity_of(seeded(Headed), drive, **options)


@moved
@pytest.mark.parametrize("model", [Plain, Aliased, Traced])
def test_writing_where_it_would_matter_is_refused_or_right(options, model) -> None:
    """A result that autograd saved, one with a second name, one that the next block reads."""
    eager, compiled = seeded(model), megatrain.compile(seeded(model), device="cpu", **options)
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


@moved
def test_hooks_on_outputs_and_inputs(options) -> None:
    def drive(call, model):
        x = batch(requires_grad=True)
        x.register_hook(lambda g: g * 3)
        left, right, _ = call(x)
        left.register_hook(lambda g: g * 2)
        left.retain_grad()
        (left.square().sum() + right.sum()).backward()
        return x.grad, left.grad

    assert_parity_of(seeded(Trunk), drive, **options)


@paths
def test_input_gradients_accumulate(options) -> None:
    def drive(call, model):
        x = batch(requires_grad=True)
        call(x)[0].sum().backward()
        call(x)[1].square().sum().backward()
        inner = torch.sin(x)
        inner.retain_grad()
        call(inner)[0].sum().backward()
        return x.grad, inner.grad

    assert_parity_of(seeded(Trunk), drive, **options)


def test_one_tensor_as_two_inputs() -> None:
    class Two(Plain):
        def forward(self, x, y):
            return super().forward(x) + y

    def drive(call, model):
        x = batch(requires_grad=True)
        call(x, x).square().sum().backward()
        call(x[:2], x[1:3]).square().sum().backward()
        return x.grad

    assert_parity_of(seeded(Two), drive)


@moved
def test_two_compiled_models_in_a_chain(options) -> None:
    models = [seeded(Plain), seeded(Trunk)]
    copies = [megatrain.compile(copy.deepcopy(m), device="cpu", **options) for m in models]
    for first, second in (models, copies):
        torch.manual_seed(0)
        hidden = first(batch())
        second(hidden)[0].sum().backward(retain_graph=True)
        second(first(batch(3)))[1].square().sum().backward()
    for model, streamed in zip(models, copies, strict=True):
        assert_same_state(model, streamed)


# -- what changes between forward and backward ---------------------------------------------------------------


@pytest.mark.parametrize("change", ["frozen", "buffer", "data", "assign", "statistics"])
def test_other_weights_at_the_backward_are_refused(change: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    compiled = megatrain.compile(model.eval(), device="cpu")
    loss = compiled(batch()).square().sum()
    with torch.no_grad():
        if change == "frozen":
            model[2].weight.mul_(2)
        elif change == "buffer":
            model[1].running_mean.add_(1)
        elif change == "data":
            model[0].weight.data = model[0].weight.data * 2
            compiled(batch())
        elif change == "assign":
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
            compiled(batch())
        else:
            compiled.train()(batch())
    with pytest.raises(ExecuteError, match=r"(parameter|buffer) `.*` was modified between forward and backward"):
        loss.backward()
    compiled(batch()).sum().backward()


def test_assigned_weights_reach_a_variant_compiled_afterwards() -> None:
    eager, compiled = seeded(Plain), megatrain.compile(seeded(Plain), device="cpu")
    compiled(batch())
    for model in (eager, compiled):
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
    assert torch.equal(eager(batch(3)), compiled(batch(3)))


def test_new_memory_that_no_call_has_taken_in_yet() -> None:
    """As in eager, the backward uses the weights that the forward saw."""

    def drive(call, model):
        loss = call(batch()).square().sum()
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        loss.backward()
        call(batch()).sum().backward()

    assert_parity_of(seeded(Headed), drive)


@paths
def test_a_forward_that_spoils_its_own_graph_is_refused(options) -> None:
    class Spoils(Plain):
        def forward(self, x):
            y = super().forward(x)
            total = y.sum()
            y.mul_(2)
            return total

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seeded(Spoils)(batch()).backward()
    compiled = megatrain.compile(seeded(Spoils), device="cpu", **options)
    with pytest.raises(ExecuteError, match="modified in place by the model's own forward"):
        compiled(batch()).backward()


@moved
def test_hooks_around_the_backward_see_nothing_that_a_recomputation_saves(options) -> None:
    seen: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    loss = megatrain.compile(seeded(Plain), device="cpu", **options)(batch()).sum()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss.backward()
    assert seen == []


@paths
def test_hooks_around_the_backward_hide_no_spoiled_graph(options) -> None:
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x).tanh()
            doubled = y * 2
            return doubled + y.mul_(3).detach()

    model = nn.Sequential(Layer(6, 6), Layer(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))  # the last may keep its graph
    loss = megatrain.compile(model, device="cpu", **options)(torch.ones(2, 6)).sum()
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with identity, pytest.raises(ExecuteError, match="modified in place by the model's own forward"):
        loss.backward()


# -- what surrounds the call ---------------------------------------------------------------------------------


@moved
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around(options, use_reentrant: bool) -> None:
    def drive(call, model):
        def run(x):
            return torch.tanh(call(x * 2)[0]).square() * x[:, :2]

        x = batch(requires_grad=True)
        for _ in range(2):
            checkpoint(run, x, use_reentrant=use_reentrant).sum().backward()
        return x.grad

    assert_parity_of(seeded(Trunk), drive, **options)


def test_saved_tensors_moved_by_the_caller() -> None:
    def drive(call, model):
        with torch.autograd.graph.save_on_cpu():
            out = call(batch())[0].square()
        out.sum().backward()

    assert_parity_of(seeded(Trunk), drive)


@moved
def test_autocast_around_the_forward_alone(options) -> None:
    def drive(call, model):
        with torch.autocast("cpu", torch.bfloat16):
            left, right, _ = call(batch())
        (left.float().sum() + right.float().square().sum()).backward(retain_graph=True)
        left.float().sum().backward()
        return left, right

    assert_parity_of(seeded(Trunk), drive, **options)


@paths
def test_scaled_losses(options) -> None:
    def drive(call, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for step in range(3):
            optimizer.zero_grad()
            left, right, _ = call(batch())
            loss = left.square().sum() + right.sum()
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return torch.tensor(scaler.get_scale())

    assert_parity_of(seeded(Trunk), drive, **options)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode() -> None:
    def drive(call, model):
        with torch.autograd.set_detect_anomaly(True):
            call(batch())[0].sum().backward()

    assert_parity_of(seeded(Trunk), drive)
    compiled = megatrain.compile(seeded(Plain), device="cpu")
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
        (compiled(batch()) * float("nan")).sum().backward()


def test_forward_and_backward_on_different_threads() -> None:
    def drive(call, model):
        losses = [call(batch(rows))[0].square().sum() for rows in (5, 3)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

    assert_parity_of(seeded(Trunk), drive)
