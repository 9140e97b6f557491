"""`vmap` over tensors without gradients is one call of the graph; with weights in it, its module is opaque."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import megatrain
from tests.comparing import assert_same_state


class Doubled(TorchFunctionMode):
    """A mode of the user's own that changes what a mapped function computes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.cos else result


class Masked(nn.Module):
    """Makes a mask as masking functions do: nested maps over positions, whose closures hold inputs and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, groups):
        limit = torch.tensor(2)
        own = groups * 2

        def allowed(i, j):
            return (own[i] == own[j]) | (i - j >= limit)

        positions = torch.arange(x.shape[0])
        mask = torch.vmap(torch.vmap(allowed, in_dims=(None, 0)), in_dims=(0, None))(positions, positions)
        with Doubled():
            phase = torch.vmap(lambda p: p.to(x.dtype).cos() + x.detach()[0, 0])(positions)
        for layer in self.layers:
            x = layer(mask.to(x.dtype) @ x + phase[:, None])
        return x


def assert_steps_equal(eager: nn.Module, *inputs: tuple[torch.Tensor, ...]) -> megatrain.CompiledModule:
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu", activations="recompute", transfer="copy")
    for args in inputs:
        expected, found = eager(*args), compiled(*args)
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
        assert_same_state(eager, compiled)
    return compiled


def test_a_map_over_positions_is_one_call() -> None:
    steps = [(torch.randn(5, 4), torch.tensor(groups)) for groups in ([0, 0, 1, 1, 1], [0, 1, 1, 0, 2])]
    compiled = assert_steps_equal(Masked(), *steps)
    assert str(compiled.traced).count("vmap(") == 2
    assert not compiled.program.opaque_calls
    assert len(compiled.program.blocks) == 3
    assert len(list(compiled.megatrain._variants)) == 1
