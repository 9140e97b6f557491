"""Checkpoints of a trainer that streams: what it writes, and a run that goes on from there with the bits of one that
never stopped."""

from __future__ import annotations

import functools
import multiprocessing
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from megatrain.errors import CheckpointError
from tests.comparing import assert_same
from tests.integrations import killed_run
from tests.integrations.runs import RAGGED, Ran, Scenario, llama, run
from tests.integrations.test_trainer import LooksAtGradients, OwnStep
from tests.tiers import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "gradient_accumulation_steps": 2, "warmup_steps": 2}


def adapted() -> Any:
    torch.manual_seed(0)
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1}
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **lora))  # pyright: ignore


SCENARIOS: dict[str, Scenario] = {
    "fp32": Scenario(SAVED, rows=RAGGED),
    "dropout": Scenario(SAVED, model=lambda: llama(attention_dropout=0.2), rows=RAGGED),
    "tied": Scenario({**SAVED, "gradient_accumulation_steps": 1}, model=lambda: llama(tie_word_embeddings=True)),
    "lora": Scenario(SAVED, model=adapted, rows=RAGGED),
    "best": Scenario({**SAVED, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}),
    "own loop": Scenario({**SAVED, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "optim": "adafactor"}),
}
SHORT = {**SAVED, "max_steps": 3}
MASTERS: dict[str, Scenario] = {
    "exact, no training step": Scenario(SHORT, rows=RAGGED, kind=OwnStep, streaming={"precision": "bf16"}),
    "exact": Scenario(SHORT, rows=RAGGED, streaming={"precision": "bf16"}),
    "rounded": Scenario(SHORT, rows=RAGGED, streaming={"precision": "bf16", "masters": "rounded"}),
}


def assert_same_run(found: Ran, expected: Ran) -> None:
    def last(ran: Ran) -> list[dict[str, Any]]:
        return [row for row in ran.log if row["step"] > 2 and "train_loss" not in row]

    assert last(found) == last(expected)
    assert_same(found.values, expected.values)


@dataclass(frozen=True)
class Both:
    """A script that ran to its end with the stock trainer and with one that streams; checkpoints come every 2 steps."""

    folder: Path
    stock: Ran
    streamed: Ran

    def checkpoint(self, number: int, *, of: str = "streamed") -> Path:
        return self.folder / of / f"checkpoint-{number}"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, lowered_once: None) -> Callable[[str], Both]:
    """Runs a scenario once; what the runs left is only read."""

    @functools.cache
    def ran(name: str) -> Both:
        folder = tmp_path_factory.mktemp("both")
        sides = (run(SCENARIOS[name], folder / side, streams=side == "streamed") for side in ("stock", "streamed"))
        return Both(folder, *sides)

    return ran


# What "fp32" runs, "dropout" runs too, and draws.
@pytest.mark.parametrize("name", [wide(name) if name == "fp32" else name for name in SCENARIOS])
def test_a_resumed_run_has_the_stock_runs_bits(name: str, both: Callable[[str], Both], tmp_path: Path) -> None:
    ran = both(name)
    assert ran.streamed.log == ran.stock.log
    assert_same(ran.streamed.values, ran.stock.values)
    checkpoint = str(ran.checkpoint(2))
    again = run(SCENARIOS[name], tmp_path, streams=True, resume_from_checkpoint=checkpoint)
    assert_same_run(again, ran.stock)


