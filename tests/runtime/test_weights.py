"""compile(weights=...): values come from files into the host store, and the model trains as one loaded otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, WeightsError
from megatrain.files import weight_files as checkpoint
from tests.comparing import assert_same
from tests.runtime.parity import train
from tests.runtime.saved import IDS, assert_holds, gpt, on_meta, save, save_sharded, state_of

ROOT = Path(__file__).parent.parent.parent


def hugging_face(folder: Path) -> tuple[nn.Module, nn.Module]:
    """A Llama saved in shards: loaded the ordinary way, and built on meta with its rotary module made anew."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, tie_word_embeddings=True, attention_dropout=0.1,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), model


def test_hugging_face_model_with_its_rotary_module_made_anew(tmp_path: Path):
    model: Any
    loaded, model = hugging_face(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with pytest.raises(
        WeightsError, match=r"2 without values(.|\n)*make these again and assign them to the model: `model.rotary_emb`"
    ):
        megatrain.compile(model, device="cpu", weights=tmp_path)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    compiled = megatrain.compile(model.train(), device="cpu", memory="64KiB", weights=tmp_path)
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    call = ((), {"input_ids": ids, "labels": ids})
    assert_same(train(loaded.train(), loaded, *call), train(compiled, model, *call))
    assert len(compiled.schedule.workload.blocks) > 2


def test_the_plan_exists_before_any_weight_is_read(tmp_path: Path):
    state = state_of(gpt())
    file = save(tmp_path / "model.safetensors", state)
    model = on_meta()
    compiled = megatrain.compile(model, device="cpu", memory="64KiB", example_args=(IDS,), weights=file)
    content = file.read_bytes()
    times = file.stat()
    file.unlink()
    assert "W0@1" in str(compiled.schedule)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(WeightsError, match=r"model.safetensors` can't be read as safetensors: .*No such file"):
        compiled(IDS)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    compiled(IDS)
    assert_holds(model, state)


def test_a_read_that_failed_halfway_is_repeated_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = state_of(gpt())
    file = save(tmp_path / "model.safetensors", state)
    model = on_meta()
    compiled = megatrain.compile(model, device="cpu", example_args=(IDS,), weights=file)
    fill, reads = checkpoint.Stored._fill, []

    def broken(stored, *args):
        reads.append(stored.name)
        if len(reads) == 5:
            raise WeightsError("the disk is gone")
        fill(stored, *args)

    monkeypatch.setattr(checkpoint.Stored, "_fill", broken)
    with pytest.raises(WeightsError, match="the disk is gone"):
        compiled(IDS)
    assert sorted({p.device.type for p in model.parameters()}) == ["cpu", "meta"]
    compiled(IDS)
    assert_holds(model, state)
    assert reads[5:][: len(state)] == list(dict.fromkeys(reads[5:]))


def test_the_files_may_not_change_in_between(tmp_path: Path):
    file = save(tmp_path / "model.safetensors", state_of(gpt()))
    compiled = megatrain.compile(on_meta(), device="cpu", weights=file)
    save(file, state_of(gpt(1)))
    os.utime(file, ns=(1, 1))
    with pytest.raises(WeightsError, match="was changed after compile"):
        compiled(IDS)


@pytest.mark.parametrize("change", ["in place", "load_state_dict"])
def test_what_the_user_changed_before_loading_is_not_undone(tmp_path: Path, change: str):
    model = gpt()
    compiled = megatrain.compile(model, device="cpu", weights=save(tmp_path / "a.safetensors", state_of(gpt(1))))
    with torch.no_grad():
        if change == "in place":
            model.positions.weight.add_(1)
        else:
            compiled.load_state_dict(gpt(2).state_dict())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"`positions.weight`.* changed after compile"):
        compiled(IDS)
    assert_holds(model, before)


def test_a_parameter_that_cannot_stay_the_same_object_is_refused_early(tmp_path: Path):
    model = on_meta()
    compiled = megatrain.compile(model, device="cpu", weights=save(tmp_path / "a.safetensors", state_of(gpt())))
    watching = weakref.ref(model.norm.weight)
    with pytest.raises(ExecuteError, match=r"`norm.weight` is on the meta device and can't be given values"):
        compiled(IDS)
    assert all(p.is_meta for p in model.parameters())
    del watching
    compiled(IDS)


def test_tied_names_with_different_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 16)
    state = state_of(gpt(), drop=())
    state["head.weight"][-1, -1] += 1
    compiled = megatrain.compile(on_meta(), device="cpu", weights=save(tmp_path / "a.safetensors", state))
    with pytest.raises(
        WeightsError, match=r"`embed.weight` and `head.weight` are one tensor in the model, but differ in the files"
    ):
        compiled(IDS)


# A process of its own, because the peak of resident memory belongs to a process.
SCRIPT = """
import json, sys, torch, megatrain
from torch import nn

def usage(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return 1024 * int(line.split()[1])

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1280, 1280) for _ in range(32)))
x = torch.ones(1, 1280)
# What the first call of any model brings into memory is part of the baseline.
megatrain.compile(nn.Linear(1280, 1280), device="cpu")(x)
compiled = megatrain.compile(model, device="cpu", example_args=(x,), weights=sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
before = usage("VmRSS")
compiled.load_weights()
print(json.dumps({
    "store": compiled.megatrain.engine.store.nbytes, "peak": usage("VmHWM") - before,
    "sum": float(sum(p.double().sum() for p in model.parameters())),
}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
@pytest.mark.nightly
def test_loading_takes_the_memory_of_the_store_and_no_more(tmp_path: Path):
    torch.manual_seed(0)
    state, dtype = {}, torch.bfloat16
    for i in range(32):
        state |= {f"{i}.weight": torch.randn(1280, 1280).to(dtype), f"{i}.bias": torch.randn(1280).to(dtype)}
    save_sharded(tmp_path, state, shards=4)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=True
    )
    found = json.loads(done.stdout)
    assert found["store"] > 200e6
    assert found["sum"] == float(sum(t.double().sum() for t in state.values()))
    assert 0.95 * found["store"] < found["peak"] < 1.1 * found["store"]
