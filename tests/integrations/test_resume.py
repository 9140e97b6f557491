"""Checkpoints of a trainer that streams: what it writes, and a run that goes on from there with the bits of one that
never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from megatrain.errors import CheckpointError
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, Ran, Scenario, llama, run
from tests.integrations.test_trainer import LooksAtGradients, OwnStep
from tests.tiers import wide

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
ROOT = Path(__file__).parents[2]
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
MASTERS: dict[str, Scenario] = {
    "exact, no training step": Scenario(SAVED, rows=RAGGED, kind=OwnStep, streaming={"precision": "bf16"}),
    "exact": Scenario(SAVED, rows=RAGGED, streaming={"precision": "bf16"}),
    "rounded": Scenario(SAVED, rows=RAGGED, streaming={"precision": "bf16", "masters": "rounded"}),
}


def assert_same_run(found: Ran, expected: Ran) -> None:
    def last(ran: Ran) -> list[dict[str, Any]]:
        return [row for row in ran.log if row["step"] > 2 and "train_loss" not in row]

    assert last(found) == last(expected)
    assert_same(found.values, expected.values)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_resumed_run_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    stock = run(scenario, tmp_path / "stock", streams=False)
    undisturbed = run(scenario, tmp_path / "run", streams=True)
    assert undisturbed.log == stock.log
    assert_same(undisturbed.values, stock.values)
    again = run(scenario, tmp_path / "run", streams=True, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_run(again, stock)


@pytest.mark.parametrize("name", MASTERS)
def test_masters_are_saved_and_resumed(name: str, tmp_path: Path) -> None:
    scenario = MASTERS[name]
    undisturbed = run(scenario, tmp_path, streams=True)
    again = run(scenario, tmp_path, streams=True, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_run(again, undisturbed)


@pytest.mark.parametrize("is_tied", [False, True])
def test_from_pretrained_reads_a_trainers_checkpoint(is_tied: bool, tmp_path: Path) -> None:
    scenario = Scenario(SAVED, model=lambda: llama(tie_word_embeddings=is_tied))
    stock, found = (run(scenario, tmp_path / str(streams), streams=streams) for streams in (False, True))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "True" / "checkpoint-5")
    assert_same(dict(again.state_dict()), found.values)
    names = {False: set[str](), True: set[str]()}
    for streams in (False, True):
        checkpoint = tmp_path / str(streams) / "checkpoint-5"
        names[streams] = {path.name for path in checkpoint.iterdir()}
    assert names[True] - {"megatrain"} == names[False] - {"optimizer.pt", "scheduler.pt"}
    weights = [
        safetensors.torch.load_file(tmp_path / s / "checkpoint-5" / "model.safetensors") for s in ("False", "True")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert stock.values.keys() == found.values.keys()


def test_an_adapters_checkpoint_holds_the_adapter_alone(tmp_path: Path) -> None:
    found = run(SCENARIOS["lora"], tmp_path, streams=True)
    checkpoint = tmp_path / "checkpoint-5"
    assert sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) < 60_000
    again = PeftModel.from_pretrained(llama(), str(checkpoint))
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(again(input_ids=ids).logits, found.trainer.model.eval()(input_ids=ids).logits)


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_from(tmp_path: Path) -> None:
    stock = run(SCENARIOS["fp32"], tmp_path / "stock", streams=False)
    checkpoint = str(tmp_path / "stock" / "checkpoint-2")
    again = run(SCENARIOS["fp32"], tmp_path / "run", streams=True, resume_from_checkpoint=checkpoint)
    assert_same_run(again, stock)


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    stock = run(SCENARIOS["fp32"], tmp_path, streams=True)
    state = tmp_path / "checkpoint-5" / "trainer_state.json"
    shutil.rmtree(tmp_path / "checkpoint-4" / "megatrain")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 1')
    state.unlink()
    again = run(SCENARIOS["fp32"], tmp_path, streams=True, resume_from_checkpoint=True)
    assert_same_run(again, stock)
    for number in (2, 4, 5):
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        run(SCENARIOS["fp32"], tmp_path, streams=True, resume_from_checkpoint=True)


KILLED = """
import sys
from pathlib import Path
import torch
from tests.integrations.runs import run
from tests.integrations.test_resume import long
folder = Path(sys.argv[1])
# A kill may have come in the middle of the first checkpoint: then there is none to go on from.
is_new = not any(folder.glob("checkpoint-*/trainer_state.json"))
found = run(long(int(sys.argv[2])), folder, streams=True, resume_from_checkpoint=None if is_new else True)
torch.save((found.values, [row for row in found.log if "loss" in row]), folder / "end.pt")
"""


def long(steps: int) -> Scenario:
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "gradient_accumulation_steps": 2}
    return Scenario(
        {**saved, "max_steps": steps},
        model=lambda: llama(attention_dropout=0.1),
        rows=RAGGED,
        streaming={"precision": "bf16"},
    )


def finish(folder: Path, steps: int, waits_s: list[float]) -> int:
    """Starts the script again and again, killed after these times; returns how often it was killed."""
    folder.mkdir()
    kills = 0
    while not (folder / "end.pt").exists():
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), str(steps)],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        before = {path.name for path in folder.iterdir()}
        if not waits_s:
            assert process.wait() == 0, process.stderr and process.stderr.read()[-3000:]
            continue
        while process.poll() is None and {path.name for path in folder.iterdir()} == before:
            time.sleep(0.005)  # until the run writes: what comes before is Python's start
        try:
            process.wait(waits_s.pop())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    return kills


@pytest.mark.parametrize(("kills", "steps"), [wide((3, 16)), pytest.param(20, 120, marks=pytest.mark.users)])
def test_a_run_that_is_killed_goes_on_to_the_bits_of_an_undisturbed_one(kills: int, steps: int, tmp_path: Path) -> None:
    undisturbed = run(long(steps), tmp_path / "undisturbed", streams=True)
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
