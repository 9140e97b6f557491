"""Lists of micro-batches: the sums of a loop over them, each weight moved as often as for one, and clear refusals."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, MicroBatchError, OptimizerError, OptionError
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.training import batch as shares
from megatrain.training.batch import Counts, MicroBatch, Shares
from tests.comparing import assert_same, snapshot
from tests.training.parity import (
    MODES,
    TASKS,
    SideBySide,
    adamw,
    ids,
    labelled,
    padded_in_some,
    sgd,
    square,
)

CHAOS = {"activations": "offload", "chaos": Chaos(seed=3, max_delay_s=0.0001)}


def test_lists_of_other_sizes_have_the_bits_of_a_loop() -> None:
    """Of 2 x 7, 3 x 7 and 2 x 5 tokens, weighted by them, also in turns with fewer micro-batches. Dropout is on.

    Nothing is shared by blocks, so each sum has one order: that of the micro-batches.
    """
    sides = SideBySide.of("llama", adamw, compile_options=CHAOS, weight=lambda b: b["input_ids"].numel(), spread=True)
    for number, count in enumerate((2, 3, 1)):
        shorter = {key: ids(number + 2, 2, 5) for key in ("input_ids", "labels")}
        batches: list[Any] = [labelled(number, 2), labelled(number + 1, 3), shorter][:count]
        sides.take(batches, seed=number, counts=[float(batch["input_ids"].numel()) for batch in batches])
    sides.assert_same()


def test_micro_batches_of_other_structure_have_the_bits_of_a_loop_and_one_schedule() -> None:
    """Some have padding and some have none, in any order."""
    sides = SideBySide.of("llama", adamw, compile_options=CHAOS)
    found, batches = [], padded_in_some(0)
    for number, order in enumerate([(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 1, 2)]):
        sides.take([batches[place] for place in order], seed=number)
        found.append(sides.step.schedule)
    sides.assert_same()
    assert len({len(variant.program.values) for variant in sides.compiled.megatrain._variants}) > 1
    assert all(schedule is found[0] for schedule in found)
    sides.take(batches[:1], seed=9)
    moved = [[op.what for op in schedule.ops].count("W") for schedule in (found[0], sides.step.schedule)]
    assert moved[0] == moved[1], "three micro-batches move weights as often as one"


class Ordered(nn.Module):
    """Runs equal layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(3, affine=False) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, layers: tuple[int, ...], norm: int = 0) -> torch.Tensor:
        for index in layers:
            x = torch.tanh(self.layers[index](x))
        return self.norms[norm](self.head(x)).square().mean()


OTHER_STATE: list[tuple[Any, str]] = [
    ([((0, 1),), ((2, 3),)], "block 0 (layers.0) has the state [layers.2.weight, layers.2.bias], not [layers.0"),
    ([((0, 1),), ((1, 0),)], "block 0 (layers.0) has the state [layers.1.weight, layers.1.bias], not [layers.0"),
    ([((0, 1, 2),), ((0, 2, 1),)], "block 1 (layers.1) has the state [layers.2.weight"),
    ([((0, 1), 0), ((0, 1), 1)], "it writes the buffers ['norms.1.num_batches_tracked', 'norms.1.running_mean'"),
]


def test_micro_batches_that_use_other_state_are_refused_before_anything_runs() -> None:
    """Equal layers in another order have the same sizes: their gradients would go to the wrong parameters."""
    model, x = Ordered(), torch.randn(4, 3)
    step = megatrain.TrainStep(
        megatrain.compile(model, device="cpu", transfer="copy"), sgd(model), loss=lambda result, _: result
    )
    for ways, said in OTHER_STATE:
        before = copy.deepcopy(dict(model.state_dict()))
        with pytest.raises(MicroBatchError) as caught:
            step([(x, *way) for way in ways])
        assert str(caught.value).startswith(f"micro-batch 1 differs from micro-batch 0: {said}")
        with pytest.raises(MicroBatchError, match=r"^micro-batch 2 differs from micro-batch 0: "):
            step([(x, *ways[0]), (x, *ways[0]), (x, *ways[1])])
        assert_same(before, dict(model.state_dict()))
        for way in ways:  # a step of each by itself is fine
            step((x, *way))


