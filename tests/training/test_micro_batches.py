"""Lists of micro-batches: the sums of a loop over them, each weight moved as often as for one, and clear refusals."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, MegatrainError, MicroBatchError, OptimizerError, OptionError, ScheduleError
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.models import MODELS
from tests.tiers import diagonal, wide
from tests.training.parity import (
    MODES,
    TASKS,
    TELLING_MODES,
    SideBySide,
    adamw,
    ids,
    labelled,
    loop_gradients,
    padded_in_some,
    second,
    sgd,
    square,
)

CHAOS = {"chaos": Chaos(seed=3, max_delay_s=0.0001)}


def llama_batches(step: int) -> list[Any]:
    """Of other sizes, and other lengths: 2 x 7, 3 x 7 and 2 x 5 tokens."""
    return [labelled(step, 2), labelled(step + 1, 3), {key: ids(step + 2, 2, 5) for key in ("input_ids", "labels")}]


def tokens(batch: Any) -> int:
    return batch["input_ids"].numel()


# The modes that are missing here meet micro-batches of other structure, or eight of them.
WEIGHED = [("spread", tokens), ("serial_clipped", None)]


@pytest.mark.parametrize(
    ("mode", "weight"), [case if case in WEIGHED else wide(case) for case in product(MODES, [None, tokens])]
)
def test_lists_of_other_sizes_have_the_bits_of_a_loop(mode: str, weight: Callable[[Any], int] | None) -> None:
    """Nothing is shared by blocks, so each sum has one order: that of the micro-batches. Dropout is on."""
    sides = SideBySide.of(
        "llama", adamw, compile_options={"activations": "offload"} | CHAOS, weight=weight, **MODES[mode]
    )
    for number, count in enumerate((2, 3, 1)):  # also in turns with other numbers of micro-batches
        batches = llama_batches(number)[:count]
        counts = None if weight is None else [float(weight(batch)) for batch in batches]
        sides.take(batches, seed=number, counts=counts)
    sides.assert_same()


STRUCTURED = [("deferred", "offload"), ("overlap", "recompute")]  # the captures that tests below need, too


@pytest.mark.parametrize(
    ("mode", "activations"),
    [case if case in STRUCTURED else wide(case) for case in product(MODES, ["recompute", "keep", "offload"])],
)
def test_micro_batches_of_other_structure_have_the_bits_of_a_loop(mode: str, activations: str) -> None:
    """Some have padding and some have none; the last micro-batch may be either."""
    sides = SideBySide.of("llama", adamw, compile_options={"activations": activations} | CHAOS, **MODES[mode])
    for number in range(3):
        sides.take(padded_in_some(number), seed=number)
    sides.assert_same()
    variants = list(sides.compiled.megatrain._variants)
    assert len({len(variant.program.values) for variant in variants}) > 1


def test_one_schedule_serves_them_in_any_order() -> None:
    sides = SideBySide.of("llama", adamw, compile_options={"activations": "offload"} | CHAOS)
    found = []
    for number, order in enumerate([(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0), (0, 1, 2)]):
        batches = padded_in_some(0)
        sides.take([batches[place] for place in order], seed=number)
        found.append(sides.step.schedule)
    sides.assert_same()
    assert all(schedule is found[0] for schedule in found)


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_masked_micro_batches_move_weights_as_often_as_one(activations: str) -> None:
    moved = []
    for count in (1, 3):
        sides = SideBySide.of("llama", sgd, compile_options={"activations": activations})
        sides.take(padded_in_some(0)[:count], seed=0)
        moved.append(Counter(op.what for op in sides.step.schedule.ops)["W"])
    assert moved[0] == moved[1]


class Counting(nn.Module):
    """Writes buffers under names that another capture gives to other values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x if scale is None else x * scale))
        return self.head(x).square().mean()


