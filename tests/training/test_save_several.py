"""A run with several optimizers and schedulers goes on from a checkpoint to the bit; with others it is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain import saving
from megatrain.errors import CheckpointError, OptimizerError, OptionError
from megatrain.optim.masters.halves import read_
from megatrain.saving import OptimizerState
from tests.comparing import assert_same, snapshot
from tests.models import Gpt
from tests.saving.forging import content_of, forge
from tests.training.resuming import BF16, ROUNDED, scalar, seed, tokens

Optimizers = list[torch.optim.Optimizer]
STEPS = 2


class Counting(torch.optim.SGD):
    """State that belongs to no parameter."""

    def __init__(self, parameters: Any, **options: Any):
        super().__init__(parameters, **options)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})
        self.count = state_dict["count"]


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def muon_adamw(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    groups = [{"params": others[:3]}, {"params": others[3:], "lr": torch.tensor(2e-2)}]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(groups, lr=1e-2)]


def two_counts(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    return [Counting(matrices, lr=0.1, momentum=0.9), Counting(others, lr=1e-2)]


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    first, second = optimizers
    kinds = torch.optim.lr_scheduler
    return [kinds.LambdaLR(first, lambda step: min(1.0, (step + 1) / 4)), kinds.CosineAnnealingLR(second, 5)]


class Run:
    """A model, its optimizers with a scheduler each, and the step that trains it."""

    def __init__(self, make: Callable[[nn.Module], Optimizers], folder: Path | None = None, **options: Any):
        seed(0 if folder is None else 99)  # a resumed run must not depend on how it began
        self.model = Gpt()
        compiled = megatrain.compile(self.model, device="cpu", **options)
        self.optimizers = make(self.model)
        self.schedulers = (
            schedulers_of(sorted(self.optimizers, key=lambda each: type(each).__name__))
            if make in (muon_adamw, exchanged)
            else []
        )
        settings: dict[str, Any] = {"loss": scalar, "max_grad_norm": 0.1}
        if folder is None:
            self.step = megatrain.TrainStep(compiled, self.optimizers, **settings)
        else:
            settings["scheduler"] = self.schedulers or None
            self.step = megatrain.TrainStep.load(folder, compiled, self.optimizers, **settings)

    def train(self) -> list[float]:
        found: list[float] = []
        for _ in range(STEPS):
            found.append(float(self.step(tokens(self.step.progress.count))))
            for scheduler in self.schedulers:
                scheduler.step()
        return found

    def save(self, folder: Path) -> None:
        self.step.save(folder, scheduler=self.schedulers or None)

    def state(self) -> dict[str, Any]:
        self.step.flush()
        counts = [getattr(each, "count", None) for each in self.optimizers]
        masters = [read_(torch.empty(m.shape), m) for m in self.step._compiled.masters.values()]
        rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        return {**snapshot(self.model, *self.optimizers), "counts": counts, "masters": masters, "rates": rates}


@pytest.mark.parametrize(("make", "options"), [(muon_adamw, BF16), (two_counts, ROUNDED)], ids=["bf16", "rounded"])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, make: Any, options: Any) -> None:
    run = Run(make, **options)
    run.train()
    run.save(tmp_path / "run")
    expected = run.train()
    resumed = Run(make, tmp_path / "run", **options)
    assert resumed.step.progress.count == STEPS
    assert resumed.train() == expected
    assert_same(run.state(), resumed.state())
    if make is two_counts:
        assert [each.count for each in resumed.optimizers] == [2 * STEPS, 2 * STEPS]  # pyright: ignore


def test_a_list_of_one_is_stored_as_one(tmp_path: Path) -> None:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tokens(0))[1].backward()
    optimizer.step()
    names = dict(model.named_parameters())
    for name, given in (("one", optimizer), ("list", [optimizer])):
        saving.save(tmp_path / name, model.state_dict(keep_vars=True), optimizer=given)
    one, other = (content_of(tmp_path / name) for name in ("one", "list"))
    assert one == other
    assert one["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert one["optimizer"]["rest"] == {}
    again = torch.optim.AdamW(model.parameters())
    saving.load(tmp_path / "one").read_optimizer([again], names)
    assert_same(optimizer.state_dict(), again.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "run"
    run = Run(two_counts)
    run.train()
    run.save(folder)
    return folder


def exchanged(model: nn.Module) -> Optimizers:
    return muon_adamw(model)[::-1]


def moved(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    return [Counting(matrices[:-1], lr=0.1, momentum=0.9), Counting([*others, matrices[-1]], lr=1e-2)]


REFUSED = [
    (muon_adamw, exchanged, "class: torch.optim.Muon with 1 group, torch.optim.adamw.AdamW with 2 groups in"),
    (two_counts, moved, "group: `"),
]


@pytest.mark.parametrize(("before", "after", "text"), REFUSED)
def test_other_optimizers_are_refused_before_anything_is_read(
    tmp_path: Path, before: Any, after: Any, text: str
) -> None:
    run = Run(before)
    run.train()
    run.save(tmp_path / "run")
    checkpoint, model = saving.load(tmp_path / "run"), Gpt()
    optimizers = after(model)
    was = copy.deepcopy([each.state_dict() for each in optimizers])
    with pytest.raises(CheckpointError, match="doesn't fit this optimizer") as caught:
        checkpoint.read_optimizer(optimizers, dict(model.named_parameters()))
    assert f"\n  {text}" in str(caught.value)
    assert_same(was, [each.state_dict() for each in optimizers])
    with pytest.raises(CheckpointError, match="doesn't fit this optimizer"):
        Run(after, tmp_path / "run")


FORGED: list[Any] = [{}, {"0": {"count": 1}}, {"0": {}, "1": {}, "2": {}}, {"0": {"!tuple": []}, "1": {}}]


@pytest.mark.parametrize("rest", FORGED, ids=json.dumps)
def test_forged_further_entries_are_refused(saved: Path, rest: Any) -> None:
    content = content_of(saved)
    assert content["optimizer"]["rest"] == {"0": {"count": STEPS}, "1": {"count": STEPS}}
    before = (saved / "checkpoint.json").read_bytes()
    try:
        forge(saved, {**content, "optimizer": {**content["optimizer"], "rest": rest}})
        model = Gpt()
        with pytest.raises(CheckpointError, match=r"\n  rest: .* not the further entries of 2 optimizers"):
            saving.load(saved).check_optimizer(two_counts(model), dict(model.named_parameters()))
    finally:
        (saved / "checkpoint.json").write_bytes(before)


def test_a_parameter_of_two_optimizers_is_refused_by_save_and_load(tmp_path: Path, saved: Path) -> None:
    model = Gpt()
    matrices, others = split(model)
    names = dict(model.named_parameters())
    both = [Counting([*matrices, others[0]], lr=0.1, momentum=0.9), Counting(others, lr=1e-2)]
    for call in (
        lambda: saving.save(tmp_path / "run", model.state_dict(keep_vars=True), optimizer=both),
        lambda: saving.load(saved).read_optimizer(both, names),
        lambda: OptimizerState.of(both, names),
    ):
        with pytest.raises(OptimizerError, match="two optimizers, Counting and Counting, hold the parameter `"):
            call()
    with pytest.raises(OptionError, match=r"^optimizer=\[\] is empty"):
        saving.save(tmp_path / "run", {}, optimizer=[])
    with pytest.raises(OptionError, match=r"has one optimizer twice"):
        saving.load(saved).read_optimizer([both[0], both[0]], names)
    assert not (tmp_path / "run").exists()


# -- schedulers ------------------------------------------------------------------------------------------------------

LR = torch.optim.lr_scheduler


class Scheduled:
    """Two optimizers, schedulers of some kinds over the first, and a step, without a training."""

    def __init__(self, *kinds: Callable[[Any], Any]):
        self.model = Gpt()
        self.compiled = megatrain.compile(self.model, device="cpu")
        self.optimizers = two_counts(self.model)
        self.schedulers = [kind(self.optimizers[0]) for kind in kinds]

    def save(self, folder: Path, scheduler: Any) -> None:
        megatrain.TrainStep(self.compiled, self.optimizers, loss=scalar).save(folder, scheduler=scheduler)

    def load(self, folder: Path, scheduler: Any) -> None:
        megatrain.TrainStep.load(folder, self.compiled, self.optimizers, loss=scalar, scheduler=scheduler)


def constant(optimizer: Any) -> Any:
    return LR.ConstantLR(optimizer)


def cosine(optimizer: Any) -> Any:
    return LR.CosineAnnealingLR(optimizer, 100)


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scheduled, dict[str, Path]]:
    """Checkpoints without a scheduler, with one, and with two."""
    folder, made = tmp_path_factory.mktemp("scheduled"), Scheduled(constant, cosine, cosine)
    first, second, _ = made.schedulers
    first.last_epoch = 7
    second.last_epoch = 9
    for name, given in (("none", None), ("one", first), ("list", [first]), ("two", [first, second])):
        made.save(folder / name, given)
    return made, {name: folder / name for name in ("none", "one", "list", "two")}


def test_schedulers_go_on_in_their_order(scheduled: tuple[Scheduled, dict[str, Path]]) -> None:
    _, folders = scheduled
    again = Scheduled(constant, cosine)
    again.load(folders["two"], again.schedulers)
    assert [each.last_epoch for each in again.schedulers] == [7, 9]
    again.load(folders["none"], None)


def test_a_list_of_one_scheduler_is_stored_as_one(scheduled: tuple[Scheduled, dict[str, Path]]) -> None:
    _, folders = scheduled
    extras = [content_of(folders[name])["extra"] for name in ("one", "list")]
    assert [extra["scheduler"] for extra in extras] == [extras[0]["scheduler"]] * 2
    assert extras[1]["scheduler_class"] == "torch.optim.lr_scheduler.ConstantLR"
    again = Scheduled(constant)
    again.load(folders["one"], again.schedulers)
    again.load(folders["list"], again.schedulers[0])
    assert again.schedulers[0].last_epoch == 7


CONSTANT, COSINE = "torch.optim.lr_scheduler.ConstantLR", "torch.optim.lr_scheduler.CosineAnnealingLR"


@pytest.mark.parametrize(
    ("saved", "picked", "text"),
    [
        ("two", [1], f"has 2 schedulers, load() has 1: {CONSTANT} is missing."),
        ("one", [1, 2], f"has 1 scheduler, load() has 2: {CONSTANT} is missing, and {COSINE}, {COSINE} are too many."),
        ("two", [], "has 2 schedulers, load() has none."),
        ("none", [0, 1], "load() has 2 schedulers, the checkpoint"),
        ("two", [1, 0], f"class of scheduler.0: {CONSTANT} in the checkpoint, but {COSINE} here"),
    ],
)
def test_other_schedulers_are_refused_by_name(
    scheduled: tuple[Scheduled, dict[str, Path]], saved: str, picked: list[int], text: str
) -> None:
    made, folders = scheduled
    chosen = [made.schedulers[place] for place in picked]
    before = [each.state_dict() for each in made.schedulers]
    with pytest.raises(CheckpointError) as caught:
        made.load(folders[saved], chosen or None)
    assert text in str(caught.value)
    assert [each.state_dict() for each in made.schedulers] == before


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "scheduler=[] is empty"),
        ([7], "scheduler=[7] has item 0, 7, which is an int"),
        ("twice", "has one scheduler twice: as item 1, and before"),
    ],
)
def test_what_is_no_list_of_schedulers_is_refused(
    scheduled: tuple[Scheduled, dict[str, Path]], tmp_path: Path, given: Any, text: str
) -> None:
    made, folders = scheduled
    given = [made.schedulers[0]] * 2 if given == "twice" else given
    for call in (lambda: made.save(tmp_path / "run", given), lambda: made.load(folders["one"], given)):
        with pytest.raises(OptionError) as caught:
            call()
        assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduler", lambda states: states[:1]),
        ("scheduler", lambda states: states[0]),
        ("scheduler_class", lambda classes: classes[0]),
        ("scheduler_class", lambda classes: None),
    ],
)
def test_forged_lists_of_schedulers_are_refused(
    scheduled: tuple[Scheduled, dict[str, Path]], field: str, value: Callable[[Any], Any]
) -> None:
    made, folders = scheduled
    content, before = content_of(folders["two"]), (folders["two"] / "checkpoint.json").read_bytes()
    try:
        forge(folders["two"], {**content, "extra": {**content["extra"], field: value(content["extra"][field])}})
        with pytest.raises(CheckpointError, match="no step can have saved"):
            made.load(folders["two"], made.schedulers[:2])
    finally:
        (folders["two"] / "checkpoint.json").write_bytes(before)