# -- what moves ----------------------------------------------------------------------------------------------


def moved(monkeypatch: pytest.MonkeyPatch, count: int, mode: str, **options: Any) -> tuple[Counter[int], int, Any]:
    """Runs two steps of `count` micro-batches; returns W per block, the bytes copied in a step, and the table."""
    copied: list[int] = []
    original = HostStore.prefetch

    def counting(self: HostStore, layout: Any, out: torch.Tensor, **rest: Any) -> None:
        copied.append(sum(run.end - run.start for run in self._placed[id(layout)].runs))
        original(self, layout, out, **rest)

    monkeypatch.setattr(HostStore, "prefetch", counting)
    sides = SideBySide.of("stack", sgd, compile_options=options, **MODES[mode])
    for number in range(2):
        copied.clear()
        sides.take([TASKS["stack"].batch(number * 8 + i, 2) for i in range(count)], seed=number)
    sides.assert_same()
    schedule = sides.step.schedule
    return Counter(op.block for _, op in schedule.positions() if op.what == "W"), sum(copied), schedule


@pytest.mark.parametrize(("mode", "activations"), [("overlap", "offload"), ("deferred", "keep")])
def test_eight_micro_batches_move_each_weight_as_often_as_one(
    monkeypatch: pytest.MonkeyPatch, mode: str, activations: str
) -> None:
    one, bytes_of_one, _ = moved(monkeypatch, 1, mode, activations=activations)
    eight, bytes_of_eight, _ = moved(monkeypatch, 8, mode, activations=activations)
    assert one == eight
    assert bytes_of_one == bytes_of_eight > 0
    assert max(eight.values()) <= 2


# -- refusals ------------------------------------------------------------------------------------------------

GOOD = TASKS["stack"].batch(0, 2)
WRONG: list[tuple[Any, Any, str]] = [
    ([], ExecuteError, "a step was called with an empty list"),
    ({"nonsense": GOOD}, TypeError, "nonsense"),
    ((GOOD, GOOD), TypeError, "argument"),
    ([GOOD, torch.ones(2, 5)], RuntimeError, "shapes|size|dim"),
    (GOOD.to("meta"), ExecuteError, "is on meta, the compute device is cpu"),
    (GOOD.clone().requires_grad_(), ExecuteError, "requires grad"),
    (None, Exception, "."),
]


def refused(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, error: Any, match: str) -> None:
    """Asserts that a step is refused with nothing changed."""
    step.flush()
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match):
        step(batch)
    assert_same(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_a_wrong_batch_or_a_gradient_left_over_is_refused(mode: str) -> None:
    sides = SideBySide.of("stack", sgd, **MODES[mode])
    sides.take(GOOD, seed=0)
    for batch, error, match in WRONG:
        refused(sides.step, sides.streamed, sides.optimizer, batch, error, match)
    sides.compiled(GOOD).sum().backward()
    with pytest.raises(ExecuteError, match=r"parameter `.*` has a `\.grad` already"):
        sides.step(GOOD)
    sides.optimizer.zero_grad()
    sides.take(GOOD, seed=1)
    sides.assert_same()


LOSSES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda result, model: result, r"loss= returned a Tensor of shape \[2, 2\], which isn't a loss"),
    (lambda result, model: 1.0, "loss= returned a float, which isn't a loss"),
    (lambda result, model: result.detach().mean(), "the loss doesn't depend on the model's result"),
    (lambda result, model: torch.ones(()), "the loss doesn't depend on the model's result"),
    (
        lambda result, model: result.sum() + sum(p.square().sum() for p in model.parameters()),
        "the loss reads the parameter `.*` itself",
    ),
]


