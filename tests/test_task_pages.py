"""The code of the pages in docs/tasks runs, and prints, refuses and takes what these pages say.

Plans are of the models that the pages name, on meta. Scripts train a tiny model in place of the page's, with shorter
texts and fewer steps: a test changes `LENGTH` and `max_steps` of a script, and nothing else. The trainer's step must
have the schedule of a plan, so what a page plans is what its script takes.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import megatrain
from tests.comparing import assert_same

FOLDER = Path(__file__).parents[1] / "docs" / "tasks"
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LENGTH, WORDS = 16, 64
BUDGET = "20GiB"
MICRO_BATCHES = 8


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    return [text for found, text in BLOCKS.findall(page(name)) if found == language]


def prose(name: str) -> str:
    """The text of a page, without its code, in one line."""
    return " ".join(BLOCKS.sub("", page(name)).split())


def with_options(name: str, **options: str) -> str:
    """The code of a page's plan with these options in place of its own."""
    code = blocks(name, "python")[0].replace("print(plan)", "")
    for option, value in options.items():
        code = re.sub(rf"^    {option}=.*\n", "", code, flags=re.MULTILINE)
        code = code.replace('    optimizer="AdamW",\n', f'    optimizer="AdamW",\n    {option}={value},\n')
    return code


def execute(code: str, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs code of a page, so that errors can show its lines."""
    found = {"__name__": "page"} if found is None else found
    linecache.cache["model.py"] = (len(code), None, code.splitlines(keepends=True), "model.py")
    exec(compile(code, "model.py", "exec"), found)
    return found


def after(diff: str) -> str:
    """The code that a change of a page leaves."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-")


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model and a text where the pages have theirs, on a machine without an accelerator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = {f"w{number}": number for number in range(WORDS)}
    plain = Tokenizer(WordLevel(words, unk_token="w0"))  # pyright: ignore[reportCallIssue]
    plain.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    for name in ("8b", "32b", "70b"):
        tiny().save_pretrained(tmp_path / "models" / name)
        tokenizer.save_pretrained(tmp_path / "models" / name)
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * number % 61}" for number in range(40 * LENGTH)))
    yield tmp_path
    linecache.cache.pop("model.py", None)


