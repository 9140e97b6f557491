"""Frozen weights that stay in the files of compile(weights=...): the bits of a copy, and none is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

import megatrain
from megatrain.device import bus as buses
from megatrain.device.host_pages import HostPages
from megatrain.errors import ExecuteError, PageLockWarning, WeightsError
from megatrain.runtime.stores.host_store import HostStore
from tests.comparing import assert_same
from tests.runtime.in_files import (
    HAS_MAPS,
    batch,
    compiled,
    control_group,
    frozen,
    is_in,
    losses,
    net,
    saved,
    stepping,
    written_bytes,
)
from tests.runtime.strict_toy import StrictToy

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning"),
    pytest.mark.skipif(not HAS_MAPS, reason="this system has no private maps of files, or doesn't list them"),
]


def test_training_has_the_bits_of_weights_in_memory_and_copies_none(tmp_path: Path):
    file = saved(tmp_path)
    content = file.read_bytes()
    usual, other = compiled(file, stay=False), compiled(file, stay=True)
    first, second = stepping(usual), stepping(other)
    assert losses(first) == losses(second)
    assert_same(usual.state_dict(), other.state_dict())
    assert all(is_in(file, parameter) for parameter in frozen(other).values())
    assert not any(is_in(file, parameter) for parameter in frozen(usual).values())
    assert not any(is_in(file, t) for name, t in other.state_dict().items() if name not in frozen(other))
    nbytes = sum(parameter.nbytes for parameter in frozen(other).values())
    store, plan = other.megatrain.engine.store, second.host_plan
    assert plan.file_bytes == nbytes
    assert store.nbytes == plan.bytes_of("parameters") + plan.bytes_of("buffers") < nbytes
    assert first.host_plan.total_bytes - plan.total_bytes + plan.bytes_of("cache of files") >= nbytes
    assert written_bytes(file) == 0
    assert file.read_bytes() == content
    assert "frozen ones stay in their files" in str(other.megatrain)
    assert "stay in their files" not in str(usual.megatrain)


def llama(folder: Path) -> tuple[Any, Any]:
    """A small Llama with LoRA on meta except its adapters, and the base's file."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    if not folder.exists():
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="30KB")
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(config).bfloat16()
        model = peft.get_peft_model(base, adapters)
    base.model.rotary_emb = type(base.model.rotary_emb)(config)
    torch.manual_seed(5)
    return base, model


def with_adapters(model: Any) -> Any:
    for layer in (each for each in model.modules() if isinstance(each, LoraLayer)):
        for part in (layer.lora_A, layer.lora_B):
            part.to_empty(device="cpu")
        layer.reset_lora_parameters("default", init_lora_weights="gaussian")
    return model.train()


@pytest.mark.filterwarnings("ignore")  # peft's, of what transformers will rename
def test_peft_s_adapters_keep_their_values_and_the_base_has_its_names_from_before(tmp_path: Path):
    folder, ids = tmp_path / "base", torch.arange(16).reshape(2, 8)
    given = {"input_ids": ids, "labels": ids}
    with pytest.raises(WeightsError, match=r"12 without values(.|\n)*lora_A.default.weight` is on meta"):
        megatrain.compile(llama(folder)[1], device="cpu", weights=folder)
    found: dict[bool, Any] = {}
    for stays in (False, True):
        model = with_adapters(llama(folder)[1])
        made: Any = megatrain.compile(model, device="cpu", memory="1MiB", weights=folder)
        if stays:
            assert made.megatrain.engine.leave_in_files()
        step = megatrain.TrainStep(made, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))
        torch.manual_seed(7)
        found[stays] = [float(step(given)) for _ in range(3)], dict(made.megatrain.weights()), made.state_dict()
        files = sorted(folder.glob("*.safetensors"))
        assert any(is_in(each, p) for each in files for p in frozen(made).values()) == stays
        assert made.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == 11
    assert found[True][0] == found[False][0]
    assert_same(found[True][1], found[False][1])
    assert_same(found[True][2], found[False][2])
    # The adapters were trained, and merged into what an engine gets.
    base = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert found[True][1].keys() == base.keys()
    assert [name for name, t in base.items() if not torch.equal(t, found[True][1][name])] == [
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(3) for name in "qv"
    ]


def test_copies_to_a_device_pass_through_the_ring_and_files_are_never_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(buses, "MOST_BYTES", 1 << 17)
    monkeypatch.setattr(buses, "LEAST_BYTES", 1 << 17)
    file, found = saved(tmp_path), list[list[float]]()
    for stays in (False, True):
        toy = StrictToy()
        made = compiled(file, stay=stays, device=toy)
        found.append(losses(stepping(made)))
        spans = [(address, address + nbytes) for address, nbytes in toy.locked.items()]
        places = [parameter.data_ptr() for parameter in frozen(made).values()]
        assert any(start <= place < end for place in places for start, end in spans) != stays
        assert (made.megatrain.engine.bus._rings is not None) == stays
    assert found[0] == found[1]


# -- who decides ----------------------------------------------------------------------------------------------