def test_buffers_go_on_between_micro_batches_of_other_structure() -> None:
    torch.manual_seed(0)
    eager = Counting()
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu", transfer="copy", activations="offload")
    optimizers = sgd(eager), sgd(compiled.megatrain.model)
    step = megatrain.TrainStep(compiled, optimizers[1], loss=lambda result, _: result)
    for number in range(3):
        points = [torch.randn(4, 3, generator=torch.Generator().manual_seed(3 * number + i)) for i in range(3)]
        batches: list[Any] = [(x,) if i != number else (x, torch.rand(3)) for i, x in enumerate(points)]
        loss = loop_gradients(eager, batches, loss=lambda result, _: result)
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert_same(loss, step(batches), f"loss of step {number}")
    step.flush()
    assert_same(snapshot(eager, optimizers[0]), snapshot(compiled.megatrain.model, optimizers[1]))


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


@pytest.mark.parametrize(("case", "mode"), diagonal(OTHER_STATE, ["overlap", "serial"]))
def test_micro_batches_that_use_other_state_are_refused_before_anything_runs(case: Any, mode: str) -> None:
    """Equal layers in another order have the same sizes: their gradients would go to the wrong parameters."""
    ways, said = case
    torch.manual_seed(0)
    model = Ordered()
    before = copy.deepcopy(dict(model.state_dict()))
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    step = megatrain.TrainStep(compiled, sgd(model), loss=lambda result, _: result, **MODES[mode])
    x = torch.randn(4, 3)
    with pytest.raises(MicroBatchError) as caught:
        step([(x, *way) for way in ways])
    assert str(caught.value).startswith(f"micro-batch 1 differs from micro-batch 0: {said}")
    assert_same(before, dict(model.state_dict()))
    with pytest.raises(MicroBatchError, match=r"^micro-batch 2 differs from micro-batch 0: "):
        step([(x, *ways[0]), (x, *ways[0]), (x, *ways[1])])
    for way in ways:  # a step of each by itself is fine
        step((x, *way))


@pytest.mark.parametrize("mode", [wide("overlap"), "deferred"])
def test_buffers_go_from_one_micro_batch_to_the_next(mode: str) -> None:
    sides = SideBySide.of("cnn", sgd, compile_options=CHAOS, **MODES[mode])
    for number in range(3):
        sides.take([TASKS["cnn"].batch(number * 3 + i, size) for i, size in enumerate((2, 3, 2))], seed=number)
    sides.assert_same()
    assert sides.streamed.stem[1].num_batches_tracked == 9


def test_a_list_of_one_is_that_micro_batch() -> None:
    sides = SideBySide.of("gpt", adamw)
    for number in range(3):
        sides.take([TASKS["gpt"].batch(number, 2)], seed=number)
    sides.assert_same()


@pytest.mark.parametrize("sizes", [wide(((2, 2),)), (2, 3, 2, 3)])
def test_a_tied_matrix_differs_by_the_order_of_its_sum(sizes: tuple[int, ...]) -> None:
    """The loop adds embedding and head within each micro-batch, the step all embeddings and all heads first.

    n terms added in two orders differ by less than 2 n roundings (2**-24) of the sum of their sizes; `p - g` of plain
    SGD adds a rounding of the result on each side. All other parameters have the same bits.
    """
    task = TASKS["gpt"]
    sides = SideBySide.of("gpt", lambda model: torch.optim.SGD(model.parameters(), lr=1.0), compile_options=CHAOS)
    batches = [task.batch(i, size) for i, size in enumerate(sizes)]
    apart = copy.deepcopy(sides.eager)
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    terms = torch.zeros_like(apart.head.weight)
    for number in range(len(batches)):  # a weight of 1 for one micro-batch leaves its own terms
        apart.zero_grad()
        torch.manual_seed(0)
        counts = [float(number == other) for other in range(len(batches))]
        loop_gradients(apart, batches, loss=task.loss, counts=counts)
        terms += (apart.head.weight.grad.abs() + apart.embed.weight.grad.abs()) / len(batches)
    before = sides.eager.embed.weight.detach().abs()
    torch.manual_seed(0)
    sides.expect(batches)
    torch.manual_seed(0)
    sides.step(batches)
    left, right = snapshot(sides.eager)["parameters"], snapshot(sides.streamed)["parameters"]
    gap = (left.pop("embed.weight") - right.pop("embed.weight")).abs()
    assert bool((gap <= 2**-24 * (2 * 2 * len(batches) * terms + 2 * (before + terms))).all())
    assert_same(left, right)


