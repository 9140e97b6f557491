"""A run with several optimizers that stops at a checkpoint goes on to the bit; one of other optimizers is refused."""

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
from tests.tiers import checkered
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


def warm_up(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / 4)) for each in optimizers]


class Run:
    """A model, its optimizers with a scheduler each, and the step that trains it; the schedulers go with `user`."""

    def __init__(self, make: Callable[[nn.Module], Optimizers], folder: Path | None = None, **options: Any):
        seed(0 if folder is None else 99)  # a resumed run must not depend on how it began
        self.model = Gpt()
        compiled = megatrain.compile(self.model, device="cpu", **options)
        self.optimizers = make(self.model)
        self.schedulers = warm_up(self.optimizers) if make is muon_adamw else []
        if folder is None:
            self.step = megatrain.TrainStep(compiled, self.optimizers, loss=scalar, max_grad_norm=0.1)
        else:
            self.step = megatrain.TrainStep.load(folder, compiled, self.optimizers, loss=scalar, max_grad_norm=0.1)
            for scheduler, state in zip(self.schedulers, self.step.user["schedulers"], strict=True):
                scheduler.load_state_dict(state)

    def train(self) -> list[float]:
        found: list[float] = []
        for _ in range(STEPS):
            found.append(float(self.step(tokens(self.step.progress.count))))
            for scheduler in self.schedulers:
                scheduler.step()
        return found

    def save(self, folder: Path) -> None:
        self.step.save(folder, user={"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]})

    def state(self) -> dict[str, Any]:
        self.step.flush()
        counts = [getattr(each, "count", None) for each in self.optimizers]
        masters = [read_(torch.empty(m.shape), m) for m in self.step._compiled.masters.values()]
        return {**snapshot(self.model, *self.optimizers), "counts": counts, "masters": masters}


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("make", "options"), checkered([muon_adamw, two_counts], [{}, BF16, ROUNDED]), ids=named)
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


def regrouped(model: nn.Module) -> Optimizers:
    """The same groups in the same order; one of them has gone to the other optimizer."""
    matrices, others = split(model)
    return [
        Counting([{"params": matrices}, {"params": others[:3]}], lr=0.1, momentum=0.9),
        Counting([{"params": others[3:]}], lr=1e-2),
    ]


def grouped(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    return [
        Counting(matrices, lr=0.1, momentum=0.9),
        Counting([{"params": others[:3]}, {"params": others[3:]}], lr=1e-2),
    ]


def joined(model: nn.Module) -> Optimizers:
    return [Counting([{"params": part} for part in split(model)], lr=0.1, momentum=0.9)]


def moved(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    return [Counting(matrices[:-1], lr=0.1, momentum=0.9), Counting([*others, matrices[-1]], lr=1e-2)]


REFUSED = [
    (muon_adamw, exchanged, "class: torch.optim.Muon with 1 group, torch.optim.adamw.AdamW with 2 groups in"),
    (grouped, regrouped, "class: "),
    (two_counts, joined, "class: "),
    (joined, two_counts, "class: "),
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
