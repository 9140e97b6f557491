"""Custom autograd Functions: whichever way a model calls one, its own backward is what trains."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import LowerError
from megatrain.tracer.recording.tape import Tape
from megatrain.tracer.trace import trace
from tests.tracer.parity import assert_same_step, eager_step, graph_step


class Scaled(torch.autograd.Function):
    """A gradient that isn't the forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.scale + x, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


class Returned(torch.autograd.Function):
    """Gives its input back, and halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / 2


class Several(torch.autograd.Function):
    """Two results, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        rounded, double = x.round(), x * 2
        ctx.mark_non_differentiable(rounded)
        return double, rounded, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Marked(torch.autograd.Function):
    """Marks a result where its forward is over."""

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x * 2, x.round(), x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 5


class OwnApply(torch.autograd.Function):
    """Calls torch's `apply` from one of its own."""

    forward = staticmethod(Scaled.forward)
    backward = staticmethod(Scaled.backward)  # pyright: ignore[reportAssignmentType]

    @classmethod
    def apply(cls, x: torch.Tensor) -> Any:
        return super().apply(x, 0.25)


class Outer(torch.autograd.Function):
    """A Function whose forward calls another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, 1.0) + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 7


early_scaled, early_setup = Scaled.apply, WithSetup.apply
early_returned, early_written, early_marked = Returned.apply, Written.apply, Marked.apply


def _several(function: Any, x: torch.Tensor) -> torch.Tensor:
    double, rounded, index = function(x)
    return double + rounded + index.unsqueeze(-1)


CALLS: dict[str, Any] = {
    "late": lambda x: Scaled.apply(x, 0.5),
    "late, setup": lambda x: WithSetup.apply(x, 3.0),
    "late, several": lambda x: _several(Several.apply, x),
    "late, outer": lambda x: Outer.apply(x),
    "own apply": lambda x: OwnApply.apply(x),
    "early": lambda x: early_scaled(x, 0.5),
    "early, default": lambda x: early_setup(x),
    "early, returned": lambda x: early_returned(x),
    "early, marked": lambda x: _several(early_marked, x),
    "early, written": lambda x: early_written(x * 1.5),
    "forward itself": lambda x: WithSetup.forward(x) + 1,
}

if torch.__version__ >= "2.13":  # before, `apply` took no keyword arguments
    CALLS["early, keyword"] = lambda x: early_setup(x, scale=3.0)


class Calling(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self._call = call

    def forward(self, x):
        with torch.no_grad():
            offset = self._call(self.inner(x))
        return self.head(self._call(self.inner(x))) + offset.mean()


@pytest.mark.parametrize("name", CALLS)
def test_a_function_trains_with_its_own_backward(name: str):
    torch.manual_seed(0)
    model, args = Calling(CALLS[name]), (torch.randn(2, 3),)
    traced = trace(model, args)
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))
    is_opaque = name == "early, marked"  # it marks a result where its forward is over
    assert ("opaque" in str(traced)) == is_opaque
    assert str(traced).count(".apply(") == (0 if is_opaque or name == "forward itself" else 2), "a call is one node"


class Layered(nn.Module):
    """Calls a Function in the middle of an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Calling(CALLS["late"]), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.inner(x)).relu()


def test_a_function_whose_call_goes_by_unseen_is_an_obstacle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatrain.tracer.recording.sandbox.recorded_functions", lambda recorder: nullcontext())
    torch.manual_seed(0)
    model, args = Layered(), (torch.randn(2, 3),)
    traced = trace(model, args)
    assert "opaque inner(" in str(traced)
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))


def test_a_graph_that_lost_the_history_of_a_function_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Forgetting(Tape):
        def append(self, func: Any, *args: Any) -> Any:
            node = super().append(func, *args)
            if getattr(func, "__name__", "") == "apply":
                list(self.graph.nodes)[-1].meta["grad"] = False
            return node

    monkeypatch.setattr("megatrain.tracer.recording.runner.Tape", Forgetting)
    with pytest.raises(LowerError, match="has no gradient in the program, but has one in the model") as caught:
        megatrain.lower(megatrain.trace(Layered(), (torch.randn(2, 3),)))
    assert "test_functions.py" in str(caught.value)
