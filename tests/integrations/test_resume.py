"""Checkpoints of a trainer that streams: what it writes, and a run that goes on from there with the bits of one that
never stopped."""

from __future__ import annotations

import functools
import multiprocessing
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from megatrain.errors import CheckpointError
from megatrain.integrations.hf.newest_whole import newest_whole
from tests.comparing import assert_same
from tests.integrations import killed_run
from tests.integrations.runs import RAGGED, TWO, Ran, Scenario, fast_or_nightly, llama, run
from tests.integrations.test_trainer import LooksAtGradients, OwnStep

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, **TWO, "warmup_steps": 2}
BEST = {**SAVED, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
EPOCHS = {**SAVED, "max_steps": -1, "num_train_epochs": 2, "restore_callback_states_from_checkpoint": True}


def adapted(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", "lora_dropout": dropout}
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **lora))  # pyright: ignore


def dropping() -> Any:
    return llama(attention_dropout=0.2)


SCENARIOS: dict[str, Scenario] = {
    "dropout": Scenario(SAVED, model=dropping, rows=RAGGED),
    "lora": Scenario(SAVED, model=adapted, rows=RAGGED),
    "best": Scenario(BEST),
    "in the middle of an epoch": Scenario({**EPOCHS, "lr_scheduler_type": "cosine"}, model=dropping, rows=RAGGED),
}
SHORT = {**SAVED, "max_steps": 3}
MASTERS: dict[str, Scenario] = {
    "exact, no training step": Scenario(SHORT, rows=RAGGED, kind=OwnStep, streaming={"precision": "bf16"}),
    "exact": Scenario(SHORT, rows=RAGGED, streaming={"precision": "bf16"}),
}


def assert_same_run(found: Ran, expected: Ran) -> None:
    logs = [[row for row in ran.log if row["step"] > 2 and "train_loss" not in row] for ran in (found, expected)]
    assert logs[0] == logs[1]
    assert_same(found.values, expected.values)


Both = Callable[[str], tuple[Path, Ran, Ran]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Runs a scenario once, with the stock trainer and with one that streams, in folders of these names."""

    @functools.cache
    def ran(name: str) -> tuple[Path, Ran, Ran]:
        folder = tmp_path_factory.mktemp("both")
        stock, streamed = (run(SCENARIOS[name], folder / side, streams=side == "streamed") for side in SIDES)
        return folder, stock, streamed

    return ran


SIDES = ("stock", "streamed")


@pytest.mark.parametrize("name", fast_or_nightly(SCENARIOS, ("dropout",)))
def test_a_resumed_run_has_the_stock_runs_bits(name: str, both: Both, tmp_path: Path) -> None:
    folder, stock, streamed = both(name)
    assert streamed.log == stock.log
    assert_same(streamed.values, stock.values)
    shutil.copytree(folder / "streamed" / "checkpoint-2", tmp_path / "checkpoint-2")
    assert_same_run(run(SCENARIOS[name], tmp_path, streams=True, resume_from_checkpoint=True), stock)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MASTERS)
def test_masters_are_saved_and_resumed(name: str, tmp_path: Path) -> None:
    scenario = MASTERS[name]
    undisturbed = run(scenario, tmp_path, streams=True)
    again = run(scenario, tmp_path, streams=True, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_run(again, undisturbed)


def test_from_pretrained_reads_a_trainers_checkpoint(both: Both) -> None:
    folder, _, streamed = both("dropout")
    again = LlamaForCausalLM.from_pretrained(folder / "streamed" / "checkpoint-5")
    assert_same(dict(again.state_dict()), streamed.values)
    ours, theirs = ({path.name for path in (folder / side / "checkpoint-5").iterdir()} for side in SIDES[::-1])
    assert ours - {"megatrain"} == theirs - {"optimizer.pt", "scheduler.pt"}


@pytest.mark.nightly
def test_an_adapters_checkpoint_holds_the_adapter_alone(both: Both) -> None:
    folder, _, streamed = both("lora")
    checkpoint = folder / "streamed" / "checkpoint-5"
    assert sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) < 60_000
    again = PeftModel.from_pretrained(llama(), str(checkpoint))
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(again(input_ids=ids).logits, streamed.trainer.model.eval()(input_ids=ids).logits)


@pytest.mark.nightly
def test_a_checkpoint_of_the_stock_trainer_is_gone_on_from(both: Both, tmp_path: Path) -> None:
    folder, stock, _ = both("dropout")
    checkpoint = str(folder / "stock" / "checkpoint-2")
    assert_same_run(run(SCENARIOS["dropout"], tmp_path, streams=True, resume_from_checkpoint=checkpoint), stock)


def test_the_newest_whole_checkpoint_is_taken(both: Both, tmp_path: Path) -> None:
    shutil.copytree(both("dropout")[0] / "streamed", tmp_path, dirs_exist_ok=True)
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-5")
    shutil.rmtree(tmp_path / "checkpoint-4" / "megatrain")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 1')
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-2")
    for number in (2, 4, 5):
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        run(SCENARIOS["dropout"], tmp_path, streams=True, resume_from_checkpoint=True)


# -- a run that is killed ---------------------------------------------------------------------------------------------


def finish(folder: Path, steps: int, waits_s: list[float]) -> int:
    """Starts the script again and again, killed after these times; returns how often it was killed."""
    folder.mkdir()
    kills = 0
    # Processes that begin after all imports: 20 of these take longer than the training, and on a busy machine minutes.
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


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_to_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    kills, steps = 10, 60
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
