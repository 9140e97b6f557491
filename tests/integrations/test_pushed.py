"""What a trainer pushes to a hub: the files that the stock trainer pushes, with the same tensors."""

from __future__ import annotations

import fnmatch
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, Scenario, llama, run
from tests.integrations.words import tokenizer

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
OWN = ("optimizer.pt", "scheduler.pt", "megatrain/")
"""What differs in a checkpoint: docs/trainers.md."""


class Hub:
    """Notes what is uploaded, in the place of a hub on the network."""

    def __init__(self) -> None:
        self.pushed: list[Any] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(
        self, *, folder_path: str, commit_message: str, path_in_repo: str = "", ignore_patterns: Any = (), **_: Any
    ) -> Any:
        folder = Path(folder_path)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        names = [name for name in names if not any(fnmatch.fnmatch(name, each) for each in ignore_patterns)]
        tensors = {
            name: safetensors.torch.load_file(folder / name)
            for name in names
            if name.endswith(".safetensors") and not name.startswith(OWN)
        }
        kept = [name for name in names if not name.startswith(OWN) and not name.startswith("runs/")]
        self.pushed.append((path_in_repo, commit_message, kept, tensors))
        done: Future[str] = Future()
        done.set_result("pushed")
        return done


def adapted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="gaussian"))


@pytest.mark.parametrize("strategy", ["end", "every_save", "all_checkpoints"])
@pytest.mark.parametrize("make", [llama, adapted])
def test_the_files_of_the_stock_trainer_are_pushed(
    strategy: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "push_to_hub": True, "hub_strategy": strategy, "hub_model_id": "mine", "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    pushes, recording = list[Any](), megatrain.Recording()
    for streams in (False, True):
        hub = Hub()
        monkeypatch.setattr("transformers.trainer.hf_api", lambda hub=hub: hub)
        scenario = Scenario(
            options, model=make, rows=RAGGED, more=lambda model: {"processing_class": tokenizer()},
            streaming={"transfer": "copy", "recording": recording}, after=lambda t: t.push_to_hub("the last") and None,
        )  # fmt: skip
        run(scenario, tmp_path / str(streams), streams=streams)
        pushes.append(hub.pushed)
    assert len(pushes[0]) >= (1 if strategy == "end" else 3)
    assert any("safetensors" in name for _, _, names, _ in pushes[0] for name in names)
    assert_same(pushes[1], pushes[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0
