"""Prepared updates: what a step reads is compared with what it was, so that every edit between steps has its effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.fast.adamw import native_reason
from megatrain.optim.masters.registry import Masters
from megatrain.optim.proxy import is_same

pytestmark = pytest.mark.skipif(native_reason() is not None, reason="only the native kernel is prepared")


class Side:
    """A model whose blocks are updated, with given gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        for p in self.model.parameters():
            p.data = (torch.randn(p.shape, generator=generator) * 0.1).to(dtype)
        self.parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": self.parameters[:3]},
            {"params": self.parameters[3:], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        self.held: torch.Tensor | None = None
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.latest: dict[torch.Tensor, torch.Tensor] = {}
        self.code = MasterStep(Masters(self.model, "exact"), gradient_of=self.gradients.get)
        self.blocks = BlockOptimizer(self.optimizer, [self.parameters[:2], self.parameters[2:]], code=self.code)

    def step(self, number: int, edit: Callable[[Side], None] | None = None) -> None:
        """Takes a step, after an edit."""
        generator = torch.Generator().manual_seed(number)
        self.latest = dict(self.gradients)
        self.gradients.update({p: torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters})
        self.code.scale = 0.5 + number / 8
        if edit is not None:
            edit(self)
        self.blocks.begin()
        for block in range(2):
            self.blocks.update(block, self.gradients)
        self.blocks.finish()

    def found(self) -> list[Any]:
        """What the steps left."""
        masters = self.code._masters
        lows = [getattr(masters.get(p), "low", None) for p in self.parameters]
        return [self.parameters, lows, [dict(self.optimizer.state[p]) for p in self.parameters]]


def _writes(side: Side) -> None:
    with torch.no_grad():
        side.parameters[0].mul_(1.5)


def _moves(side: Side) -> None:
    side.parameters[2].data = side.parameters[2].data.clone() + 1


def _replaces_moment(side: Side) -> None:
    state = side.optimizer.state[side.parameters[0]]
    side.held = state["exp_avg"]  # so that its memory stays as it is
    state["exp_avg"] = state["exp_avg"] * 2


def _replaces_memory_of_moment(side: Side) -> None:
    state = side.optimizer.state[side.parameters[2]]
    state["exp_avg_sq"].data = state["exp_avg_sq"] * 2


def _loads(side: Side) -> None:
    state = copy.deepcopy(side.optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.2
    side.optimizer.load_state_dict(state)
    for p in side.parameters:
        for name, tensor in side.optimizer.state[p].items():
            side.optimizer.state[p][name] = tensor.float()


def _clears(side: Side) -> None:
    side.optimizer.state.clear()


def _freezes(side: Side) -> None:
    side.parameters[0].requires_grad_(False)
    del side.gradients[side.parameters[0]]


def _other_dtype(side: Side) -> None:
    other = torch.float32 if side.parameters[0].dtype == torch.bfloat16 else torch.bfloat16
    side.gradients[side.parameters[2]] = side.gradients[side.parameters[2]].to(other)


def _other_strides(side: Side) -> None:
    gradient = side.gradients[side.parameters[0]]
    side.gradients[side.parameters[0]] = gradient.t().contiguous().t()


def _other_strides_of_the_latest_tensors(side: Side) -> None:
    for p in side.parameters[:2]:
        side.latest[p].data = side.gradients[p].t().contiguous().t()
        side.gradients[p] = side.latest[p]


def _sets_options(side: Side) -> None:
    side.optimizer.param_groups[0]["maximize"] = True
    side.optimizer.param_groups[1]["lr"] = torch.tensor(0.3)


def _counts(side: Side) -> None:
    side.optimizer.state[side.parameters[0]]["step"].data.fill_(9.0)  # which no version counts


def _regroups(side: Side) -> None:
    groups = side.optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop(0))


PREPARED_ANEW = [
    _writes, _moves, _replaces_moment, _replaces_memory_of_moment, _loads, _clears, _freezes, _other_dtype,
    _other_strides, _other_strides_of_the_latest_tensors,
]  # fmt: skip
STILL_PREPARED = [_sets_options, _counts, _regroups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("edit", [*PREPARED_ANEW, *STILL_PREPARED, None], ids=lambda e: e and e.__name__.strip("_"))
def test_prepared_updates_leave_what_updates_made_anew_leave(
    edit: Callable[[Side], None] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    ran: list[bool] = []
    own = MasterStep.run

    def run(self: MasterStep, *args: Any) -> bool:
        ran.append(own(self, *args))
        return ran[-1]

    monkeypatch.setattr(MasterStep, "run", run)
    prepared = Side(dtype)
    for number in range(2):
        prepared.step(number)
    assert ran == [True, True], "of the second step"
    prepared.step(2, edit)
    assert all(ran) == (edit not in PREPARED_ANEW)
    for number in (3, 4):
        prepared.step(number)
    assert ran[-2:] == [True, True], "prepared again"
    monkeypatch.setattr(MasterStep, "run", lambda *_: False)
    anew = Side(dtype)
    for number in range(5):
        anew.step(number, edit if number == 2 else None)
    assert is_same(prepared.found(), anew.found(), depth=8)