# Masters of updates that aren't training steps are also in the last test of this file.
@pytest.mark.parametrize("name", [wide(name) if "no training step" in name else name for name in MASTERS])
def test_masters_are_saved_and_resumed(name: str, tmp_path: Path) -> None:
    scenario = MASTERS[name]
    undisturbed = run(scenario, tmp_path, streams=True)
    again = run(scenario, tmp_path, streams=True, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_run(again, undisturbed)


@pytest.mark.parametrize("name", [wide("fp32"), "dropout", "tied"])
def test_from_pretrained_reads_a_trainers_checkpoint(name: str, both: Callable[[str], Both]) -> None:
    ran = both(name)
    again = LlamaForCausalLM.from_pretrained(ran.checkpoint(5))
    assert_same(dict(again.state_dict()), ran.streamed.values)
    folders = {side: ran.checkpoint(5, of=side) for side in ("stock", "streamed")}
    names = {side: {path.name for path in folder.iterdir()} for side, folder in folders.items()}
    assert names["streamed"] - {"megatrain"} == names["stock"] - {"optimizer.pt", "scheduler.pt"}
    weights = [safetensors.torch.load_file(folder / "model.safetensors") for folder in folders.values()]
    assert weights[0].keys() == weights[1].keys()
    assert ran.stock.values.keys() == ran.streamed.values.keys()


def test_an_adapters_checkpoint_holds_the_adapter_alone(both: Callable[[str], Both]) -> None:
    ran = both("lora")
    checkpoint = ran.checkpoint(5)
    assert sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) < 60_000
    again = PeftModel.from_pretrained(llama(), str(checkpoint))
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(again(input_ids=ids).logits, ran.streamed.trainer.model.eval()(input_ids=ids).logits)


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_from(both: Callable[[str], Both], tmp_path: Path) -> None:
    ran = both("dropout")
    checkpoint = str(ran.checkpoint(2, of="stock"))
    again = run(SCENARIOS["dropout"], tmp_path, streams=True, resume_from_checkpoint=checkpoint)
    assert_same_run(again, ran.stock)


def test_the_newest_whole_checkpoint_is_taken(both: Callable[[str], Both], tmp_path: Path) -> None:
    ran = both("dropout")
    shutil.copytree(ran.folder / "streamed", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoint-4" / "megatrain")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 1')
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    again = run(SCENARIOS["dropout"], tmp_path, streams=True, resume_from_checkpoint=True)
    assert_same_run(again, ran.stock)
    for number in (2, 4, 5):
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        run(SCENARIOS["dropout"], tmp_path, streams=True, resume_from_checkpoint=True)


def finish(folder: Path, steps: int, waits_s: list[float]) -> int:
    """Starts the script again and again, killed after these times; returns how often it was killed."""
    folder.mkdir()
    kills = 0
    # Processes that begin behind all imports: 20 of these take longer than the training, and on a busy machine minutes.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([killed_run.__name__])
    while not (folder / "end.pt").exists():
        before = {path.name for path in folder.iterdir()}
        process = processes.Process(target=killed_run.train_on, args=(folder, steps))
        process.start()
        while waits_s and process.is_alive() and {path.name for path in folder.iterdir()} == before:
            time.sleep(0.005)  # until the run writes
        process.join(waits_s.pop() if waits_s else None)
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
        else:
            assert process.exitcode == 0, "its own text is on stderr"
        process.close()
    return kills


@pytest.mark.parametrize(("kills", "steps"), [wide((3, 16)), pytest.param(20, 120, marks=pytest.mark.users)])
def test_a_run_that_is_killed_goes_on_to_the_bits_of_an_undisturbed_one(kills: int, steps: int, tmp_path: Path) -> None:
    undisturbed = run(killed_run.long(steps), tmp_path / "undisturbed", streams=True)
    waits = [0.003 * (7 * number % 20) ** 1.5 for number in range(kills)]
    assert finish(tmp_path / "killed", steps, waits) > kills // 2
    values, losses = torch.load(tmp_path / "killed" / "end.pt")
    assert_same(undisturbed.values, values)
    assert losses == [row for row in undisturbed.log if "loss" in row]


def test_masters_are_updated_where_an_update_is_no_training_step(tmp_path: Path) -> None:
    """At a rate that would change no bf16 value, masters change, and both ways change them alike."""
    options = {"learning_rate": 1e-5, "max_grad_norm": 0.0, "optim": "sgd", "lr_scheduler_type": "constant"}
    found: list[dict[str, torch.Tensor]] = []
    plain = Scenario(options, streaming={"precision": "bf16"})
    for scenario in (plain, replace(plain, more=lambda model: {"callbacks": [LooksAtGradients()]})):
        ran = run(scenario, tmp_path, streams=True)
        sources = ran.trainer.model.master_state_dict().items()
        values = {name: torch.cat([piece.flatten() for piece in source.pieces()]) for name, source in sources}
        found.append({name: value.reshape(ran.values[name].shape) for name, value in values.items()})
    start = {name: tensor.float() for name, tensor in llama().state_dict().items()}
    changed = [name for name in start if not torch.equal(found[0][name], start[name])]
    assert len(changed) > len(start) // 2
    for name in changed:
        moved = (found[0][name] - start[name]).abs().max()
        assert (found[1][name] - found[0][name]).abs().max() < 0.02 * moved, name
