"""Random models under random callers: calls, and backwards of parts of them, in any order and any number."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, largest
from tests.draws import draws
from tests.runtime.parity import PATHS
from tests.strategies import WIDTH, block_limits, has_shared_modules, module_trees


class Both(nn.Module):
    """Returns a tree's result and what it is computed from."""

    def __init__(self, tree: nn.Module):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.tree = tree

    def forward(self, x):
        middle = torch.tanh(self.before(x))
        return self.tree(middle * 1), middle


# Which call (the latest is 0), which of its outputs, and whether gradients go to `.grad`, or to the caller.
backwards = st.tuples(st.integers(0, 2), st.sampled_from(("first", "second", "both")), st.booleans())
actions = st.lists(st.sampled_from(("call", "call without grad")) | backwards, min_size=1, max_size=6)


@dataclass
class Caller:
    """Does the same to a model, eager or compiled."""

    model: nn.Module
    calls: list[Any] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)

    def run(self, call, plan) -> None:
        torch.manual_seed(7)
        self.call(call)
        for action in plan:
            if action == "call":
                self.call(call)
            elif action == "call without grad":
                with torch.no_grad():
                    self.found += [t.clone() for t in call(torch.ones(3, WIDTH))]
            else:
                self.differentiate(*action)
        self.found.append(torch.get_rng_state())

    def call(self, call) -> None:
        x = torch.randn(3, WIDTH).requires_grad_()
        self.calls.append((x, call(x)))
        self.found += [t.detach().clone() for t in self.calls[-1][1]]

    def differentiate(self, which: int, outputs: str, is_accumulated: bool) -> None:
        x, (result, middle) = self.calls[max(0, len(self.calls) - 1 - which)]
        chosen = {"first": [result], "second": [middle], "both": [result, middle]}[outputs]
        loss = torch.stack([t.square().mean() for t in chosen]).sum()
        if not loss.requires_grad:
            return
        if is_accumulated:
            loss.backward(retain_graph=True)
            return
        leaves = [x, *(p for p in self.model.parameters() if p.requires_grad)]
        self.found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)

    def state(self) -> dict[str, torch.Tensor | None]:
        found = {name: buffer for name, buffer in self.model.named_buffers()}
        found |= {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return found | {f"input {i}": x.grad for i, (x, _) in enumerate(self.calls)}


@draws(25, usual=5)
@given(
    tree=module_trees(),
    plan=actions,
    mode=st.sampled_from(list(PATHS)),
    limit=block_limits(),
    seed=st.integers(0, 2**16),
)
def test_random_callers(tree: nn.Module, plan, mode: str, limit: int | None, seed: int) -> None:
    """Under random delays on every stream, and with NaN in freed slots."""
    model = Both(tree)
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    options: dict[str, Any] = PATHS[mode] | ({} if limit is None else {"block_bytes": max(1, limit)})
    chaos = Chaos(seed=seed, max_delay_s=0.0005)
    compiled = megatrain.compile(streamed, device="cpu", chaos=chaos, **options)
    left, right = Caller(eager), Caller(streamed)
    try:
        left.run(eager, plan)
    except RuntimeError as error:  # two in-place calls one after the other may undo what a backward needs
        assume("inplace operation" not in str(error))
        raise
    right.run(compiled, plan)
    # A parameter used several times in one block and in another sums in another order.
    tolerance = 20 * 2**-24 if has_shared_modules(model) else 0.0
    expected, found = ([*side.found, side.state()] for side in (left, right))
    floating = [t for t in left.found if t is not None and t.is_floating_point()]
    scale = max(largest(floating), largest(expected[-1]))
    assert_same(expected, found, "what a caller found", tolerance, scale=scale)
