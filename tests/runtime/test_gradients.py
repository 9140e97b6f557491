"""Gradients of plain calls land where they stay: page-locked, summed in place, never over one that the user keeps."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import HOST
from megatrain.device.bus import Bus
from megatrain.passes.pipeline import lower
from megatrain.runtime.gradients import GradientBuffer
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.trace import trace
from tests.extending.test_device import Toy
from tests.gradients import grad_of
from tests.models import MODELS
from tests.runtime.parity import assert_same, train
from tests.runtime.strict_toy import StrictToy


def made() -> tuple[nn.Module, nn.Module, Any, StrictToy]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    toy = StrictToy()
    return model, copy.deepcopy(model), megatrain.compile(model, device=toy, block_bytes="1KiB"), toy


def test_gradients_stay_where_they_land_and_the_memory_is_used_anew():
    model, _, compiled, toy = made()
    parameters = list(model.parameters())
    compiled(torch.ones(2, 16)).sum().backward()
    places = [grad_of(p).data_ptr() for p in parameters]
    assert all(toy.is_within(grad_of(p)) for p in parameters)
    assert [grad_of(p).untyped_storage().nbytes() for p in parameters] == [p.nbytes for p in parameters]
    assert not any(grad_of(p)._is_view() for p in parameters)
    file = io.BytesIO()
    torch.save(grad_of(parameters[1]), file)
    assert file.tell() < 4096, "not the gradients of all"
    num_locks = toy.num_locks
    for _ in range(3):
        model.zero_grad()
        compiled(torch.ones(2, 16)).sum().backward()
        assert [grad_of(p).data_ptr() for p in parameters] == places
    assert toy.num_locks == num_locks
    assert compiled.megatrain.engine.gradients.nbytes == sum(p.nbytes for p in parameters), "without a slab"


def test_a_gradient_that_is_only_added_is_not_copied_first(monkeypatch: pytest.MonkeyPatch):
    receive, kept = GradientBuffer.receive, list[bool]()

    def receiving(self: GradientBuffer, block: int, keys: Any, *rest: Any) -> None:
        kept.extend(map(self._keeps, keys))
        receive(self, block, keys, *rest)

    monkeypatch.setattr(GradientBuffer, "receive", receiving)
    model, _, compiled, _ = made()
    for is_first in (True, False):
        kept.clear()
        compiled(torch.ones(2, 16)).sum().backward()
        assert kept == [is_first] * len(list(model.parameters()))


class Whims:
    """A user who keeps, drops, zeroes and replaces gradients of two equal models at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def act(self, mine: torch.Tensor, other: torch.Tensor) -> None:
        if mine.grad is None or other.grad is None:
            return
        action = self.draw.choice(["keep", "keep a part", "drop", "drop", "zero", "add", "replace"])
        if action == "keep":
            self.kept.append((mine.grad, other.grad))
        elif action == "keep a part":
            self.kept.append((mine.grad.flatten()[:1], other.grad.flatten()[:1]))
        if action in ("keep", "keep a part", "drop"):
            mine.grad = other.grad = None
        elif action == "zero":
            mine.grad.zero_()
            other.grad.zero_()
        elif action == "replace":
            mine.grad, other.grad = torch.ones_like(mine), torch.ones_like(other)


@pytest.mark.parametrize(("name", "seed"), [("tied_blocks", 0), ("mixture_of_experts", 1)])
def test_whatever_the_user_does_with_gradients_they_are_those_of_eager(name: str, seed: int):
    model, args, kwargs = MODELS[name]()
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, device=StrictToy(), activations="recompute")
    pairs = [pair for pair in zip(model.parameters(), eager.parameters(), strict=True) if pair[0].requires_grad]
    whims = Whims(seed)
    for p in (p for pair in pairs[::5] for p in pair):
        p.register_hook(lambda grad: grad * 2)
    for _ in range(6):
        for pair in pairs:
            whims.act(*pair)
        assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
        assert all(torch.equal(mine, other) for mine, other in whims.kept)


class Transposing(nn.Module):
    """The gradient of `w` comes transposed."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 2, width, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oxi->bxo", x, self.w).sum()


class Watching(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self.strides.append((source.stride(), out.stride()))
        return super().copy(out, source)


def test_gradients_leave_with_the_strides_of_their_parameters():
    model, toy, x = Transposing(), Watching(), torch.randn(5, 3)
    eager = copy.deepcopy(model)
    eager(x).backward()
    (own,) = torch.autograd.grad(eager(x), [eager.w])
    assert own.stride() != eager.w.stride(), "this model tests something"
    megatrain.compile(model, device=toy)(x).backward()
    assert model.w.grad is not None
    assert eager.w.grad is not None
    assert torch.equal(model.w.grad, eager.w.grad)
    assert all(source == out for source, out in toy.strides)
    assert (6, 3, 1) in [source for source, _ in toy.strides]


def test_the_workspace_counts_the_copy():
    model = Transposing(width=1000)
    program = lower(trace(model, (torch.randn(1, 1000),)))
    (template,) = program.templates.values()
    assert template.cost is not None
    assert template.cost.backward_workspace_bytes >= model.w.nbytes


class Taker:
    """Takes whole gradients, and refuses the first ones."""

    def __init__(self, refusals: int = 0):
        self.refusals = refusals
        self.taken: list[tuple[str, torch.Tensor]] = []

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise RuntimeError("a hook fails")
        self.taken.append((key, gradient))


# Where gradients land; those without are adopted where they are.
COPIED = Bytes(0, 64)


def buffer(take: Any) -> GradientBuffer:
    made = GradientBuffer(lambda _: nn.Parameter(torch.zeros(3)), Bus(HOST))
    made.begin(take)
    return made


def test_a_block_that_comes_again_is_not_added_again() -> None:
    take = Taker(refusals=2)
    sums = buffer(take)
    sums.receive(1, ["tied", "other"], [(torch.ones(3), False), (torch.full((3,), 5.0), False)], [], COPIED)
    last = ([(torch.full((3,), 2.0), False), (torch.ones(3), False)], ["tied", "other"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a hook fails"):
            sums.receive(0, ["tied", "other"], *last, COPIED)
    sums.receive(0, ["tied", "other"], *last, COPIED)
    sums.receive(0, ["tied", "other"], *last, COPIED)  # and what was taken isn't taken again
    assert [(key, gradient.tolist()) for key, gradient in take.taken] == [("tied", [3.0] * 3), ("other", [6.0] * 3)]


def test_a_sum_takes_the_memory_of_its_first_term_and_leaves_what_others_hold() -> None:
    take = Taker()
    sums = buffer(take)
    own, shared, added = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 4.0)
    sums.receive(1, ["own", "shared"], [(own, False), (shared, True)], [], None)
    sums.receive(0, ["own", "shared"], [(added, True), (added, True)], ["own", "shared"], None)
    (_, total), (_, other) = take.taken
    assert total.data_ptr() == own.data_ptr()
    assert (total.tolist(), other.tolist()) == ([5.0] * 3, [6.0] * 3)
    assert (shared.tolist(), added.tolist()) == ([2.0] * 3, [4.0] * 3)
