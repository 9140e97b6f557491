"""Files that other tools write from a compiled model hold every tensor, and each tensor alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

import megatrain
from tests.comparing import assert_same
from tests.tools.models import IDS, llama, values


def trained(model: torch.nn.Module, **options: Any) -> Any:
    """Compiles a model and takes one step, so that its state lies in the host store."""
    compiled = megatrain.compile(model, device="cpu", **{"transfer": "copy", **options})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    megatrain.TrainStep(compiled, optimizer)({"input_ids": IDS, "labels": IDS})
    return compiled


# What these libraries deprecate in one another is theirs to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("lowered_once"),  # of few models
]


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("options", [{}, {"transfer": "bind"}, {"precision": "bf16"}, {"block_bytes": 2048}], ids=str)
def test_each_tensor_of_state_has_a_storage_of_its_own_bytes(options: dict[str, Any]):
    model = llama()
    trained(model, **options)
    storages = [tensor.untyped_storage() for tensor in model.state_dict().values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [t.nbytes for t in model.state_dict().values()]


def test_tied_parameters_share_one_storage():
    model = llama(is_tied=True)
    trained(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("is_tied", [False, True])
def test_accelerate_saves_and_loads_every_tensor(tmp_path: Path, is_tied: bool):
    model = llama(is_tied=is_tied)
    compiled = trained(model)
    expected = values(model)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(compiled, str(tmp_path / "model"))
    found = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert_same(found, {k: t for k, t in expected.items() if k in found})
    assert len(found) == len(expected) - is_tied
    prepared = accelerator.prepare(compiled)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert_same(values(model), expected)
    assert torch.equal(prepared(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("is_tied", [False, True])
def test_safetensors_saves_a_compiled_model(tmp_path: Path, is_tied: bool):
    model = llama(is_tied=is_tied)
    compiled = trained(model)
    for name, module in (("model", model), ("compiled", compiled)):
        safetensors.torch.save_model(module, str(tmp_path / name))
        other = llama(is_tied=is_tied)
        safetensors.torch.load_model(other, str(tmp_path / name))
        assert_same(values(other), values(model))


def test_torch_save_of_one_tensor_writes_that_tensor_alone():
    model = llama()
    trained(model)
    weight = model.model.norm.weight.detach()
    assert saved_bytes({"weight": weight}) == saved_bytes({"weight": weight.clone()})


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.19's, for a model without a name
def test_an_adapter_is_saved_alone(tmp_path: Path):
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trained(model)
    adapter = {key: tensor for key, tensor in model.state_dict().items() if "lora_" in key}
    assert saved_bytes(adapter) == saved_bytes({key: tensor.clone() for key, tensor in adapter.items()})
    model.save_pretrained(str(tmp_path / "peft"))
    found = safetensors.torch.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert_same({k: t for k, t in found.items()}, {k.replace(".default", ""): t for k, t in adapter.items()})


def test_memory_of_parameters_is_still_one_arena():
    """A storage of its own is no copy: what is written through the parameter is what the next call streams."""
    model = llama()
    compiled = trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits)
