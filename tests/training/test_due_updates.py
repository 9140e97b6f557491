"""Updates that are due are taken before anybody sees or writes what they change; and updates spread over two steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import megatrain
from megatrain.planning import host_plan
from tests.comparing import assert_same, assert_same_bits, snapshot
from tests.interrupting import Lines
from tests.runtime.parity import seeded
from tests.training.parity import (
    TASKS,
    SideBySide,
    adamw,
    fresh,
    labelled,
    sgd,
    square,
)

WEIGHT = "layers.0.fc.weight"


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def due(optimizer: Any = sgd, steps: int = 2, **options: Any) -> SideBySide:
    """Some steps, the updates of the last not taken."""
    sides = SideBySide.of("hazardous", optimizer, **{"max_grad_norm": 0.5, **options})
    for number in range(steps):
        alias = sides.streamed.get_parameter(WEIGHT).data  # the same memory; nobody knows who looks at it
        sides.take(batch(number), seed=number)
    assert not torch.equal(alias, sides.eager.get_parameter(WEIGHT)), "nothing is due"
    return sides


class View:
    """One of the two sides, as its user sees it."""

    def __init__(self, model: Any, optimizer: Any, call: Any):
        self.model, self.optimizer, self.call, self.held = model, optimizer, call, model.layers[0].fc.weight

    @staticmethod
    def both(sides: SideBySide) -> tuple[View, View]:
        return (
            View(sides.eager, sides.eager_optimizer, sides.eager),
            View(sides.streamed, sides.optimizer, sides.compiled),
        )


def averaged(view: View) -> torch.Tensor:
    copied = torch.optim.swa_utils.AveragedModel(TASKS["hazardous"].build())
    copied.update_parameters(view.model)
    return copied.module.get_parameter(WEIGHT)


def stored(view: View) -> Any:
    file = io.BytesIO()
    torch.save(view.optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


def evaluated(view: View) -> torch.Tensor:
    with torch.no_grad():
        found = view.call.eval()(batch(9))
    view.call.train()
    return found


READS: dict[str, Callable[[View], Any]] = {
    "parameters": lambda v: next(iter(v.call.parameters())),
    "state_dict": lambda v: v.call.state_dict(),
    "evaluation": evaluated,
    "the model's attribute": lambda v: v.model.layers[0].fc.weight * 1,
    "a copy of the model": lambda v: copy.deepcopy(v.model).get_parameter(WEIGHT),
    "a moving average": averaged,
    "a tensor held since before": lambda v: v.held.detach(),
    "its numbers": lambda v: torch.from_numpy(v.held.detach().numpy()),
    "state, values": lambda v: [dict(value) for value in v.optimizer.state.values()],
    "a copied optimizer": lambda v: copy.deepcopy(v.optimizer).state_dict(),
    "a pickled optimizer": lambda v: pickle.loads(pickle.dumps(v.optimizer)).state_dict(),
    "torch.save": stored,
}


@pytest.mark.parametrize("read", READS)
def test_every_look_sees_the_updates(read: str) -> None:
    sides = due(steps=1 if read.startswith("state") else 2)
    with torch.no_grad():
        expected, found = (READS[read](view) for view in View.both(sides))
    assert_same(expected, found, read)
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))
    assert type(sides.streamed.layers[0].fc.weight) is nn.Parameter
    assert type(sides.optimizer) is torch.optim.SGD
    sides.take(batch(5), seed=5)
    sides.assert_same()


def replaced(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


WRITES: dict[str, Callable[[View], object]] = {
    "new data": lambda v: setattr(v.held, "data", torch.ones(4, 4)),
    "through the groups": lambda v: [p.mul_(0.5) for p in v.optimizer.param_groups[0]["params"]],
    "freezing": lambda v: v.model.layers[0].requires_grad_(False),
    "another parameter": lambda v: setattr(v.model.layers[0].fc, "bias", nn.Parameter(torch.ones(4))),
    "another state": lambda v: replaced(v.optimizer),
    "a new moment": lambda v: v.optimizer.state[v.held].update(momentum_buffer=torch.ones(4, 4)),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_every_write_comes_after_the_updates(write: str) -> None:
    with torch.enable_grad():
        sides = due(lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    for view in View.both(sides):
        WRITES[write](view)
    with torch.enable_grad():
        for number in (2, 3):
            sides.take(batch(number), seed=number)
    sides.assert_same()


def test_ordinary_work_leaves_the_updates_due() -> None:
    """Or every `zero_grad` and `train` of a loop would cost the overlap."""
    sides = due()
    sides.optimizer.zero_grad()
    assert repr(sides.optimizer) == repr(sides.eager_optimizer)
    for optimizer in (sides.eager_optimizer, sides.optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5
    sides.compiled.train()
    assert sum(p.numel() * p.element_size() for p in sides.compiled.parameters() if p.requires_grad) > 0
    assert sides.step.prepare(batch(2)).kind.updates == "deferred"
    assert sides.step._setup.is_due
    sides.take(batch(2), seed=2)
    sides.assert_same()


def test_the_last_updates_are_not_lost_with_the_step() -> None:
    """A function that trains and returns leaves the model trained, and an ordinary optimizer."""
    sides = due()
    model, optimizer = sides.streamed, sides.optimizer
    expected = snapshot(sides.eager, sides.eager_optimizer)
    del sides
    gc.collect()
    assert type(optimizer) is torch.optim.SGD
    assert not optimizer._optimizer_state_dict_pre_hooks
    assert_same(expected, snapshot(model, optimizer))


# -- in whatever mode, on whatever thread ----------------------------------------------------------------------------


class Refusing(TorchFunctionMode):
    """No function may get a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            raise KeyError(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def nested(*modes: AbstractContextManager[object]) -> Generator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


IN_MODES: list[tuple[Callable[[], AbstractContextManager[object]], bool, bool]] = [
    (lambda: torch.device("meta"), True, False),
    (FakeTensorMode, True, True),
    (torch.inference_mode, False, False),
    (lambda: nested(torch.device("meta"), Refusing(), torch.device("meta")), False, True),
]


@pytest.mark.parametrize(("mode", "fused", "collects"), IN_MODES, ids=["device", "fake", "inference", "functions"])
def test_the_first_updates_are_taken_in_any_mode(mode: Any, fused: bool, collects: bool) -> None:
    def start() -> tuple[megatrain.TrainStep, nn.Module, torch.optim.Optimizer]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        step = megatrain.TrainStep(megatrain.compile(model, device="cpu"), optimizer, loss=square, max_grad_norm=1.0)
        step(torch.ones(2, 4))
        return step, model, optimizer

    expected, plain, _ = start()
    expected.flush()
    step, model, used = start()
    gc.disable()
    try:
        if collects:
            step.user = {"step": step}  # a cycle: only the collector finds it
            del step
        with mode():
            gc.collect() if collects else step.flush()
    finally:
        gc.enable()
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, plain.get_parameter(name), name)
    megatrain.TrainStep(megatrain.compile(model, device="cpu"), used, loss=square)(torch.ones(2, 4))
    assert all(state["step"] == 2 for state in used.state.values()), "what the updates made can be written to"


