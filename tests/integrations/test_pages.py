"""The code of docs/trainers.md and docs/plugins.md runs: trainers, and verl.

verl's engine has a stand-in here, which needs none of verl's libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import codes

pytestmark = pytest.mark.filterwarnings("ignore")


CODE = codes("plugins.md", "from verl.")[0]


def test_the_snippets_train_save_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script, mixin, resumed = codes("trainers.md")  # the first one runs under torchrun too: test_several.py
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(script, "trainers.md", "exec"), found)
    assert found["trainer"].train_step.progress.count == 4
    weights = dict(LlamaForCausalLM.from_pretrained("run/checkpoint-4").state_dict())
    assert_same(weights, {k: t.detach() for k, t in found["trainer"].model.state_dict().items()})
    exec(compile(mixin, "trainers.md", "exec"), found)
    assert found["StreamedTrainer"].__mro__[1].__name__ == "Streamed"
    found["arguments"].max_steps = 6
    exec(compile(resumed, "trainers.md", "exec"), found)
    assert found["again"].state.global_step == 6
    assert found["again"].train_step.progress.count == 6


# -- verl -------------------------------------------------------------------------------------------------------------

POINTS = torch.linspace(-1.0, 1.0, 6 * 4 * 32).reshape(6, 4, 32)
Found = dict[tuple[str, str, str], type]


class Engine:
    """Calls what it is made of in the order of verl's, on one process."""

    _is_lora, num_processes = False, 1

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build_module = build

    def initialize(self) -> None:
        self.module = self._build_fsdp_module(self._build_module())
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.to(device="cpu", model=True, optimizer=True, grad=True)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        return module

    def get_data_parallel_size(self) -> int:
        return self.num_processes

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if isinstance(self.module, megatrain.CompiledModule):
            raise AssertionError("verl moves a module that is no FSDP module")

    def train_batch(self, data: torch.Tensor, loss_function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        losses = []
        for rows in data:
            loss = loss_function(self.module(rows)) / len(data)
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=0.5)
        self.optimizer.step()
        return {"losses": losses, "norm": norm.item()}

    def get_per_tensor_param(self, **kwargs: Any) -> Any:
        return iter(self.module.state_dict().items()), None

    def save_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        raise AssertionError("writes an FSDP module")

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        raise AssertionError("reads an FSDP module")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's code defines, and `registered`."""
    registered: Found = {}

    @dataclass
    class Config:
        strategy: str = "fsdp"

        def __post_init__(self) -> None:
            assert self.strategy in ("fsdp", "fsdp2"), f"strategy {self.strategy} not supported"

    class Registry:
        @classmethod
        def register(cls, model_type: str, backend: str, device: Any = "cuda") -> Callable[[type], type]:
            def note(kind: type) -> type:
                registered.update({(model_type, backend, name): kind for name in device})
                return kind

            return note

    here = {
        "verl.workers.config": {"FSDPEngineConfig": Config},
        "verl.workers.engine.base": {"EngineRegistry": Registry},
        "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": Engine},
    }
    for name in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.fsdp", *here):
        module = ModuleType(name)
        vars(module).update(here.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, Any] = {"__name__": "plugins", "registered": registered}
    monkeypatch.setitem(sys.modules, "plugins", ModuleType("plugins"))  # a dataclass looks its module up
    # In a budget of the page's size nothing of a model this small would have to stream.
    assert 'memory="20GiB"' in CODE
    exec(compile(CODE.replace('memory="20GiB"', "**options"), "plugins.md", "exec", dont_inherit=True), names)
    return names


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)), nn.Linear(32, 1))


def test_the_engine_streams_with_the_plain_engines_bits(page: dict[str, Any]) -> None:
    assert page["MegatrainConfig"]().strategy == "megatrain"
    kind = page["Megatrain"]
    assert page["registered"] == {("language_model", "megatrain", device): kind for device in ("cuda", "cpu")}
    recording = megatrain.Recording()
    page["options"] = {"memory": "24KiB", "device": "cpu", "transfer": "copy", "recording": recording}
    found: list[Any] = []
    for engine in (Engine(model), kind(model)):
        engine.initialize()
        log = [engine.train_batch(data, lambda result: result.square().mean()) for data in POINTS.split(2)]
        found.append((log, {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}))
    assert_same(found[1], found[0])
    # Forwards and backwards of six blocks and a head, in three updates of two micro-batches.
    assert sum(entry.stream == "compute" for entry in recording.issued) >= 3 * 2 * 7 * 2


def test_what_the_engine_lacks_is_refused(page: dict[str, Any]) -> None:
    page["options"] = {"device": "cpu", "transfer": "copy"}
    engine = page["Megatrain"](model)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(NotImplementedError, match="checkpoints"):
            call("folder")
    engine._is_lora = True
    with pytest.raises(NotImplementedError, match="adapters"):
        engine.initialize()
    engine._is_lora, engine.num_processes = False, 2
    with pytest.raises(NotImplementedError, match="several processes"):
        engine.initialize()