@pytest.mark.parametrize("mode", ["spread", "deferred"])
def test_what_is_no_loss_or_reads_parameters_is_refused(mode: str) -> None:
    """Every `.grad` that it fills is taken back."""
    wrong: list[Any] = []
    model = TASKS["stack"].build()
    optimizer = sgd(model)

    def loss(result: Any, batch: Any) -> Any:
        return wrong[0](result, model) if wrong else square(result, batch)

    step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer, loss=loss, **MODES[mode])
    for made, match in LOSSES:
        step([GOOD, GOOD])
        step.flush()
        wrong[:] = [made]
        refused(step, model, optimizer, [GOOD, GOOD], ExecuteError, match)
        wrong.clear()
    step([GOOD, GOOD])


class Unlabelled(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": None, "logits": super().forward(x)}  # as models of transformers without labels


def test_a_model_without_loss_is_refused() -> None:
    text = r"the model returned a Tensor of shape \[2, 2\], which isn't a loss"
    for model, match in ((TASKS["stack"].build(), text), (Unlabelled(3, 2), "the model returned a NoneType")):
        optimizer = sgd(model)
        step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer)
        refused(step, model, optimizer, GOOD, ExecuteError, match)


class ReturnsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


@pytest.mark.parametrize("transfer", ["copy", "bind"])
def test_a_loss_of_a_parameter_that_the_model_returns_is_refused(transfer: str) -> None:
    """Its gradient would come besides that of the model, or not at all."""
    model = ReturnsWeight(3, 2)
    optimizer = sgd(model)
    compiled = megatrain.compile(model, device="cpu", transfer=transfer)
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda r, b: r[0].square().mean() + r[1].square().sum())
    refused(step, model, optimizer, GOOD, ExecuteError, "the loss reads the parameter `weight` itself")
    model.weight.requires_grad_(False)  # as a constant it may be read
    megatrain.TrainStep(compiled, optimizer, loss=lambda r, b: r[0].square().mean() + r[1].square().sum())(GOOD)


def test_an_optimizer_of_other_parameters_or_of_all_at_once_is_refused() -> None:
    model = TASKS["stack"].build()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    compiled = megatrain.compile(model, device="cpu")
    with pytest.raises(OptimizerError, match="the optimizer holds none of the parameters that the model trains"):
        megatrain.TrainStep(compiled, optimizer, loss=square)
    with pytest.raises(OptimizerError, match="LBFGS can't update in a training step"):
        megatrain.TrainStep(compiled, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptionError, match="compiled=<Stack> is a Stack"):
        megatrain.TrainStep(model, sgd(model))  # pyright: ignore[reportArgumentType]


def test_weights_that_are_no_counts_are_refused() -> None:
    rest: list[Any] = []
    sides = SideBySide.of("stack", sgd, weight=lambda batch: rest.pop(0))
    for counts in [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)]:
        rest[:] = counts
        match = "weight= counts the micro-batches"
        refused(sides.step, sides.streamed, sides.optimizer, [GOOD, GOOD], OptionError, match)
    rest[:] = [torch.tensor(3), 0]  # a micro-batch may count nothing, and counts may be tensors
    sides.take([GOOD, GOOD * 2], seed=0, counts=[3.0, 0.0])
    sides.assert_same()


def test_factors_that_stay_on_the_device_have_the_bits_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the check alone reads them."""
    monkeypatch.setattr(shares, "is_on_host", lambda tensor: False)
    batches = [MicroBatch.of(torch.tensor(count)) for count in (7, 1021, 333)]

    def products(found: Shares, dtype: torch.dtype) -> list[Any]:
        products: list[Any] = []
        for number in range(3):
            loss = torch.tensor(3.1415926 + number, dtype=dtype, requires_grad=True)
            share = found.share(loss, number)
            share.backward(torch.tensor(1.7, dtype=dtype))
            products += [share.dtype, share.item(), loss.grad]
        return products

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        there = Shares(Counts(batches, lambda batch: batch))
        assert products(there, dtype) == products(Shares(Counts(batches, int)), dtype)
        there.check()
    bad = Shares(Counts(batches, lambda batch: batch * float("nan")))
    with pytest.raises(OptionError, match=r"^weight= counts the micro-batches as \[nan, nan, nan\]"):
        bad.check()
    with pytest.raises(OptionError, match="weight= counts a micro-batch as"):
        Shares(Counts(batches, lambda batch: torch.ones(2)))
