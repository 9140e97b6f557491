"""Frozen weights cost their way in and nothing else, and the backward stops where nothing needs a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatrain.errors import ScheduleError
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from tests.runtime.parity import PATHS, assert_parity_of, seeded

DEPTH = 4
WIDTH = 8


class Net(nn.Module):
    """Embedding, layers with dropout, head: blocks 0, 1 to DEPTH, DEPTH + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids, extra=None):
        x = self.embed(ids)
        x = x if extra is None else x + extra
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def net(trained: str) -> nn.Module:
    """A net in which only parameters with one of these words (a path with dots) in their names are trained."""
    model = seeded(Net)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in trained.split()))
    return model


def ids() -> torch.Tensor:
    return torch.arange(12).reshape(3, 4) % 11


def train(model: nn.Module, **options: Any) -> Schedule:
    """Two AdamW steps, compared with eager bit for bit; returns the schedule."""

    def drive(call, model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(call(ids()).square().mean())
            losses[-1].backward()
            optimizer.step()
        return [loss.detach() for loss in losses]

    compiled, _ = assert_parity_of(model, drive, **options)
    return compiled.schedule


def blocks(schedule: Schedule, what: str, stream: Stream | None = None) -> list[int]:
    return [op.block for op in schedule.ops if op.what == what and stream in (None, op.stream)]


def offloaded_bytes(schedule: Schedule) -> int:
    """Bytes that gradients take on their way to the host; parked activations aside."""
    parked = sum(
        schedule.known_workload().values[value].nbytes for values in schedule.parked().values() for value in values
    )
    return schedule.d2h_bytes - parked


def trained_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def check_round_trip(schedule: Schedule) -> None:
    schedule.check()
    assert Schedule.parse(str(schedule)) == schedule


COPY: dict[str, Any] = {"transfer": "copy", "activations": "recompute"}


def test_frozen_prefix() -> None:
    model = net("layers.2 layers.3 head")
    train(model, **PATHS["offload"])
    schedule = train(model, **COPY)
    assert blocks(schedule, "B") == [5, 4, 3]
    assert blocks(schedule, "G") == [5, 4, 3]
    assert [block for block in blocks(schedule, "W") if block < 3] == [0, 1, 2]
    assert offloaded_bytes(schedule) == trained_bytes(model)
    assert "frozen: 0-2\n" in str(schedule)
    check_round_trip(schedule)


def test_a_wrong_line_is_refused() -> None:
    schedule = train(net("layers.2 layers.3 head"), **COPY)
    for line in ("", "frozen: 0\n", "frozen: 0-2, 5\n", "frozen: 9\n", "frozen: x\n"):
        with pytest.raises(ScheduleError):
            Schedule.parse(str(schedule).replace("frozen: 0-2\n", line))
