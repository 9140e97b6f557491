"""Weights for an inference engine: what `compiled.megatrain.weights()` yields, and TRL's engine on the same card."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.integrations.hf import Streamed
from tests.comparing import assert_same
from tests.integrations.runs import llama
from tests.integrations.words import text, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, of what transformers will rename
IDS = torch.arange(16).reshape(2, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


def stepped(model: nn.Module) -> tuple[Any, Callable[[], object]]:
    """A compiled model after two steps, whose last updates are due, and what takes another step."""
    compiled = megatrain.compile(model, device="cpu", transfer="copy", memory="8MiB")
    step = megatrain.TrainStep(compiled, trained(model), max_grad_norm=0.1, spread=True)
    for _ in range(2):
        step(BATCH)
    assert step._setup.is_due
    return compiled, lambda: step(BATCH)


def eager(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    """A copy of the model after two steps, and what takes another step."""
    model = copy.deepcopy(model)
    optimizer = trained(model)

    def step() -> None:
        model(**BATCH).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return model, step


def taken(compiled: Any) -> dict[str, torch.Tensor]:
    """What an engine has copied."""
    found = [(name, tensor.clone()) for name, tensor in compiled.megatrain.weights()]
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def merged(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model without adapters, as peft merges them."""
    return copy.deepcopy(model).merge_and_unload().state_dict()


def assert_alike(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_same(expected[name], tensor, name)


def test_an_engine_gets_the_weights_after_due_updates_by_the_models_names():
    model = llama(tie_word_embeddings=True)
    model.register_buffer("kept", torch.arange(3.0))
    model.register_buffer("passing", torch.arange(3.0), persistent=False)
    other, go_on = eager(model)
    compiled, step = stepped(model)
    assert compiled.megatrain.engine.arena.nbytes
    found = taken(compiled)
    assert not compiled.megatrain.engine.arena.nbytes  # the slots are given back
    expected = other.state_dict()
    del expected["lm_head.weight"]  # which is tied
    assert_alike(found, expected)
    step()
    go_on()
    assert_alike(model.state_dict(), other.state_dict())


def test_nobody_trains_while_an_engine_is_filled():
    compiled, step = stepped(llama())
    filling = compiled.megatrain.weights()
    next(filling)
    for meanwhile in (step, lambda: compiled(IDS), lambda: taken(compiled)):
        with pytest.raises(ExecuteError, match=r"weights\(\) has yielded the last tensor"):
            meanwhile()
    filling.close()
    step()


def adapted(kind: str = "LoraConfig", **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        base = llama()
        torch.manual_seed(1)
        given = {"r": 2, "target_modules": ["q_proj", "v_proj"], **options}
        return peft.get_peft_model(base, getattr(peft, kind)(**given))

    return made


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": adapted(),
    "dora, of all layers": adapted(use_dora=True, target_modules="all-linear"),
    "and whole layers": adapted(modules_to_save=["lm_head"]),
    "loha": adapted("LoHaConfig"),
    "tokens": adapted(trainable_token_indices={"embed_tokens": [1, 5]}),
}


@pytest.mark.parametrize("name", ["lora", *(pytest.param(each, marks=pytest.mark.nightly) for each in [*ADAPTERS][1:])])
def test_layers_with_adapters_come_merged_and_stay_as_they_were(name: str):
    model = ADAPTERS[name]()
    other, go_on = eager(model)
    compiled, step = stepped(model)
    assert_alike(taken(compiled), merged(other))
    step()
    go_on()
    assert_alike(model.state_dict(), other.state_dict())


def test_what_cant_be_merged_is_refused_by_name():
    tied = peft.get_peft_model(llama(tie_word_embeddings=True), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ExecuteError, match=r"model\.lm_head` has adapters, and its weight is also that of `base_model"):
        taken(megatrain.compile(tied, device="cpu", transfer="copy"))
    with pytest.raises(ExecuteError, match=r"memory= allows 8\.00 KiB"):
        taken(megatrain.compile(ADAPTERS["lora"](), device="cpu", transfer="copy", memory="8KiB"))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ExecuteError, match="are prompts"):
        taken(megatrain.compile(peft.get_peft_model(llama(), prompts), device="cpu", transfer="copy"))


