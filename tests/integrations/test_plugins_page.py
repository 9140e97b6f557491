"""The code of docs/plugins.md in LLaMA-Factory's own trainer. Needs a checkout of it on the path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, llama
from tests.integrations.words import tokenizer

NEEDS = "needs a checkout of LLaMA-Factory: PYTHONPATH=LLaMA-Factory/src"
pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()


class Steps:
    """Two micro-batches in each of three steps."""

    num_micro_batch = 2

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {}

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        rows = [{**row, "loss_weights": (row["labels"] != -100).float()} for row in RAGGED]
        batches = [{key: value[None] for key, value in row.items()} for row in rows]
        yield from (batches[at : at + 2] for at in (0, 2, 4))


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"save_steps": 2}])
def test_llama_factorys_trainer_has_the_stock_runs_bits(options: dict[str, Any], tmp_path: Path) -> None:
    trainers: Any = pytest.importorskip("llamafactory.v1.trainers.sft_trainer", reason=NEEDS)
    arguments: Any = pytest.importorskip("llamafactory.v1.config.training_args")
    interface: Any = pytest.importorskip("llamafactory.v1.accelerator.interface")
    callbacks: Any = pytest.importorskip("llamafactory.v1.utils.callbacks")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(code, "plugins.md", "exec"), {"__name__": "plugins"})
    log: list[Any] = []

    class Notes(callbacks.TrainerCallback):
        def on_log(self, args: Any, state: Any, logs: Any, **_: Any) -> None:
            log.append(dict(logs))

    class Trainer(trainers.SFTTrainer):
        def _create_batch_generator(self) -> None:
            self.train_batch_generator = Steps()

    found: list[Any] = []
    recording = megatrain.Recording()
    streamed = {"name": "megatrain", "memory": "300KiB", "device": "cpu", "transfer": "copy", "recording": recording}
    for backend in (None, streamed):
        log.clear()
        folder = tmp_path / str(backend is None)
        given = {"max_steps": 3, "learning_rate": 1e-2, "bf16": False, "logging_steps": 1, "output_dir": str(folder)}
        args = arguments.TrainingArguments(
            **given, dist_config=None if backend is None else {"name": "megatrain"}, **options
        )
        if backend is not None:
            args.dist_config.update(backend)
        interface.DistributedInterface(args)
        words = SimpleNamespace(processor=tokenizer())
        trainer = Trainer(args=args, model=llama(), renderer=words, train_dataset=None, callbacks=[Notes()])
        trainer.fit()
        trainer.save_model()
        folders = [folder, *sorted(folder.glob("checkpoint-*/model"))]
        found.append((list(log), [dict(LlamaForCausalLM.from_pretrained(each).state_dict()) for each in folders]))
    assert len(found[0][0]) == 3
    assert_same(found[1], found[0])
    assert (
        sum(entry.stream == "compute" for entry in recording.issued) >= 3 * 2 * 5 * 2
    )  # forwards and backwards of five blocks