# -- what moves ----------------------------------------------------------------------------------------------


def moved(monkeypatch: pytest.MonkeyPatch, count: int, mode: str, **options: Any) -> tuple[Counter[int], int, Any]:
    """Runs two steps of `count` micro-batches; returns W per block, the bytes copied in a step, and the table."""
    copied: list[int] = []
    original = HostStore.prefetch

    def counting(self: HostStore, layout: Any, out: torch.Tensor, **rest: Any) -> None:
        copied.append(sum(run.end - run.start for run in self._placed(layout).runs))
        original(self, layout, out, **rest)

    monkeypatch.setattr(HostStore, "prefetch", counting)
    sides = SideBySide.of("stack", sgd, compile_options=options, **MODES[mode])
    for number in range(2):
        copied.clear()
        sides.take([TASKS["stack"].batch(number * 8 + i, 2) for i in range(count)], seed=number)
    sides.assert_same()
    schedule = sides.step.schedule
    return Counter(op.block for _, op in schedule.positions() if op.what == "W"), sum(copied), schedule


@pytest.mark.parametrize(
    ("mode", "activations"), diagonal(["overlap", "deferred", "serial"], ["recompute", "offload", "keep"])
)
def test_eight_micro_batches_move_each_weight_as_often_as_one(
    monkeypatch: pytest.MonkeyPatch, mode: str, activations: str
) -> None:
    one, bytes_of_one, _ = moved(monkeypatch, 1, mode, activations=activations)
    eight, bytes_of_eight, _ = moved(monkeypatch, 8, mode, activations=activations)
    assert one == eight
    assert bytes_of_one == bytes_of_eight > 0
    assert max(eight.values()) <= 2


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_in_the_least_memory_each_weight_moves_twice_at_most(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    model = TASKS["stack"].build()
    program = megatrain.lower(megatrain.trace(model, (TASKS["stack"].batch(0, 2),)))
    options: dict[str, Any] = {"micro_batches": 8, "updates": "overlap", "outputs": "release"}
    roomy = megatrain.schedule(program, activations="offload", **options).device_bytes
    least = megatrain.schedule(program, num_slots=1, keep=0, activations="offload", **options).device_bytes
    budget = least + int(share * max(0, roomy - least))
    weights, _, schedule = moved(monkeypatch, 8, "overlap", memory=budget)
    assert schedule.device_bytes <= budget
    assert max(weights.values()) == 2


@pytest.mark.parametrize(
    ("name", "activations"),
    [("gpt", "offload"), ("stack", "recompute"), ("stack", "keep"), wide(("gpt", "recompute")), wide(("gpt", "keep"))],
)
def test_memory_held_is_within_the_schedules_figure(name: str, activations: str) -> None:
    sides = SideBySide.of(name, adamw, compile_options={"activations": activations}, max_grad_norm=1.0)
    for number in range(2):  # the second takes the updates that the first leaves due
        sides.step([TASKS[name].batch(number, 2), TASKS[name].batch(number, 3)])
    assert 0 < sides.compiled.peak_bytes <= sides.step.schedule.device_bytes


class WideHead(nn.Linear):
    """Its logits are by far the largest tensor."""

    def __init__(self) -> None:
        super().__init__(4, 512)

    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits, logits.square().mean()


def test_a_step_fits_where_a_call_must_hold_its_outputs_and_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 4), WideHead())
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    program = megatrain.lower(megatrain.trace(model, (x,)))
    options: dict[str, Any] = {"num_slots": 1, "keep": 0, "activations": "offload"}
    least = megatrain.schedule(program, updates="overlap", outputs="release", **options).device_bytes
    assert least < megatrain.schedule(program, **options).device_bytes
    compiled = megatrain.compile(model, device="cpu", memory=least)
    step = megatrain.TrainStep(compiled, sgd(model), loss=second)
    step(x)
    assert step.schedule.device_bytes <= least
    with pytest.raises(ScheduleError, match="is too small"):
        compiled(x)
    step(x)


