"""The code of docs/training.md runs, and prints and leaves what the page says."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatrain
from megatrain import files as saving
from megatrain.optim.per_parameter import is_per_parameter, unregister
from tests.saving.training import same
from tests.test_progress import Terminal

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SCRIPT, PROGRESS, WEIGHT, PROMISE, GIVEN, SEVERAL, SAVING, READING = SNIPPETS

# Random numbers are drawn in the order of the plain loop.
DROPOUT = """
micro_batches, copied = batch(1), LlamaForCausalLM(model.config).train()
step.flush()
copied.load_state_dict(model.state_dict())
start = torch.get_rng_state()
loss = step(micro_batches)
end = torch.get_rng_state()

torch.set_rng_state(start)
for arguments in micro_batches:
    (copied(**arguments).loss / 4).backward()
assert torch.equal(torch.nn.utils.get_total_norm([p.grad for p in copied.parameters()]), step.progress.grad_norm)
assert torch.equal(torch.get_rng_state(), end)
"""


def execute(code: str, found: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "training.md", "exec"), found)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script that ran to its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        execute(SCRIPT, {})
    return folder


def test_the_script_goes_on_where_it_was_stopped(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            execute(SCRIPT, {})
    execute(SCRIPT, {})
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 5", "step 10", "step 12"]
    one, other = (saving.load(folder / "runs/first") for folder in (undisturbed, tmp_path))
    assert one.extra["progress"] == other.extra["progress"]
    assert one.extra["scheduler"] == other.extra["scheduler"]
    assert one.manifest.optimizer == other.manifest.optimizer
    files = sorted(path.relative_to(one.folder) for path in one.folder.rglob("*.safetensors"))
    assert len(files) == 3  # weights, moments, generators
    for file in files:
        assert same(load_file(one.folder / file), load_file(other.folder / file))


def stop(patch: pytest.MonkeyPatch, count: int) -> None:
    """Lets the process end when a step is asked for after `count` of them."""
    take = megatrain.TrainStep.__call__

    def stopping(self: megatrain.TrainStep, batch: Any) -> torch.Tensor:
        if self.progress.count == count:
            raise KeyboardInterrupt
        return take(self, batch)

    patch.setattr(megatrain.TrainStep, "__call__", stopping)


def test_the_other_snippets_do_what_they_say(undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(undisturbed)
    found = execute(SCRIPT, {})  # takes its names from the last checkpoint

    # A Ctrl-C between a step and its scheduler's: both are saved of one step.
    kind = type(found["scheduler"])
    take = kind.step

    def interrupted(_: Any) -> None:
        monkeypatch.setattr(kind, "step", take)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(SAVING, found)
    saved = saving.load("runs/first").extra
    assert saved["progress"]["count"] == saved["scheduler"]["last_epoch"] == 13

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    execute(PROGRESS, found)
    assert re.search(r"tok/s, device=\d.*, loss=\d\.\d{3}, step=14/14", terminal.getvalue())
    found["step"](found["batch"](13))  # takes the updates that the step before left due
    assert re.search(r"^updates: deferred, clipped$", str(found["step"].schedule), re.MULTILINE)
    for group in found["optimizer"].param_groups:
        group["lr"] = 1e-3  # the script ends with none
    for code in (READING, DROPOUT):  # they hold assertions
        execute(code, found)

    micro_batches = found["batch"](0)
    found["step"](micro_batches)
    execute(GIVEN, found)
    for _ in range(2):  # updates are deferred, and the first step has none to run
        found["again"](micro_batches)
    assert str(found["again"].schedule) == str(found["step"].schedule)

    execute(WEIGHT, found)
    mixed = [found["batch"](n)[0] for n in range(2)]
    mixed[0]["labels"] = mixed[0]["labels"].index_fill(1, torch.arange(8), -100)
    assert [int(found["num_targets"](part)) for part in mixed] == [48, 62]
    found["step"](mixed)
    found["step"].flush()

    eager = copy.deepcopy(found["model"])
    torch.manual_seed(3)
    execute(SEVERAL, found)
    assert {len(found["muon"].state), len(found["adamw"].state)} == {28, 11}
    streamed = dict(found["model"].named_parameters())
    ours = {id(p): own for (name, own) in eager.named_parameters() for p in [streamed[name]]}
    torch.manual_seed(3)
    for arguments in found["batch"](0):
        (eager(**arguments).loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
    for optimizer in (found["muon"], found["adamw"]):
        (group,) = optimizer.param_groups
        options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        type(optimizer)([ours[id(p)] for p in group["params"]], **own_options(optimizer, options)).step()
    assert same(dict(eager.state_dict()), dict(found["model"].state_dict()))


def test_a_registered_optimizer_is_per_parameter():
    found = execute(PROMISE, {"torch": torch})
    weight = torch.nn.Parameter(torch.zeros(2))
    assert is_per_parameter(found["SignSGD"]([weight]))
    unregister(found["SignSGD"])
    assert not is_per_parameter(found["SignSGD"]([weight]))


def own_options(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """What the constructor takes of a group's options."""
    taken = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in options.items() if key in taken}


ROWS = re.findall(r"^\| (bf16|fp32) \| (yes|no) \| (.* GiB) \| (.* GiB) \| (\S+) \|$", PAGE, re.MULTILINE)
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    use_cache=False,
    attn_implementation="sdpa",
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
ids = torch.zeros(1, 1024, dtype=torch.long)
"""


def test_the_table_of_plans_is_found():
    assert len(ROWS) == 4


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return execute(MODEL, {})


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "clips", "device", "host", "per_parameter"), ROWS)
def test_plans_have_the_figures_of_the_table(
    precision: str, clips: str, device: str, host: str, per_parameter: str, planned: dict[str, Any]
):
    plan = megatrain.plan(
        planned["model"],
        device_memory="9GiB",
        host_memory="58GiB",
        optimizer=torch.optim.AdamW(planned["model"].parameters(), fused=True),
        precision=precision,
        micro_batches=8,
        max_grad_norm=1.0 if clips == "yes" else None,
        example_kwargs={"input_ids": planned["ids"], "labels": planned["ids"]},
    )
    lines = str(plan).splitlines()
    assert [line for line in lines if line.startswith(f"device: {device} of 9.00 GiB: fits")]
    assert [line for line in lines if line.startswith(f"host: {host} of 58.00 GiB: fits")]
    assert lines[-1].split()[-1] == per_parameter
