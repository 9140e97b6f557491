"""A trainer that streams is verified against its class without megatrain: by a call, or by the command for a script."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback, TrainingArguments

import megatrain
from megatrain import cli
from megatrain.errors import ExecuteError, OptionError
from megatrain.integrations.hf import Streamed, Trainer
from megatrain.optim.updates import Updates
from megatrain.training.trainer import Running
from tests.comparing import assert_same
from tests.integrations import test_peft
from tests.integrations.runs import GIVEN, RAGGED, ROWS, llama, verified
from tests.integrations.test_trainer import POINTS, SCENARIOS, Plain
from tests.tiers import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]


def trainer(folder: Path, kind: Any = Trainer, arguments: Any = None, **keywords: Any) -> Any:
    made = TrainingArguments(str(folder), **{**GIVEN, "gradient_accumulation_steps": 2, **(arguments or {})})
    given = {"args": made, "train_dataset": ROWS, **keywords}
    given = given if "model" in given else {"model": llama(), **given}
    return kind(**{"megatrain_transfer": "copy", **given})


class Mine(Streamed, StockTrainer):
    """With methods of its own, which find those of the stock class by `super()`."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        return found

    def log(self, *args: Any, **kwargs: Any) -> None:
        super(Mine, self).log(*args, **kwargs)  # noqa: UP008


class Remembers(TrainerCallback):
    """A user's callback, with state and the trainer itself."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert kwargs["model"] is self.trainer.model
        self.seen.append(state.global_step)
        for group in kwargs["optimizer"].param_groups:
            group["weight_decay"] = 0.1 * len(self.seen)


def states(made: Any) -> Any:
    generators = torch.get_rng_state()
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}, generators


# -- equal -----------------------------------------------------------------------------------------------------------


def own_optimizers() -> dict[str, Any]:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2))}


def with_callback() -> dict[str, Any]:
    return {"callbacks": [Remembers()]}


class Numbers(IterableDataset[Any]):
    """Rows without a length, shuffled by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Any]:
        for place in torch.randperm(len(RAGGED), generator=self.generator).tolist():
            yield RAGGED[place]


CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "ragged, dropout": ({"seed": 5}, lambda: {"model": llama(attention_dropout=0.3), "train_dataset": RAGGED}),
    "own optimizer": ({"max_grad_norm": 0.1}, own_optimizers),
    "model_init": ({}, lambda: {"model": None, "model_init": lambda: llama()}),
    "callback": ({"eval_strategy": "steps", "eval_steps": 2}, lambda: {"eval_dataset": ROWS[:3], **with_callback()}),
    "iterable": ({"max_steps": 3}, lambda: {"train_dataset": Numbers()}),
}


@pytest.mark.parametrize("name", [name if name in ("ragged, dropout", "callback") else wide(name) for name in CASES])
def test_a_right_trainer_is_equal_and_stays_as_it_was(name: str, tmp_path: Path) -> None:
    arguments, more = CASES[name]
    made = trainer(tmp_path / "out", Mine, arguments, **more())
    callbacks = [each for each in made.callback_handler.callbacks if isinstance(each, Remembers)]
    for callback in callbacks:
        callback.trainer = made
    before = states(made)
    report = made.verify(2)
    assert report.ok, str(report)
    assert report.max_error == 0
    assert (report.num_updates, report.num_training_steps) == (2, 2)
    kinds = {d.kind for d in report.differences}
    assert kinds >= {"loss", "gradient norm", "learning rate", "parameter", "buffer", "optimizer", "rng"}
    assert_same(states(made), before)
    assert [callback.seen for callback in callbacks] == [[] for _ in callbacks]
    assert not hasattr(made, "calls")
    assert list((tmp_path / "out").iterdir()) == []
    assert made.state.global_step == 0
    assert "equal to Trainer without megatrain" in str(report)
    assert json.loads(report.to_json())["ok"] is True
    if name == "own optimizer":
        made.train()  # the trainer is whole: it trains as if it had never been verified
        again = trainer(tmp_path / "again", Mine, arguments, **more())
        again.train()
        assert_same(states(made)[0], states(again)[0])