# -- refusals ------------------------------------------------------------------------------------------------


def refused(
    step: megatrain.TrainStep, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, error: type, match: str
) -> None:
    """Asserts that a step is refused with nothing changed, and that a good one follows."""
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match):
        step(batch)
    assert_same(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


GOOD = TASKS["stack"].batch(0, 2)
LEAKY: list[tuple[str, Any, str]] = [
    ("not_a_scalar", lambda result, batch: result, r"loss= returned a Tensor of shape \[2, 2\], which isn't a loss"),
    ("not_a_tensor", lambda result, batch: 1.0, "loss= returned a float, which isn't a loss"),
    ("detached", lambda result, batch: result.detach().mean(), "the loss doesn't depend on the model's result"),
    ("constant", lambda result, batch: torch.ones(()), "the loss doesn't depend on the model's result"),
]


@pytest.mark.parametrize(("case", "mode"), diagonal(LEAKY, ["overlap", "deferred"]))
def test_what_is_no_loss_is_refused(case: Any, mode: str) -> None:
    _, loss, match = case
    fails = False

    def moody(result: Any, batch: Any) -> Any:
        return loss(result, batch) if fails else square(result, batch)

    model = TASKS["stack"].build()
    optimizer = sgd(model)
    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, optimizer, loss=moody, **MODES[mode])
    step(GOOD)
    step.flush()
    fails = True
    refused(step, model, optimizer, [GOOD, GOOD], ExecuteError, match)
    fails = False
    step([GOOD, GOOD])


class Unlabelled(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": None, "logits": super().forward(x)}


def test_a_model_without_loss_is_refused() -> None:
    model = TASKS["stack"].build()
    optimizer = sgd(model)
    step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer)
    refused(
        step, model, optimizer, GOOD, ExecuteError, r"the model returned a Tensor of shape \[2, 2\], which isn't a loss"
    )
    model = Unlabelled(3, 2)  # as models of transformers are without labels
    optimizer = sgd(model)
    step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer)
    refused(step, model, optimizer, GOOD, ExecuteError, "the model returned a NoneType")


WRONG: list[tuple[Any, type, str]] = [
    ([], ExecuteError, "a step was called with an empty list"),
    ({"nonsense": GOOD}, TypeError, "nonsense"),
    ((GOOD, GOOD), TypeError, "argument"),
    (torch.ones(2, 5), RuntimeError, "shapes|size|dim"),
    ([GOOD, torch.ones(2, 5)], RuntimeError, "shapes|size|dim"),
    (GOOD.to("meta"), ExecuteError, "is on meta, the compute device is cpu"),
    (None, Exception, "."),
]


@pytest.mark.parametrize(("case", "mode"), diagonal(WRONG, ["overlap", "deferred"]))
def test_a_wrong_batch_is_refused(case: Any, mode: str) -> None:
    batch, error, match = case
    sides = SideBySide.of("stack", sgd, **MODES[mode])
    sides.take(GOOD, seed=0)
    sides.step.flush()
    refused(sides.step, sides.streamed, sides.optimizer, batch, error, match)
    sides.take(GOOD, seed=1)
    sides.assert_same()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_a_loss_that_reads_parameters_is_refused(mode: str) -> None:
    """It reads several, and every `.grad` that it fills is taken back."""
    decays = True

    def decayed(result: Any, batch: Any) -> torch.Tensor:
        decay = sum(p.square().sum() for p in model.parameters()) if decays else 0.0
        return result.square().mean() + decay

    model = TASKS["stack"].build()
    optimizer = sgd(model)
    step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer, loss=decayed, **MODES[mode])
    refused(step, model, optimizer, [GOOD, GOOD], ExecuteError, "the loss reads the parameter `.*` itself")
    decays = False
    step([GOOD, GOOD])


class ReturnsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


