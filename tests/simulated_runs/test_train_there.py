"""`megatrain train` on a device, in a machine whose memory has no room for the frozen weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from megatrain.planning import host_plan
from megatrain.tools.finetune.run_record import NAME
from tests.comparing import assert_same
from tests.finetune.commands import data, log_of, save_model, train, weights_of
from tests.runtime.in_files import HAS_MAPS
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE

OPTIONS = (
    *("--precision=bf16", "--length=16", "--batch=2", "--accumulate=2", "--lr=1e-2", "--seed=7", "--save-every=2"),
    *("--lora-rank=2", "--lora-dropout=0.1", f"--device={DEVICE}"),
)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_MAPS, reason="this system has no private maps of files, or doesn't list them")
def test_adapters_train_with_the_bits_of_weights_in_memory(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Also where the second half of the steps is a training that goes on."""
    # accelerate doesn't know this device.
    usual: Any = TrainingArguments.device
    monkeypatch.setattr(TrainingArguments, "device", property(lambda a: usual.fget(a) and torch.device(DEVICE)))
    folder, rows = (
        save_model(tmp_path / "model", hidden_size=64, intermediate_size=1024, num_hidden_layers=8),
        data(tmp_path, "text", 40),
    )
    assert train(folder, rows, "--out", tmp_path / "usual", "--steps=4", *OPTIONS) == 0
    assert "in files" not in capsys.readouterr().out
    monkeypatch.setattr(host_plan, "available_now", lambda: 3_000_000)
    assert train(folder, rows, "--out", tmp_path / "filed", "--steps=4", *OPTIONS) == 0
    assert "of frozen weights, in no row" in capsys.readouterr().out
    assert log_of(tmp_path / "filed") == log_of(tmp_path / "usual")
    assert_same(weights_of(tmp_path / "filed"), weights_of(tmp_path / "usual"))
    # As a kill after the first checkpoint leaves it.
    shutil.rmtree(tmp_path / "filed" / "checkpoint-4")
    (tmp_path / "filed" / "adapter_model.safetensors").unlink()
    record = tmp_path / "filed" / NAME
    record.write_text(record.read_text().replace('"is_finished": true', '"is_finished": false'))
    assert train(folder, rows, "--out", tmp_path / "filed", "--steps=4", *OPTIONS) == 0
    assert "resume  step 2 of 4" in capsys.readouterr().out
    assert log_of(tmp_path / "filed") == log_of(tmp_path / "usual")
    assert_same(weights_of(tmp_path / "filed"), weights_of(tmp_path / "usual"))
