"""A Trainer whose model streams to a device that updates blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from megatrain.device import host_pages
from megatrain.errors import ExecuteError
from megatrain.integrations.hf import Streamed
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, SLOW_HOST
from tests.simulated_runs.test_device_updates import Block

WIDTH = 128


class Loss(nn.Sequential):
    """Blocks, and the loss of their result."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) - labels).float().square().mean()}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The same few rows in each epoch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.linspace(-1, 1, WIDTH).roll(index)
        return {"x": row, "labels": row.cos()}


class StreamedTrainer(Streamed, Trainer):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not host_pages.gives_back(), reason="the system takes no pages back")
@pytest.mark.parametrize("lacks_room", [False, True])
def test_evaluations_without_room_on_the_host_are_refused_after_the_first_update(
    sim: Simulator, lacks_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    # accelerate doesn't know this device.
    monkeypatch.setattr(TrainingArguments, "device", property(lambda _: torch.device(DEVICE)))
    arguments: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 3, "use_cpu": True, "report_to": "none"}
    trainer = StreamedTrainer(
        Loss(*[Block(WIDTH) for _ in range(4)]),
        TrainingArguments(eval_strategy="steps", eval_steps=2, save_strategy="no", **arguments),
        train_dataset=Rows(), eval_dataset=Rows(), megatrain_memory="30MiB",
        megatrain_hardware=SLOW_HOST, megatrain_precision="bf16",
    )  # fmt: skip
    if lacks_room:
        monkeypatch.setattr("megatrain.integrations.hf.one_step.available_bytes", lambda: 1000)
        with pytest.raises(ExecuteError, match=r'(?s)evaluations during this training need .* Set eval_strategy="no"'):
            trainer.train()
        assert trainer.state.global_step == 0
    else:
        trainer.train()
        assert [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    step = trainer.train_step
    assert step is not None
    assert step.schedule.device_updates
    assert step.host_plan.there_bytes == 12 * sum(p.numel() for p in trainer.model.parameters())