class Engine:
    """A stand-in for vLLM's `LLM`: it says what is called, and samples by the weights that were loaded.

    A sleeping engine has no weights, and takes none; that is what TRL relies on with `sleep(level=2)`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        del model, options
        self.calls: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.is_awake = True
        self.on_wake: Callable[[], object] = lambda: None
        self.filled: Callable[[dict[str, torch.Tensor]], object] = lambda loaded: None
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        worker = SimpleNamespace(model_runner=runner)
        config = SimpleNamespace(max_model_len=64)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker), model_config=config)

    def sleep(self, level: int) -> None:
        assert level == 2
        self.calls.append("sleep")
        self.is_awake = False
        self.loaded = {}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")
        self.on_wake()
        self.is_awake = True

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert self.is_awake
        self.loaded |= {name: tensor.clone() for name, tensor in weights}

    def reset_prefix_cache(self) -> None:
        self.calls.append("filled")
        self.filled(self.loaded)

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self.loaded
        del sampling_params, use_tqdm
        self.calls.append("generate")
        logprob = SimpleNamespace(logprob=-1.0, rank=1)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=[5, 6 + at % 3], logprobs=[{5: logprob}, {6 + at % 3: logprob}])],
            )
            for at, prompt in enumerate(prompts)
        ]


@pytest.fixture
def environment() -> Generator[None]:
    """TRL says in the environment that there is one rank, which processes of later tests would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", ["whole", "lora"])
def test_trls_engine_on_the_same_card_is_filled_between_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("trl")
    datasets: Any = pytest.importorskip("datasets")
    import trl
    from trl.generation import vllm_generation

    for attribute, value in {
        "is_vllm_available": lambda *_, **__: True, "LLM": Engine, "SamplingParams": lambda **given: given,
    }.items():  # fmt: skip
        monkeypatch.setattr(vllm_generation, attribute, value, raising=False)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_vllm_available", lambda *_, **__: True, raising=False)
    rows = datasets.Dataset.from_list([{"prompt": text(i, 4)} for i in range(8)])

    class Trainer(Streamed, trl.GRPOTrainer): ...

    model = llama() if name == "whole" else ADAPTERS["lora"]()
    arguments = trl.GRPOConfig(
        str(tmp_path), use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True, num_generations=2,
        max_completion_length=4, generation_batch_size=4, per_device_train_batch_size=4, max_steps=3, report_to=[],
        use_cpu=True, save_strategy="no", learning_rate=1e-2, beta=0.0, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, reward_funcs=lambda prompts, **_: [float(at % 3) for at, _ in enumerate(prompts)],
        args=arguments, train_dataset=rows, processing_class=tokenizer(), megatrain_transfer="copy",
    )  # fmt: skip
    engine = trainer.vllm_generation.llm
    slots, expected = list[int](), list[bool]()

    def plain() -> dict[str, torch.Tensor]:
        streamed = trainer.model.megatrain.model
        return streamed.state_dict() if name == "whole" else merged(streamed)

    first = {key: value.clone() for key, value in plain().items()}

    def filled(loaded: dict[str, torch.Tensor]) -> None:
        assert_alike(loaded, plain())
        expected.append(all(torch.equal(loaded[key], first[key]) for key in loaded))

    engine.on_wake = lambda: slots.append(trainer.model.megatrain.engine.arena.nbytes)
    engine.filled = filled
    trainer.train()
    assert engine.calls == ["sleep"] + ["wake weights", "filled", "wake kv_cache", "generate", "sleep"] * 3
    assert not any(slots)  # whenever the engine takes memory
    assert expected == [True, False, False]  # weights as at the start, and then trained ones
