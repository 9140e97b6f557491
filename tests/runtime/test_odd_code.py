"""Code with a catch: wrong rules of operators, random numbers that torch doesn't show, and `torch.compile` inside."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.tracer.recording import effect_watch
from tests.comparing import assert_same_state


@torch.library.custom_op("megatrain_test::halve", mutates_args=())
def halve(x: torch.Tensor, fails: str) -> torch.Tensor:
    """A kernel that works; its rule for tensors without values fails, or gives other strides."""
    return (x * 0.5).contiguous()


@halve.register_fake
def _(x: torch.Tensor, fails: str) -> torch.Tensor:
    if fails == "KeyError":
        raise KeyError("the rule is wrong")
    return torch.empty_like(x).t().contiguous().t() if fails == "strides" else torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return gradient * 0.5, None


halve.register_autograd(_backward)


class Halving(nn.Module):
    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.megatrain_test.halve(self.fc(x), self.fails).view(-1).view(x.shape).relu()


@pytest.mark.parametrize(("fails", "activations"), [("KeyError", "recompute"), ("strides", "keep")])
def test_a_rule_that_fails_where_its_kernel_works_is_no_reason_to_refuse(fails: str, activations: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Halving(fails) for _ in range(3)))
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations=activations)
    x = torch.randn(3, 4)
    for _ in range(2):
        found = [call(x) for call in (eager, compiled)]
        assert torch.equal(*found)
        for y in found:
            y.square().sum().backward()
        assert_same_state(eager, model)
    assert not compiled.program.opaque_calls


@torch.library.custom_op("tests_calls::narrow", mutates_args=())
def narrow(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 4:
        raise RuntimeError("five rows are too many")
    return x.sin()


@narrow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this kernel needs values")


narrow.register_autograd(lambda ctx, gradient: gradient)  # pyright: ignore[reportUnknownMemberType]


@pytest.fixture
def hidden_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes dropout's kernel on the CPU for one of a library with a generator of its own."""
    monkeypatch.setattr(effect_watch, "_RNNS", ("aten::native_dropout",))
    monkeypatch.setattr(effect_watch, "_has_dropout", lambda func, args: True)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x), 0.5, True)[0]
        return x.sum()


def drawing(activations: str) -> megatrain.CompiledModule:
    return megatrain.compile(Drawing(), device="cpu", transfer="copy", activations=activations)


def taken(step: megatrain.TrainStep, number: int) -> None:
    torch.manual_seed(number)
    step([torch.full((2, 4), 1.0 + number)])


@pytest.mark.usefixtures("hidden_draws")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_that_fails_before_it_has_begun_leaves_a_step_boundary(overlap: bool):
    """Undone; or completed from the graphs that are still there, where an update had begun. Never recomputed."""
    torch.manual_seed(0)
    start = Drawing().state_dict()
    sides: list[tuple[megatrain.CompiledModule, megatrain.TrainStep]] = []
    for _ in range(2):
        model = drawing("keep")
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sides.append((model, megatrain.TrainStep(model, optimizer, loss=lambda result, batch: result, overlap=overlap)))
    (model, step), (undisturbed, other) = sides
    for each in (step, other):
        taken(each, 1)
    op = next(op for op in step.schedule.ops if op.what == "B" and op.block == 1)
    model.megatrain.engine.set_chaos(Chaos(fail=f"compute:{op}", max_delay_s=0))
    with pytest.raises(RuntimeError, match="chaos made"):
        taken(step, 2)
    model.megatrain.engine.set_chaos(None)
    step.flush()
    assert step.progress.count in ((1, 2) if overlap else (1,))
    if step.progress.count == 1:
        taken(step, 2)
    taken(other, 2)
    for one, two in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(one, two)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x) * 2


def _never(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise AssertionError("torch.compile compiled something for a capture")


class Layer(nn.Module):
    """Calls a function that may be a compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.act = _gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.act(self.fc(x)))


def _wrapped(model: Any, how: str) -> Any:
    if how == "the model":
        return torch.compile(model, backend=_never)
    for layer in model:
        if how == "functions":
            layer.act = torch.compile(_gelu, backend=_never)
    return model


@pytest.mark.parametrize("how", ["the model", "functions"])
def test_what_torch_compile_wrapped_trains_as_eager(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    eager = copy.deepcopy(model)
    wrapped = _wrapped(model, how)
    compiled = megatrain.compile(wrapped, device="cpu", transfer="copy", activations="recompute")
    x = torch.randn(4, 8)
    for mode in (True, True, False, True):
        found: list[torch.Tensor] = []
        for call in (eager, compiled):
            torch.manual_seed(3)
            call.train(mode)
            with torch.compiler.set_stance("force_eager") if call is eager else nullcontext():
                found.append(call(x))
            found[-1].square().sum().backward()
        assert torch.equal(*found)
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert torch.equal(theirs.grad, ours.grad)
    assert len(compiled.program.blocks) == 3
    assert not compiled.program.opaque_calls
    assert len(list(compiled.megatrain._variants)) == 2


@pytest.mark.usefixtures("hidden_draws")
def test_a_block_that_would_be_recomputed_is_refused_ahead():
    with pytest.raises(megatrain.ExecuteError, match=r"block 0 layers\.0\S*, which is recomputed, has an RNN with dro"):
        drawing("recompute")(torch.ones(2, 4))
