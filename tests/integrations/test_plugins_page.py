"""The code of docs/plugins.md in LLaMA-Factory's own trainer and in verl's engine. Needs them on the path."""

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
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CODE = {name: block for name in ("llamafactory", "verl") for block in BLOCKS if f"from {name}." in block}


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
    exec(compile(CODE["llamafactory"], "plugins.md", "exec"), {"__name__": "plugins"})
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


@pytest.mark.parametrize("is_mixed", [False, True])
def test_verls_engine_has_the_plain_models_bits(is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer, clipping and update around this test's own loss; nothing of its processes."""
    pytest.importorskip("verl.workers.engine.fsdp.transformer_impl", reason="needs verl")
    config: Any = pytest.importorskip("verl.workers.config")
    base: Any = pytest.importorskip("verl.workers.engine.base")
    monkeypatch.setattr(base.EngineRegistry, "_engines", {})  # a name is registered once in a process
    names: dict[str, Any] = {"__name__": "plugins"}
    # In a budget of the page's size nothing of a model this small would have to stream.
    exec(compile(CODE["verl"].replace('memory="20GiB"', "**options"), "plugins.md", "exec", dont_inherit=True), names)
    recording = megatrain.Recording()
    names["options"] = {"memory": "300KiB", "device": "cpu", "transfer": "copy", "recording": recording}
    assert names["MegatrainConfig"]().strategy == "megatrain"
    kind = base.EngineRegistry.get_engine_cls("language_model", "megatrain")
    assert kind is names["Megatrain"]
    found: list[Any] = []
    for streams in (False, True):
        model = llama()
        engine = object.__new__(kind)  # its __init__ needs verl's process groups
        engine._is_lora = engine._qat_enabled = False
        engine.scaler, engine.get_data_parallel_size = None, lambda: 1
        engine.optimizer_config = config.FSDPOptimizerConfig(lr=1e-2, clip_grad=0.5)
        engine.module = engine._build_fsdp_module(model) if streams else model
        engine.optimizer, log = engine._build_optimizer(engine.module), []
        for at in (0, 2, 4):
            engine.optimizer_zero_grad()
            for row in RAGGED[at : at + 2]:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                    loss = engine.module(**{key: value[None] for key, value in row.items()}).loss / 2
                loss.backward()
                log.append(loss.item())
            log.append(engine.optimizer_step())
        engine.to("cpu", model=True, optimizer=True, grad=True)
        rollout = dict(engine.get_per_tensor_param()[0])
        found.append((log, {name: rollout[name].clone() for name in model.state_dict()}))
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) >= 3 * 2 * 5 * 2
    engine._is_lora = True
    with pytest.raises(NotImplementedError, match="adapters"):
        engine._build_fsdp_module(model)
    with pytest.raises(NotImplementedError, match="checkpoints"):
        engine.save_checkpoint("folder")