def patched() -> Any:
    """As libraries patch a model: a function around the former `forward`, with a part of the model in its closure."""
    model = Plain()
    head, former = model.layers[-1], model.forward

    def forward(self: Any, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        found = former(x, labels)
        return {**found, "loss": found["loss"] + head(self.layers[:-1](x)).square().mean()}

    model.forward = types.MethodType(forward, model)
    return model


def test_a_model_whose_forward_was_replaced_is_verified_with_its_own_weights(tmp_path: Path) -> None:
    made = trainer(tmp_path, Mine, {"gradient_accumulation_steps": 1}, model=patched(), train_dataset=POINTS)
    report = made.verify(2)
    assert report.ok, str(report)
    assert report.max_error == 0


SCRIPTS = {name: {**SCENARIOS, **test_peft.SCENARIOS}[name] for name in ("plateau", "t5", "bf16", "neftune", "lora")}


@pytest.mark.wide
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_every_kind_are_verified(name: str, tmp_path: Path) -> None:
    report = verified(SCRIPTS[name], tmp_path)
    assert report.ok, str(report)
    assert report.max_error == 0


def test_a_view_of_a_dictionary_is_copied(tmp_path: Path) -> None:
    made = small(tmp_path)
    made.names = dict.fromkeys(["x", "labels"]).keys()
    assert made.verify(1).ok


def test_a_trainer_that_does_not_clip_reports_a_norm_that_nothing_waits_for(tmp_path: Path) -> None:
    report = (made := small(tmp_path, arguments={"max_grad_norm": 0.0})).verify(2)
    assert report.ok, str(report)
    assert sum(d.kind == "gradient norm" for d in report.differences) == 2
    made.train()
    kind = made.train_step.schedule.kind
    assert (kind.updates, kind.clip, kind.reports_norm) == ("overlap", False, True)


# -- different -------------------------------------------------------------------------------------------------------


class Logits(Plain):
    """For a loss of the trainer's."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(x)}


def small(folder: Path, kind: Any = Mine, arguments: Any = None, **keywords: Any) -> Any:
    """A trainer of a model that takes little time to compile."""
    return trainer(folder, kind, arguments, **{"model": Plain(), "train_dataset": POINTS, **keywords})


def half_the_rate(patch: pytest.MonkeyPatch) -> None:
    begin = Updates.begin

    def scaled(updates: Any, factor: float) -> None:
        for updater in updates._updaters:
            for group in updater.optimizer.param_groups:
                group["lr"] *= factor

    def wrong(updates: Any) -> None:
        scaled(updates, 0.5)
        begin(updates)
        scaled(updates, 2.0)

    patch.setattr(Updates, "begin", wrong)


def stale(patch: pytest.MonkeyPatch) -> None:
    """The second update of one parameter doesn't come."""
    receive, seen = Running.receive, list[str]()

    def wrong(running: Any, key: str, gradient: torch.Tensor) -> None:
        if key == "layers.2.weight":
            seen.append(key)
            if len(seen) % 3 == 2:
                gradient = torch.zeros_like(gradient)
        receive(running, key, gradient)

    patch.setattr(Running, "receive", wrong)


def louder(patch: pytest.MonkeyPatch) -> None:
    take = Updates.take_norm

    def wrong(updates: Any) -> None:
        take(updates)
        updates.arriving.norm = updates.arriving.norm * 1.0000002

    patch.setattr(Updates, "take_norm", wrong)


def deferred_alone(patch: pytest.MonkeyPatch) -> None:
    """Only updates that run within the next step are wrong."""
    update = Running.update

    def wrong(running: Any, block: int, *section: Any) -> None:
        if running.kind.updates == "deferred":
            with torch.no_grad():
                running._parameters["layers.4.bias"].add_(0.125)
        update(running, block, *section)

    patch.setattr(Running, "update", wrong)


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, tuple[int, str, str] | None]] = {
    "a wrong rate": (half_the_rate, "streamed", (1, "parameter", "layers.0.weight")),
    "a stale weight": (stale, "streamed", (2, "gradient norm", "gradient norm")),
    "a wrong norm": (louder, "streamed", (1, "gradient norm", "gradient norm")),
    "a wrong deferred update": (deferred_alone, "unrepeatable", None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, culprit, first = BROKEN[name]
    made = small(tmp_path)
    breaks(monkeypatch)
    report = made.verify(3)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.culprit == culprit
    found = report.first_difference.difference
    assert (None if found is None else (found.step, found.kind, found.name)) == first, str(report)
    assert "DIFFERENT from Trainer without megatrain" in str(report)
    if name == "a wrong rate":
        assert found is not None
        assert 0.4 < found.relative < 0.6, "of how far it has moved"
        assert made.verify(3, tolerance=100.0).ok


class Unstreamed(Streamed, StockTrainer):
    """Takes the plain model, past the trainer that streams."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return StockTrainer.training_step(self, getattr(model, "__original__", model), inputs, *args, **kwargs)


def test_a_trainer_that_does_not_stream_is_not_right(tmp_path: Path) -> None:
    report = small(tmp_path, Unstreamed).verify(1)
    assert not report.ok
    assert "NOT STREAMED" in str(report)


def test_streamed_calls_are_told_with_their_reason(tmp_path: Path) -> None:
    report = small(tmp_path, OwnStep).verify(1)
    assert report.ok, str(report)
    assert report.num_training_steps == 0
    assert "note: OwnStep has a training_step of its own" in str(report)


class OwnStep(Streamed, StockTrainer):
    """With a step of its own, so that updates are no training steps."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def test_a_script_that_does_not_repeat_itself_is_the_culprit(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        calls.append(1)
        return torch.nn.functional.cross_entropy(outputs["logits"], labels) * len(calls)

    report = small(tmp_path, model=Logits(), compute_loss_func=loss).verify(1)
    assert report.first_difference is not None
    assert report.first_difference.culprit == "stock"
    assert "first difference: update 1, loss: off by" in str(report)


def test_a_function_that_trains_the_model_itself_is_refused(tmp_path: Path) -> None:
    model = Logits()
    weight: Any = model.layers[0].weight

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs["logits"], labels) + weight.square().sum()

    with pytest.raises(ExecuteError, match=r"changed the trainer's own `layers.0.weight`"):
        small(tmp_path, OwnStep, model=model, compute_loss_func=loss).verify(1)


# -- refused ---------------------------------------------------------------------------------------------------------


class Locked(list[Any]):
    """Rows that can't be copied."""

    def __init__(self) -> None:
        super().__init__(POINTS)
        self.iterator = (row for row in POINTS)


def hooked() -> dict[str, Any]:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return {"model": model, "optimizers": (optimizer, None)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "an iterator": (lambda: {"train_dataset": Locked()}, {}, "`train_dataset` of the trainer can't be copied"),
    "compiled": (
        lambda: {"model": megatrain.compile(Plain(), device="cpu"), "megatrain_transfer": None}, {},
        "can't repeat a model that was compiled before",
    ),
    "bf16": (lambda: {"megatrain_precision": "bf16"}, {}, 'can\'t repeat megatrain_precision="bf16"'),
    "hooks": (hooked, {}, "can't repeat an optimizer with hooks"),
    "no updates": (dict, {"updates": 0}, "updates=0 is less than 1"),
    "a wrong tolerance": (dict, {"tolerance": -1.0}, "tolerance=-1.0 is less than 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_repeated_is_refused_by_name(name: str, tmp_path: Path) -> None:
    more, options, text = REFUSED[name]
    keywords = more()
    if "megatrain_transfer" in keywords:
        keywords.pop("megatrain_transfer")
        arguments = TrainingArguments(str(tmp_path), **GIVEN)
        made = Trainer(args=arguments, train_dataset=POINTS, **keywords)  # pyright: ignore
    else:
        made = small(tmp_path, **keywords)
    with pytest.raises(OptionError) as caught:
        made.verify(**options)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_a_trainer_that_has_trained_or_takes_no_update_is_refused(tmp_path: Path) -> None:
    made = small(tmp_path)
    made.train()
    with pytest.raises(OptionError, match="a trainer that has trained"):
        made.verify(1)
    with pytest.raises(ExecuteError, match="took no update"):
        small(tmp_path, arguments={"max_steps": -1, "num_train_epochs": 0}).verify(1)


# -- a script on the command line --------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path

import neighbour
import torch
from transformers import Trainer, TrainingArguments

from megatrain.integrations.hf import Streamed


class Mine(Streamed, Trainer):
    pass


def main():
    torch.manual_seed(int(sys.argv[2]))
    arguments = TrainingArguments(
        sys.argv[1], max_steps=4, save_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[]
    )
    {more}
    rows = [{{"x": torch.randn(4), "labels": torch.tensor(i % 2)}} for i in range(12)]
    trainer = Mine(neighbour.Model(), arguments, train_dataset=rows)
    trainer.add_callback(neighbour.Callback(trainer))
    trainer.train({given})
    Path(sys.argv[1], "after.txt").write_text("trained")


if __name__ == "__main__":
    try:
        main()
    except Exception:
        Path(sys.argv[1] + "-failed").touch()
        raise
    finally:
        print("cleaned up")
"""
NEIGHBOUR = """
import torch
from transformers import TrainerCallback


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Callback(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        assert state is self.trainer.state
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbour.py").write_text(NEIGHBOUR)

    def write(more: str = "", given: str = "", text: str = SCRIPT) -> Path:
        (tmp_path / "code" / "script.py").write_text(text.format(more=more, given=given) if text is SCRIPT else text)
        return tmp_path / "code" / "script.py"

    return write


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"code"}


def test_a_script_runs_as_it_is_up_to_its_training(
    script: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = script(), (list(sys.argv), list(sys.path))
    command = ["verify", "--updates=2", "--transfer=copy", str(path), "out", "7"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "cleaned up" in said
    assert "verify Mine: equal to Trainer without megatrain; " in said
    assert " in 2 updates), largest relative difference 0.00e+00 (tolerance 0e+00)" in said
    assert "2 of 2 updates were one training step" in said
    assert files(tmp_path) == set(), "nothing is written, and nothing behind train() runs"
    assert (sys.argv, sys.path) == before
    assert cli.main([*command[:2], "--json", *command[2:]]) == 0
    report = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert (report["ok"], report["num_updates"], report["stock"]) == (True, 2, "Trainer")


def test_a_script_whose_trainer_is_wrong_ends_with_1(
    script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half_the_rate(monkeypatch)
    assert cli.main(["verify", "--updates=1", str(script()), "out", "7"]) == 1
    assert "first difference: update 1, parameter `layers.0.weight`: off by" in capsys.readouterr().out


ELSEWHERE = "from transformers import Trainer\nraise AssertionError('it must not run')\n"
PLAIN = "import megatrain\nprint('a script that never trains')\n"
FAILING = "import megatrain\n\ndef prepare():\n    return 1 / 0\n\nprepare()\n"
ENDING = "import megatrain, sys\nsys.exit('no data')\n"
BAD_SCRIPTS: dict[str, tuple[dict[str, str], list[str], str]] = {
    "never trains": ({"text": PLAIN}, [], "ended, and no trainer that streams was trained in it."),
    "nothing of megatrain": ({"text": ELSEWHERE}, [], "has nothing of megatrain, nor has a file next to it"),
    "fails": ({"text": FAILING}, [], "failed: ZeroDivisionError: division by zero."),
    "ends": ({"text": ENDING}, [], "failed: SystemExit: no data."),
    "resumes": ({"given": "resume_from_checkpoint='out/checkpoint-1'"}, [], "train(resume_from_checkpoint=...)."),
    "of a search": ({"given": "trial={'lr': 1}"}, [], "verify can't repeat train(trial=...)."),
    "steps": ({}, ["--steps=2"], "--steps is for a model, and `"),
    "seed": ({}, ["--seed=0"], "--seed is for a model, and `"),
    "device": ({}, ["--device=cpu"], "--device is for a model, and `"),
    "no updates": ({}, ["--updates=0"], "--updates=0 is less than 1."),
    "no tolerance": ({}, ["--tolerance=nan"], "--tolerance=nan is not a number."),
    "no memory": ({}, ["--memory=evil"], "--memory='evil' is not a size"),
}


@pytest.mark.parametrize("name", BAD_SCRIPTS)
def test_a_script_that_cant_be_verified_is_refused(
    name: str, script: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, options, text = BAD_SCRIPTS[name]
    assert cli.main(["verify", *options, str(script(**parts)), "out", "7"]) == 2
    said = capsys.readouterr().err
    assert text in said, said
    assert len([line for line in said.splitlines() if line.startswith("  ")]) >= 2
    assert files(tmp_path) <= {"out-failed"}
    if name == "fails":
        assert "in prepare" in said
        assert "runpy" not in said


def test_options_of_a_script_are_refused_for_a_model_and_a_missing_script_is_named(
    script: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "math:pi", "--updates=2"]) == 2
    assert "--updates is for a script, and `math:pi` is a model." in capsys.readouterr().err
    assert cli.main(["verify", "nowhere.py", "--updates=2"]) == 2
    assert "there is no file `nowhere.py`." in capsys.readouterr().err


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "integrations.hf" in each]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "verify.md", "exec"), {"__name__": "page"})
    assert "verify Trainer: equal to Trainer without megatrain; " in capsys.readouterr().out