@pytest.mark.parametrize(
    "use", [lambda sides: sides.step(batch(2)), lambda sides: sides.held.norm()], ids=["step", "read"]
)
def test_an_interrupt_while_marking_or_unmarking_leaves_all_usable(use: Callable[[Any], object]) -> None:
    sides: Any = due(adamw, steps=2)
    sides.held = sides.streamed.layers[0].fc.weight
    at = 0
    while True:
        at += 1 if at < 12 else 83  # the lines are those of a loop over tensors
        torch.manual_seed(at)
        count, lines = sides.step.progress.count, Lines("training/completion.py", at=at)
        try:
            with lines.watched():
                use(sides)
        except KeyboardInterrupt:
            assert lines.where
        drawn = torch.get_rng_state()
        if sides.step.progress.count > count:
            torch.manual_seed(at)
            sides.expect(batch(2))
        torch.set_rng_state(drawn)
        if not lines.where:
            break
        sides.take(batch(at), seed=at)
    sides.assert_same()
    assert at > 10


# -- spread over two steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, "overlap"),  # on the CPU
        ({"overlap": False}, "serial"),
        ({"max_grad_norm": 1.0}, "deferred"),
        ({"on_nonfinite": "skip"}, "deferred"),
        ({"report_norm": True, "spread": True}, "overlap"),
    ],
    ids=str,
)
def test_where_updates_are_not_spread(options: dict[str, Any], updates: str) -> None:
    sides = SideBySide.of("hazardous", adamw, **options)
    for number in range(2):
        sides.take(batch(number), seed=number)
    assert sides.step.schedule.kind.updates == updates
    sides.assert_same()


def test_without_the_host_memory_for_gradients_that_wait_updates_are_not_spread(monkeypatch: pytest.MonkeyPatch):
    needed: dict[bool, int] = {}
    for is_spread in (True, False):
        step = megatrain.TrainStep(compiled := fresh("llama"), sgd(compiled), spread=is_spread)
        step.prepare(labelled(0, 2))
        needed[is_spread] = step.host_plan.total_bytes - step.host_plan.held_bytes
    assert needed[True] > needed[False]
    for available, updates in ((needed[True], "spread"), (needed[True] - 1, "overlap"), (needed[False], "overlap")):
        sides = SideBySide.of("llama", sgd, spread=True)
        monkeypatch.setattr(host_plan, "available_now", lambda available=available: available)
        for number in range(2):
            sides.take(labelled(number, 2), seed=number)
            assert sides.step.schedule.kind.updates == updates
        sides.assert_same()
    step = megatrain.TrainStep(compiled := fresh("llama"), sgd(compiled), spread=True)
    monkeypatch.setattr(host_plan, "available_now", lambda: needed[False] - 1)
    with pytest.raises(megatrain.ExecuteError, match="1 B are missing"):
        step(labelled(0, 2))
