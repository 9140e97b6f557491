"""Scripts with TRL's trainers: a trainer that streams leaves the stock run's bits. Needs `pip install -e .[users]`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from peft import LoraConfig
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import megatrain
from tests.integrations.runs import EVAL, TWO, Ran, Scenario, assert_streams_as_stock, kept, llama, on
from tests.integrations.test_peft import experts, of_stacks
from tests.integrations.words import text, tokenizer

trl: Any = pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
datasets: Any = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
]
IS_NEW = Version(trl.__version__) >= Version("1.16")
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w1 {% generation %}{{ m['content'] }} </s> "
    "{% endgeneration %}{% else %}w2 {{ m['content'] }} {% endif %}{% endfor %}"
)


# -- rows -------------------------------------------------------------------------------------------------------------


def table(**columns: Callable[[int], Any]) -> Callable[[], Any]:
    return lambda: datasets.Dataset.from_list([{key: make(i) for key, make in columns.items()} for i in range(16)])


def spaced(start: int, count: int) -> str:
    return " " + text(start, count)


def turns(*roles: str) -> Callable[[int], Any]:
    return lambda i: [{"role": role, "content": text(i + at, 2 + i % 4)} for at, role in enumerate(roles)]


PROMPT: dict[str, Any] = {"prompt": lambda i: text(i, 4)}
ANSWER: Any = lambda i: spaced(i + 1, 3 + i % 4)  # noqa: E731
texts = table(text=lambda i: text(i, 5 + i % 7))
prompts = table(**PROMPT)
answers = table(**PROMPT, completion=ANSWER)
preferences = table(**PROMPT, chosen=ANSWER, rejected=lambda i: spaced(i + 5, 4))
judged = table(**PROMPT, completion=ANSWER, label=lambda i: bool(i % 2))
chats = table(messages=turns("user", "assistant"))
asked = table(prompt=turns("user"))
# -- models, and what trainers get besides ----------------------------------------------------------------------------


def reward() -> Any:
    return llama(LlamaForSequenceClassification, num_labels=1)


def lora(task: str = "CAUSAL_LM", **more: Any) -> Any:
    given = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", **more}
    return LoraConfig(task_type=task, **given)


def named() -> Any:
    """A model that was read from a folder, from where TRL reads its reference."""
    import tempfile

    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def talks(model: Any) -> Mapping[str, Any]:
    words = tokenizer()
    words.chat_template = TURNS
    return {"processing_class": words}


def samples(*, state: Any, model: Any, processing_class: Any, **_: Any) -> Any:
    """Looks at texts between the steps, as TRL's own callbacks do."""
    ids = processing_class(text(state.global_step, 4), return_tensors="pt")["input_ids"]
    return model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


def short(completions: Any, **_: Any) -> list[float]:
    """Rewards short answers."""
    return [-float(len(completion)) for completion in completions]


def given(**keywords: Any) -> Callable[[Any], Mapping[str, Any]]:
    """Keywords of a trainer; those that are functions make them anew for each run."""
    return lambda model: {key: value() if callable(value) else value for key, value in keywords.items()}


def rewarded(*functions: Any, **more: Any) -> Callable[[Any], Mapping[str, Any]]:
    return lambda model: {"reward_funcs": list(functions) or short, **more}


def script(name: str, rows: Any, *, more: Any = None, options: Any = None, folder: str = "", **fields: Any) -> Any:
    """A script of `trl.<name>Trainer`, or of one that TRL calls experimental."""

    def made() -> Scenario:
        place: Any = trl if hasattr(trl, f"{name}Trainer") and not folder else None
        place = place or importlib.import_module(f"trl.experimental.{folder or name.lower()}")
        return Scenario(
            {"bf16": False, **(options or {})}, rows=rows(), kind=getattr(place, f"{name}Trainer"),
            arguments=getattr(place, f"{name}Config"),
            more=lambda model: {"processing_class": tokenizer(), **({} if more is None else more(model))}, **fields,
        )  # fmt: skip

    return made


FOUR = {"per_device_train_batch_size": 4}
REFERENCE = given(ref_model=llama)
STREAMED = given(ref_model=lambda: megatrain.compile(llama(), device="cpu", transfer="copy"))
ADAPTED = given(peft_config=lora)
AGAIN = "the loss calls the model more than once"
CHANGES = "the code before the call of the model changes"
SAMPLED = {
    "num_generations": 2, "max_completion_length": 4, "temperature": 1.0, "generation_batch_size": 4, "beta": 0.0,
    **FOUR,
}  # fmt: skip


def sft(rows: Any = texts, more: Any = None, model: Any = llama, **options: Any) -> Any:
    return script("SFT", rows, more=more, model=model, options={**TWO, **options})