def test_a_step_leaves_them_where_its_plan_lacks_memory_and_only_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = saved(tmp_path)
    made = compiled(file, stay=False)
    step = stepping(made)
    expected = losses(step)
    needed = step.host_plan.total_bytes

    def run(available: int) -> tuple[Any, list[float]]:
        monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: available)
        other = compiled(file, stay=False)
        return other, losses(stepping(other))

    other, found = run(needed)
    assert found == expected
    assert other.megatrain.engine.in_files == frozenset()
    with pytest.warns(PageLockWarning, match=r"no room for all weights, so frozen ones stay in their files \("):
        other, found = run(needed - 1)
    assert found == expected
    assert other.megatrain.engine.in_files == frozen(other).keys()
    with pytest.raises(ExecuteError, match=r"cache of files(.|\n)*in files: .* of frozen weights(.|\n)* are missing"):
        run(1000)


def test_a_call_leaves_them_where_the_state_lacks_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = saved(tmp_path)
    usual = compiled(file, stay=False)
    expected = usual(batch(0))
    total = usual.megatrain.engine.store.nbytes
    monkeypatch.setattr("megatrain.runtime.stores.host_store.available_bytes", lambda: total - 1)
    other = compiled(file, stay=False)
    assert torch.equal(other(batch(0)), expected)
    assert other.megatrain.engine.in_files == frozen(other).keys()
    monkeypatch.setattr("megatrain.runtime.stores.host_store.available_bytes", lambda: 100)
    with pytest.raises(ExecuteError, match=r"needs .* more host memory, 100 B are available"):
        compiled(file, stay=False)(batch(0))


@pytest.mark.parametrize("case", ["bind", "no maps", "another dtype", "odd place"])
def test_what_cannot_stay_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str):
    file, options = saved(tmp_path), dict[str, Any]()
    if case == "bind":
        options["memory"] = None
    elif case == "no maps":
        monkeypatch.setattr(HostPages, "of_file", lambda _: None)
    elif case == "another dtype":
        save_file({name: t.double() for name, t in load_file(file).items()}, file)
    else:  # a header of an odd length, as other writers than the library's may make it
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    made = compiled(file, stay=False, **options)
    assert made.megatrain.engine.leave_in_files() == (case == "no maps")
    (tmp_path / "other").mkdir()
    other = compiled(saved(tmp_path / "other"), stay=False, **options)
    assert losses(stepping(made)) == losses(stepping(other))
    assert made.megatrain.engine.store.in_files == frozenset()


# -- files that change ----------------------------------------------------------------------------------------


def test_the_user_s_write_into_a_frozen_weight_counts_and_leaves_the_file(tmp_path: Path):
    file = saved(tmp_path)
    content = file.read_bytes()
    usual, other = compiled(file, stay=False), compiled(file, stay=True)
    steps = [stepping(each) for each in (usual, other)]
    assert losses(steps[0]) == losses(steps[1])
    for each in (usual, other):
        with torch.no_grad():
            each[2].base.weight.mul_(0.5)
            each[3].base.weight.data = torch.ones_like(each[3].base.weight)
    assert losses(steps[0]) == losses(steps[1])
    assert_same(usual.state_dict(), other.state_dict())
    assert file.read_bytes() == content
    # A weight that is trained from now on.
    for index, each in enumerate((usual, other)):
        each[1].base.weight.requires_grad_(True)
        steps[index] = stepping(each)
    assert losses(steps[0]) == losses(steps[1])
    assert file.read_bytes() == content


@pytest.mark.parametrize("how", ["rewritten", "cut off"])
def test_a_file_that_changes_is_refused_and_what_is_trained_can_be_saved(tmp_path: Path, how: str):
    file = saved(tmp_path)
    content, times = file.read_bytes(), file.stat()
    made = compiled(file, stay=True)
    step = stepping(made)
    losses(step, range(2))
    if how == "rewritten":
        file.write_bytes(content[:-8] + bytes(8))
    else:
        os.truncate(file, 4096)
    refused = r"`.*model.safetensors` was changed while frozen weights are used(.|\n)*weights=False"
    with pytest.raises(WeightsError, match=refused):
        step([batch(2)])
    with pytest.raises(WeightsError, match=refused):
        made(batch(0))
    with pytest.raises(WeightsError, match=refused):
        step.save(tmp_path / "run")
    step.save(tmp_path / "run", weights=False)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    adapters = {name: p.clone() for name, p in made.named_parameters() if p.requires_grad}
    usual = compiled(file, stay=False)
    usual(batch(0))
    with torch.no_grad():
        for name, parameter in usual.named_parameters():
            parameter.copy_(adapters.get(name, parameter))
    trained = [parameter for parameter in usual.parameters() if parameter.requires_grad]
    options: Any = {"loss": lambda out, _: out.square().mean()}
    again = megatrain.TrainStep.load(tmp_path / "run", usual, torch.optim.AdamW(trained, lr=1e-2), **options)
    # The file is as it was, so the step that was refused goes on as well.
    assert losses(again, range(2, 5)) == losses(step, range(2, 5))