@pytest.mark.parametrize(
    "name",
    [
        "eight-billion-on-24-gb",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("lora-on-32b", "lora-on-70b", "long-documents")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_on_a_page_is_the_one_that_is_made(name: str, capsys: pytest.CaptureFixture[str]):
    found = execute(blocks(name, "python")[0])
    (shown,) = (text for text in blocks(name, "text") if text.startswith("plan: "))
    # A line "..." of a page stands for lines that are left out.
    printed = capsys.readouterr().out
    assert re.fullmatch(re.escape(shown).replace(re.escape("  ...\n"), r"(?:  .*\n)+"), printed), printed
    assert found["plan"].device_memory == 20 * 2**30
    moved = re.search(r"A step moves (\S+ GiB) to the card and (\S+ GiB) back", prose(name))
    assert moved is None or f"moves: {moved[1]} to the device, {moved[2]} to the host" in shown
    assert (moved is not None) == (name == "eight-billion-on-24-gb")


@pytest.mark.nightly
def test_the_smaller_card_takes_what_the_page_says():
    name = "eight-billion-on-24-gb"
    said = re.search(
        r'With `device_memory="(\w+)"` the same step takes (\S+ GiB) of the card and (\S+ GiB) of the host: (\d+)',
        prose(name),
    )
    assert said is not None
    memory, device, host, parked = said.groups()
    shown = str(execute(with_options(name, device_memory=f'"{memory}"'))["plan"])
    assert f"device: {device} of" in shown
    assert f"host: {host} of" in shown
    assert f"parks {parked} activations" in shown


@pytest.mark.nightly
def test_state_in_a_file_takes_what_the_page_says():
    name = "eight-billion-on-24-gb"
    text = " ".join(page(name).split())
    takes, moves = r'`host_memory="(\w+)"` (?:it|the same step) takes (\S+ GiB)', r"reads and writes (\S+ GiB)"
    said = re.findall(rf"{takes}.*?{moves}; 1,000 steps write (\S+ TB)", text)
    step = re.search(r"this one takes (\S+ s), or (\S+ s), at an assumed 3.5 GB/s", text)
    assert len(said) == 2
    assert step is not None
    code = with_options(name, offload="True", hardware='"rtx-4090"')
    for (memory, host, moved, written), step_s, kind in zip(said, step.groups(), ("AdamW", "AdamW8bit"), strict=True):
        own = re.sub(r'host_memory="\w+"', f'host_memory="{memory}"', code.replace('"AdamW"', f'"{kind}"'))
        shown = str(execute(own)["plan"])
        assert f"host: {host} of" in shown
        assert f"reads and writes {moved}" in shown
        assert f"1,000 steps write {written}" in shown
        assert f"time: step {step_s};" in shown


LONG = "long-documents"
ROWS = re.findall(r"^\| (\d+) \| (\w+) \| (\S+) \| (\S+ GiB) \| (\S+ GiB) \| (\S+ GiB) \|$", page(LONG), re.MULTILINE)
assert ROWS, "the table of the page is found"


@pytest.mark.nightly
@pytest.mark.parametrize(("tokens", "memory", "activations", "device", "parks", "host"), ROWS)
def test_another_plan_of_a_long_text_has_the_figures_of_its_row(
    tokens: str, memory: str, activations: str, device: str, parks: str, host: str
):
    options = {"activations": activations.strip("`"), "device_memory": f'"{memory}"', "host_memory": '"300GiB"'}
    shown = str(execute(with_options(LONG, **options).replace("32768", tokens))["plan"])
    assert f"device: {device} of" in shown
    assert f"host: {host} of" in shown
    assert re.search(rf"^  parks +\d+ +{parks} ", shown, re.MULTILINE)


@pytest.mark.nightly
def test_a_long_text_without_chunks_takes_what_the_page_says():
    said = re.search(r"without chunks the plan above needs (\S+ GiB)", prose(LONG))
    assert said is not None
    shown = str(execute(with_options(LONG, chunking='"never"'))["plan"])
    assert shown.splitlines()[1].startswith(f"device: {said[1]} of 20.00 GiB: doesn't fit")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("eight-billion-on-24-gb", "bf16"), ("lora-on-32b", "fp32"), ("lora-on-70b", "fp32")],
)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_script_trains_with_the_step_that_a_plan_of_its_model_has(name: str, precision: str, machine: Path):
    script = blocks(name, "python")[1]
    assert script.count(", 2048\n") == script.count("max_steps=100") == 1
    found = execute(script.replace(", 2048\n", f", {LENGTH}\n").replace("max_steps=100", "max_steps=2"))
    step = found["trainer"].train_step
    assert step.progress.count == 2
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    plan = megatrain.plan(
        found["model"],
        device_memory=BUDGET,
        optimizer="AdamW",
        precision=precision,
        micro_batches=MICRO_BATCHES,
        max_grad_norm=1.0,
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    # The trainer gives the loss a count of targets, which is a tensor of 8 bytes.
    assert abs(plan.schedule.device_bytes - step.schedule.device_bytes) <= 8
    assert plan.schedule.ticks == step.schedule.ticks
    assert plan.schedule.host_bytes == step.schedule.host_bytes
    if name.startswith("lora"):
        folder = name.removeprefix("lora-on-")
        assert (machine / "runs" / folder / "adapters" / "adapter_model.safetensors").exists()
        dtypes = {(p.requires_grad, p.dtype) for p in found["model"].parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_long_text_trains_in_chunks(machine: Path, capsys: pytest.CaptureFixture[str]):
    found = execute(
        blocks(LONG, "python")[1].replace(
            "small = ",
            "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\nimport megatrain\n\nsmall = ",
            1,
        )
    )
    assert "linear, cross_entropy; 256 rows at a time)" in capsys.readouterr().out
    saved = LlamaForCausalLM.from_pretrained(machine / "runs" / "long")
    assert_same(dict(saved.state_dict()), {k: t.detach() for k, t in found["model"].state_dict().items()})
    assert found["compiled"].megatrain.peak_bytes <= found["step"].schedule.device_bytes
    assert found["step"].schedule.device_bytes <= 20 << 20
    ids = found["ids"]
    logits = found["model"](input_ids=ids).logits.detach()[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    execute(blocks(LONG, "python")[2], found)
    assert "linear, cross_entropy(label_smoothing=0.1); 256 rows at a time)" in capsys.readouterr().out
    assert torch.equal(found["loss"], expected)


@pytest.mark.filterwarnings("ignore")
def test_the_changed_scripts_train_and_what_was_left_is_refused(machine: Path):
    name = "from-deepspeed-or-fsdp"
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(WORDS, (32, LENGTH))]
    torch.save(rows, "rows.pt")
    with_trainer, with_loop = (after(diff) for diff in blocks(name, "diff"))
    found = execute(with_trainer)
    assert found["trainer"].train_step.progress.count == 2
    (wrong,), (shown,) = blocks(name, "python"), blocks(name, "text")
    assert refusal(wrong, {**found, "model": tiny()}) == shown
    batches = [{name: row[None] for name, row in each.items()} for each in rows[:2]]
    own = {"model": tiny(), "updates": [batches]}
    assert execute(with_loop, own)["step"].progress.count == 1
    assert (machine / "runs" / "moved-loop" / "checkpoint.json").exists()


def refusal(code: str, found: dict[str, Any]) -> str:
    with pytest.raises(megatrain.MegatrainError) as caught:
        execute(code, found)
    return f"{type(caught.value).__name__}: {caught.value}\n"


def test_each_refusal_is_as_shown_and_each_way_out_works():
    found: dict[str, Any] = {"__name__": "page"}
    parts = BLOCKS.findall(page("my-model-is-refused"))
    num_refused = 0
    for (language, code), (next_language, shown) in zip(parts, [*parts[1:], ("", "")], strict=True):
        if language == "python" and next_language == "text":
            assert refusal(code, found) == shown
            num_refused += 1
        elif language == "python":
            execute(code, found)
    assert num_refused == 7


def test_an_adapter_gets_kohyas_names_and_its_scale():
    """Read as those tools do: `lora_up @ lora_down * alpha / rank` is what the adapter adds."""
    from peft import LoraConfig, inject_adapter_in_model

    model = torch.nn.Sequential()
    model.add_module("block", torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)))
    weights = {f"block_{name}": model.get_submodule(f"block.{name}").weight.detach().clone() for name in "02"}  # pyright: ignore
    adapted: Any = inject_adapter_in_model(
        LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules=["0", "2"]), model
    )
    found = execute(blocks("diffusion", "python")[0])["with_kohyas_names"](adapted, 8)
    assert len(found) == 6
    for layer, weight in weights.items():
        down, up, alpha = (
            found[f"lora_transformer_{layer}.{part}"] for part in ("lora_down.weight", "lora_up.weight", "alpha")
        )
        merged = adapted.get_submodule(layer.replace("_", "."))
        merged.merge()
        torch.testing.assert_close(weight + up @ down * (alpha / len(down)), merged.weight)


def test_the_pages_are_short_and_linked_from_the_readme():
    readme = (FOLDER.parents[1] / "README.md").read_text()
    for path in FOLDER.glob("*.md"):
        assert f"(docs/tasks/{path.name})" in readme
        assert len(BLOCKS.sub("", path.read_text()).splitlines()) < 110, path.name