@pytest.mark.parametrize("transfer", ["copy", "bind"])
def test_a_loss_of_a_parameter_that_the_model_returns_is_refused(transfer: str) -> None:
    """Its gradient would come beside that of the model, or not at all."""
    model = ReturnsWeight(3, 2)
    optimizer = sgd(model)
    compiled = megatrain.compile(model, device="cpu", transfer=transfer)
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda r, b: r[0].square().mean() + r[1].square().sum())
    refused(step, model, optimizer, GOOD, ExecuteError, "the loss reads the parameter `weight` itself")
    model.weight.requires_grad_(False)  # as a constant it may be read
    megatrain.TrainStep(compiled, optimizer, loss=lambda r, b: r[0].square().mean() + r[1].square().sum())(GOOD)


def test_an_input_that_requires_grad_is_refused() -> None:
    sides = SideBySide.of("stack", sgd)
    refused(sides.step, sides.streamed, sides.optimizer, GOOD.clone().requires_grad_(), ExecuteError, "requires grad")
    sides.take(GOOD, seed=0)
    sides.assert_same()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_a_gradient_left_over_is_refused(mode: str) -> None:
    sides = SideBySide.of("stack", sgd, **MODES[mode])
    sides.take(GOOD, seed=0)
    sides.compiled(GOOD).sum().backward()
    before = snapshot(sides.streamed, sides.optimizer)
    with pytest.raises(ExecuteError, match=r"parameter `.*` has a `\.grad` already"):
        sides.step(GOOD)
    assert_same(before, snapshot(sides.streamed, sides.optimizer))
    sides.optimizer.zero_grad()
    sides.take(GOOD, seed=1)
    sides.assert_same()


@pytest.mark.parametrize("name", ["stack", "all_frozen"])
def test_an_optimizer_of_other_parameters_is_refused(name: str) -> None:
    model, args, _ = MODELS[name]()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer, loss=square)
    before = snapshot(model, optimizer)
    with pytest.raises(MegatrainError, match=r"no parameter of the model gets|holds none of the parameters"):
        step(args)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        pytest.param({"max_grad_norm": 0.0}, OptionError, "max_grad_norm=0.0 is not above 0", id="norm"),
        pytest.param({"max_grad_norm": float("nan")}, OptionError, "max_grad_norm=nan is not a number", id="nan"),
        pytest.param({"max_grad_norm": "1"}, OptionError, "max_grad_norm='1' is not a number", id="text"),
        pytest.param({"max_grad_norm": True}, OptionError, "max_grad_norm=True is not a number", id="flag"),
        pytest.param({"loss": "mse"}, OptionError, "loss='mse' is no function", id="loss"),
        pytest.param({"weight": 3}, OptionError, "weight=3 is no function", id="weight"),
        pytest.param({"overlap": "no"}, OptionError, "overlap='no' is neither True nor False", id="overlap"),
        pytest.param({"on_nonfinite": "ignore"}, OptionError, "on_nonfinite='ignore' is not known", id="nonfinite"),
    ],
)
def test_a_wrong_option_is_refused(change: dict[str, Any], error: type, match: str) -> None:
    model = TASKS["stack"].build()
    with pytest.raises(error, match=match):
        megatrain.TrainStep(megatrain.compile(model, device="cpu"), sgd(model), **change)


def test_what_is_no_compiled_model_or_needs_all_parameters_is_refused() -> None:
    model = TASKS["stack"].build()
    with pytest.raises(OptionError, match="compiled=<Stack> is a Stack"):
        megatrain.TrainStep(model, sgd(model))  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptimizerError, match="LBFGS can't update in a training step"):
        megatrain.TrainStep(megatrain.compile(model, device="cpu"), torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("counts", [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_weights_that_are_no_counts_are_refused(counts: tuple[float, float]) -> None:
    rest: list[Any] = []
    sides = SideBySide.of("stack", sgd, weight=lambda batch: rest.pop(0))
    rest += counts
    refused(sides.step, sides.streamed, sides.optimizer, [GOOD, GOOD], OptionError, "weight= counts the micro-batches")
    rest[:] = [torch.tensor(3), 0]  # a micro-batch may count nothing, and counts may be tensors
    sides.take([GOOD, GOOD * 2], seed=0, counts=[3.0, 0.0])
    sides.assert_same()