def test_bytes_that_cannot_be_read_any_more_end_a_copy_and_not_the_process(tmp_path: Path):
    file = saved(tmp_path)
    made = compiled(file, stay=True)
    made(batch(0))
    store: HostStore = made.megatrain.engine.store
    layouts = [placed.layout for placed in store._placed.values()]
    out = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8)
    store.prefetch(layouts[0], out)
    os.truncate(file, 0)
    with pytest.raises(WeightsError, match=r"`.*model.safetensors` can't be read any more while frozen weights"):
        store.prefetch(layouts[0], out)


def test_a_file_that_is_removed_or_replaced_stays_readable(tmp_path: Path):
    file = saved(tmp_path)
    usual = stepping(compiled(file, stay=False))
    steps = [stepping(compiled(file, stay=True)) for _ in range(2)]
    expected = losses(usual)
    assert losses(steps[0], range(2)) == losses(steps[1], range(2)) == expected[:2]
    other = tmp_path / "other"
    other.write_bytes(bytes(file.stat().st_size))
    other.replace(file)
    assert losses(steps[0], range(2, 4)) == expected[2:]
    file.unlink()
    assert losses(steps[1], range(2, 4)) == expected[2:]


def test_a_run_resumes_from_its_checkpoint_in_place_and_saves_over_it(tmp_path: Path):
    file, folder = saved(tmp_path), tmp_path / "run"
    first = stepping(compiled(file, stay=False))
    losses(first, range(2))
    first.save(folder)
    made = compiled(folder, stay=True, example_args=(batch(0),))
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    options: Any = {"loss": lambda out, _: out.square().mean()}
    step = megatrain.TrainStep.load(folder, made, torch.optim.AdamW(trained, lr=1e-2), **options)
    (weights,) = folder.glob("model*.safetensors")
    assert written_bytes(weights) == 0
    assert losses(step, range(2, 4)) == losses(first, range(2, 4))
    step.save(folder)
    assert losses(step, range(4, 6)) == losses(first, range(4, 6))
    # The checkpoint that was replaced is in no folder any more, and the maps still have it.
    assert made.megatrain.engine.in_files == frozen(made).keys()
    assert not any(is_in(weights, parameter) for parameter in frozen(made).values())
    assert megatrain.files.load(folder).weights.keys() == made.state_dict().keys()


def test_a_folder_that_cannot_be_written_is_as_good(tmp_path: Path):
    file = saved(tmp_path)
    expected = losses(stepping(compiled(file, stay=False)))
    file.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert losses(stepping(compiled(file, stay=True))) == expected
    finally:
        tmp_path.chmod(0o755)


def test_a_file_that_changed_since_compile_is_refused_before_it_is_used(tmp_path: Path):
    file = saved(tmp_path)
    made = compiled(file, stay=True)
    os.utime(file, ns=(1, 1))
    with pytest.raises(WeightsError, match="was changed after compile"):
        made(batch(0))
    file.unlink()
    with pytest.raises(WeightsError, match=r"can't be read as safetensors: .*No such file"):
        made(batch(0))
    assert all(parameter.is_meta for parameter in made.parameters())


# -- less memory than weights ---------------------------------------------------------------------------------

LIMIT, LAYERS, LAYER_WIDTH = 384 << 20, 64, 2176

SCRIPT = """
import hashlib, json, sys, warnings
from pathlib import Path
group, file = sys.argv[1:]
if group:
    Path(group, "cgroup.procs").write_text("0")
warnings.simplefilter("ignore")
import torch
from tests.runtime.in_files import batch, compiled, losses, stepping
made = compiled(Path(file), stay=False, width=WIDTH, depth=DEPTH, memory="64MiB")
found = losses(stepping(made), range(2), WIDTH)
digest = hashlib.sha256()
for name, tensor in made.state_dict().items():
    if "base" not in name:
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
print(json.dumps([found, digest.hexdigest(), len(made.megatrain.engine.in_files)]))
"""


@pytest.mark.nightly
def test_a_model_of_three_times_the_memory_of_a_control_group_has_the_bits_of_the_run_in_memory(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    layer = net(LAYER_WIDTH, 1).state_dict()
    save_file({f"{i}{name[1:]}": t + i / 64 for i in range(LAYERS) for name, t in layer.items()}, file)
    assert file.stat().st_size > 3 * LIMIT

    def run(group: str) -> tuple[list[float], str, int]:
        script = SCRIPT.replace("WIDTH", str(LAYER_WIDTH)).replace("DEPTH", str(LAYERS))
        found = subprocess.run(
            [sys.executable, "-c", script, group, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert found.returncode == 0, found.stderr[-2000:] or found.returncode
        return tuple(json.loads(found.stdout))

    with control_group(LIMIT) as group:
        *limited, num_left = run(str(group))
    *usual, num_in_memory = run("")
    assert limited == usual
    assert (num_left, num_in_memory) == (2 * LAYERS, 0)
