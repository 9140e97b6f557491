"""step.progress_line: what a terminal shows of a loop, and that nothing else pays for it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.test_progress import Terminal


class Counted:
    """In a loss's place: counts who reads it."""

    reads = 0

    def item(self) -> float:
        Counted.reads += 1
        return 0.25


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> megatrain.TrainStep:
    monkeypatch.setattr(Counted, "reads", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    return megatrain.TrainStep(
        compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda result, _: result.mean()
    )


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, step: megatrain.TrainStep, num_steps: int) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    loss: Any = Counted()
    with step.progress_line(num_steps=num_steps, tokens_per_step=500) as line:
        for _ in range(step.progress.count, num_steps):
            step(torch.ones(4, 8))
            line.update(loss)
    return stream.getvalue()


def test_a_terminal_shows_steps_tokens_a_second_loss_and_memory(
    step: megatrain.TrainStep, monkeypatch: pytest.MonkeyPatch
):
    last = shown(monkeypatch, Terminal(), step, 4).rstrip().rpartition("\r")[2]
    assert re.search(r"100%.* 2\.00k/2\.00k \[.*tok/s, device=\d.*, loss=0\.250, step=4/4", last), last
    assert 1 <= Counted.reads <= 4


def test_a_resumed_loop_goes_on_where_it_was(step: megatrain.TrainStep, monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):
        step(torch.ones(4, 8))
    text = shown(monkeypatch, Terminal(), step, 4)
    assert "50%" in text.split("\r")[1], text
    assert "step=4/4" in text


def test_losses_are_read_only_now_and_then(step: megatrain.TrainStep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatrain.progress.time.monotonic", lambda: 1.0)
    shown(monkeypatch, Terminal(), step, 20)
    assert Counted.reads == 2  # the first and the last


def test_a_file_gets_nothing_and_no_loss_is_read(step: megatrain.TrainStep, monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, io.StringIO(), step, 3) == ""
    assert Counted.reads == 0


def test_a_wrong_number_is_refused(step: megatrain.TrainStep):
    with pytest.raises(megatrain.OptionError, match="tokens_per_step"):
        step.progress_line(num_steps=3, tokens_per_step=0)