def dpo(more: Any = REFERENCE, model: Any = llama, reason: str | None = None, **options: Any) -> Any:
    return script("DPO", preferences, more=more, model=model, reason=reason, options={**TWO, **options})


def grpo(more: Any = None, model: Any = llama, rows: Any = prompts, **options: Any) -> Any:
    return script("GRPO", rows, more=more or rewarded(), model=model, options={**SAMPLED, **options})


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "sft, its defaults": sft(bf16=True, gradient_checkpointing=True),
    "sft, packing": sft(packing=True, eval_packing=True, max_length=16, **EVAL),
    "sft, adapters of stacks": sft(more=given(peft_config=lambda: of_stacks()().peft_config["default"]), model=experts),
    "sft, assistant only, packed": sft(chats, talks, assistant_only_loss=True, packing=True, max_length=16),
    "sft, texts between the steps": script("SFT", texts, more=on("step_end", samples), after=kept, options=TWO),
    "sft, its own loss": script(
        "SFT", texts, options=TWO, reason=AGAIN,
        more=lambda model: {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None:
                            outputs.logits.float().logsumexp(-1).mean()},
    ),
    "dpo, a reference that streams": dpo(STREAMED, loss_type="ipo"),
    "dpo, lora": dpo(ADAPTED, reason=AGAIN),
    "dpo, of several": dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], **EVAL),
    "dpo, a reference that follows": dpo(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5),
    "kto": script("KTO", judged, more=REFERENCE, options={**FOUR, **TWO, **EVAL}),
    "reward": script("Reward", preferences, model=reward, options={**TWO, **EVAL}),
    "grpo, lora, a penalty": grpo(rewarded(peft_config=lora()), beta=0.1),
    "grpo, accumulation": script(
        "GRPO", prompts, more=rewarded(), options={**SAMPLED, **TWO, "per_device_train_batch_size": 2}, reason=CHANGES
    ),
    "grpo, a model as reward": grpo(given(reward_funcs=reward, reward_processing_classes=tokenizer), loss_type="bnpo"),
    "grpo, chats, evaluated": grpo(lambda model: {**talks(model), "reward_funcs": short}, rows=asked, **EVAL),
    "orpo, lora": script("ORPO", preferences, more=ADAPTED, options=TWO),
    "gkd": script(
        "GKD", chats, more=lambda model: {**talks(model), "teacher_model": llama(num_hidden_layers=1)},
        options={"lmbda": 0.0, **TWO}, reason="the loss draws random numbers before it calls the model",
    ),
    "online dpo": script(
        "OnlineDPO", prompts, options={"max_new_tokens": 4}, folder="online_dpo",
        more=lambda model: {"reward_funcs": short, "ref_model": llama()},
    ),
}  # fmt: skip
# TRL 1.10's own run ends with an AttributeError.
OF_NEWER = ("sft, its own loss",)


def assert_generated(found: Ran) -> None:
    walk = found.trainer.model.megatrain.walks.latest
    assert walk.what == "generate()"
    assert walk.num_prefetches > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trainer_of_trl_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    if name in OF_NEWER and not IS_NEW:
        pytest.skip("needs trl 1.16")
    found = assert_streams_as_stock(SCENARIOS[name](), tmp_path)
    if name.startswith(("grpo", "rloo")):
        assert_generated(found)


def test_a_trainer_of_trl_loads_a_model_by_its_name(tmp_path: Path) -> None:
    folder = named().name_or_path
    assert_streams_as_stock(script("SFT", texts, more=lambda model: {"model": folder}, options=TWO)(), tmp_path)


@pytest.mark.skipif(not IS_NEW, reason="the fused head came with trl 1.16")
def test_a_fused_head_of_the_rows_with_labels_alone_has_the_stock_runs_bits_and_holds_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the number of these rows is another for each batch."""
    with monkeypatch.context() as patched:
        patched.setattr("trl.trainer.utils._use_triton", lambda device: True)
        assert_streams_as_stock(script("SFT", answers, options=TWO)(), tmp_path / "rows")
    # A budget that the logits of a batch don't fit into, with smaller tiles than TRL's, which are for large cards.
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 16)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 512)
    words, budget = 8192, 2 << 20
    wide = script(
        "SFT", texts, model=lambda: llama(vocab_size=words, hidden_size=8, intermediate_size=16),
        options={"per_device_train_batch_size": 8, "max_length": 16, "packing": True, "max_steps": 2},
        streaming={"memory": budget},
    )  # fmt: skip
    found = assert_streams_as_stock(wide(), tmp_path / "logits")
    assert found.trainer.model.megatrain.peak_bytes <= budget < 8 * 15 * words * 4
