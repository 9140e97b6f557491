"""Models that `torch.compile` has wrapped, in whole or in part, are captured by the Python code inside."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import megatrain


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
    if how == "in place":
        model.compile(backend=_never)
    for index, layer in enumerate(model):
        if how == "layers":
            model[index] = torch.compile(layer, backend=_never)
        elif how == "layers in place":
            layer.compile(backend=_never)
        elif how == "functions":
            layer.act = torch.compile(_gelu, backend=_never)
    return model


@pytest.mark.parametrize("how", ["the model", "layers", "in place", "layers in place", "functions"])
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
