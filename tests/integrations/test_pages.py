"""The code of docs/trainers.md and docs/plugins.md runs (verl, LLaMA-Factory), axolotl's plugin, and a hub.

verl's engine has a stand-in here, which needs none of verl's libraries; that its names are verl's own is what a test
says that runs where verl is installed.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import LlamaForCausalLM

import megatrain
from megatrain.errors import OptionError
from megatrain.integrations import axolotl as plugin
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, SAVED, TWO, Scenario, assert_streams_as_stock, codes, llama, run
from tests.integrations.test_peft import lora
from tests.integrations.words import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


CODE = {name: codes("plugins.md", f"from {name}.")[0] for name in ("llamafactory", "verl")}


def test_the_snippets_train_save_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script, mixin, resumed, _ = codes("trainers.md")  # the last one runs under torchrun: test_several.py
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
    assert 'memory="20GiB"' in CODE["verl"]
    exec(compile(CODE["verl"].replace('memory="20GiB"', "**options"), "plugins.md", "exec", dont_inherit=True), names)
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


# -- LLaMA-Factory ----------------------------------------------------------------------------------------------------


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


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"save_steps": 2}])
def test_llama_factorys_trainer_has_the_stock_runs_bits(options: dict[str, Any], tmp_path: Path) -> None:
    trainers: Any = pytest.importorskip(
        "llamafactory.v1.trainers.sft_trainer", reason="needs a checkout of LLaMA-Factory: PYTHONPATH=LLaMA-Factory/src"
    )
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
        sum(entry.stream == "compute" for entry in recording.issued) >= 3 * 2 * 4 * 2
    )  # forwards and backwards of four blocks


# -- axolotl ----------------------------------------------------------------------------------------------------------

NEEDS = "needs axolotl: pip install axolotl, in an environment of its own"


class Settings(dict[str, Any]):
    """As axolotl's configuration answers: None for what isn't there."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def manager() -> Any:
    """axolotl's own manager of plugins, with ours."""
    base = pytest.importorskip("axolotl.integrations.base", reason=NEEDS)
    found = base.PluginManager.get_instance()
    found.plugins.clear()
    found.register(f"{plugin.__name__}.MegatrainPlugin")
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "make"),
    [({**TWO, "max_grad_norm": 0.5}, lora()), ({**SAVED, "embedding_lr": 1e-3, "include_tkps": True}, llama)],
)
def test_axolotls_trainer_has_the_stock_runs_bits(
    options: dict[str, Any], make: Any, manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = pytest.importorskip("axolotl.core.trainers", reason=NEEDS)
    arguments = pytest.importorskip("axolotl.core.training_args", reason=NEEDS)
    datasets = pytest.importorskip("datasets", reason=NEEDS)
    kind = manager.get_trainer_cls(Settings())
    assert kind.__mro__[2] is trainers.AxolotlTrainer
    rows = datasets.Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in RAGGED])
    scenario = Scenario(
        {"model_type": "llama", **options}, make, rows.with_format("torch"), kind=trainers.AxolotlTrainer,
        arguments=arguments.AxolotlTrainingArguments,
    )  # fmt: skip
    # What the plugin returns, in place of what `assert_streams_as_stock` would make of the stock class.
    monkeypatch.setattr("tests.integrations.runs.streamed_kind", lambda stock: kind)
    assert_streams_as_stock(scenario, tmp_path)


@pytest.mark.parametrize("name", ["rl", "reward_model", "trainer_cls", "layer_offloading", "deepspeed"])
def test_what_has_another_trainer_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"axolotl's `{name}` "):
        plugin.MegatrainPlugin().get_trainer_cls(Settings({name: "something"}))


def test_a_model_on_the_device_is_refused() -> None:
    made = plugin.MegatrainPlugin()
    made.post_model_load(Settings(), llama())
    made.post_model_load(Settings(), torch.nn.Linear(2, 2, device="meta"))


# -- a hub ------------------------------------------------------------------------------------------------------------


OWN = ("optimizer.pt", "scheduler.pt", "megatrain/")
"""What differs in a checkpoint: docs/trainers.md."""


class Hub:
    """Notes what is uploaded, in the place of a hub on the network."""

    def __init__(self) -> None:
        self.pushed: list[Any] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(
        self, *, folder_path: str, commit_message: str, path_in_repo: str = "", ignore_patterns: Any = (), **_: Any
    ) -> Any:
        folder = Path(folder_path)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        names = [name for name in names if not any(fnmatch.fnmatch(name, each) for each in ignore_patterns)]
        tensors = {
            name: safetensors.torch.load_file(folder / name)
            for name in names
            if name.endswith(".safetensors") and not name.startswith(OWN)
        }
        kept = [name for name in names if not name.startswith(OWN) and not name.startswith("runs/")]
        self.pushed.append((path_in_repo, commit_message, kept, tensors))
        done: Future[str] = Future()
        done.set_result("pushed")
        return done


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "make"), [("end", llama), ("every_save", lora()), ("all_checkpoints", llama)])
def test_the_files_of_the_stock_trainer_are_pushed(
    strategy: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "push_to_hub": True, "hub_strategy": strategy, "hub_model_id": "mine", **SAVED, "save_steps": 2, **TWO,
        "max_steps": 4,
    }  # fmt: skip
    pushes, recording = list[Any](), megatrain.Recording()
    for streams in (False, True):
        hub = Hub()
        monkeypatch.setattr("transformers.trainer.hf_api", lambda hub=hub: hub)
        scenario = Scenario(
            options, model=make, rows=RAGGED, more=lambda model: {"processing_class": tokenizer()},
            streaming={"transfer": "copy", "recording": recording}, after=lambda t: t.push_to_hub("the last") and None,
        )  # fmt: skip
        run(scenario, tmp_path / str(streams), streams=streams)
        pushes.append(hub.pushed)
    assert len(pushes[0]) >= (1 if strategy == "end" else 3)
    assert any("safetensors" in name for _, _, names, _ in pushes[0] for name in names)
    assert_same(pushes[1], pushes[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0
