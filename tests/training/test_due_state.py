"""An optimizer's state behind a step is what eager shows, however it is read, dropped or replaced."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.comparing import assert_same, snapshot
from tests.interrupting import Lines
from tests.tiers import checkered
from tests.training.parity import SideBySide, adamw, sgd

WEIGHT = "layers.0.fc.weight"


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def due(optimizer: Any = sgd, steps: int = 1) -> SideBySide:
    """Some steps, the updates of the last not taken."""
    sides = SideBySide.of("hazardous", optimizer, max_grad_norm=0.5)
    for number in range(steps):
        sides.take(batch(number), seed=number)
    return sides


def taken(value: Any) -> Any:
    return copy.deepcopy(dict(value))


def stored(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


READS: dict[str, Callable[[Any, Any], Any]] = {
    "get": lambda o, p: taken(o.state.get(p, {})),
    "item": lambda o, p: taken(o.state[p]),
    "in": lambda o, p: p in o.state,
    "len": lambda o, p: len(o.state),
    "values": lambda o, p: [taken(v) for v in o.state.values()],
    "deepcopy": lambda o, p: copy.deepcopy(o).state_dict(),
    "copy": lambda o, p: copy.copy(o).state_dict(),
    "pickle": lambda o, p: pickle.loads(pickle.dumps(o)).state_dict(),
    "torch.save": lambda o, p: stored(o),
    "text": lambda o, p: repr(o),
    "class": lambda o, p: (isinstance(o, torch.optim.Optimizer), isinstance(o.state, defaultdict), type(o)),
    "state_dict": lambda o, p: copy.deepcopy(o.state_dict()),
}


@pytest.mark.parametrize(("read", "steps"), checkered(READS, [1, 2]))
def test_every_look_at_the_state_is_eagers(read: str, steps: int) -> None:
    sides = due(steps=steps)
    both = ((sides.eager, sides.eager_optimizer), (sides.streamed, sides.optimizer))
    found = [READS[read](o, m.get_parameter(WEIGHT)) for m, o in both]
    assert_same(*found)
    sides.take(batch(5), seed=5)
    sides.assert_same()
    assert type(sides.optimizer) is torch.optim.SGD


def replaced(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clear": lambda o, p: o.state.clear(),
    "pop": lambda o, p: o.state.pop(p),
    "del": lambda o, p: o.state.__delitem__(p),
    "assign": lambda o, p: replaced(o),
    "set": lambda o, p: o.state.__setitem__(p, {}),
    "update": lambda o, p: o.state[p].update(momentum_buffer=torch.ones(4, 4)),
}


@pytest.mark.parametrize(("write", "steps"), checkered(WRITES, [1, 2]))
def test_what_is_dropped_or_replaced_stays_so(write: str, steps: int) -> None:
    sides = due(steps=steps)
    for model, optimizer in ((sides.eager, sides.eager_optimizer), (sides.streamed, sides.optimizer)):
        WRITES[write](optimizer, model.get_parameter(WEIGHT))
    for number in range(5, 7):
        sides.take(batch(number), seed=number)
    sides.assert_same()


def test_ordinary_work_leaves_the_updates_due() -> None:
    sides = due(steps=2)
    sides.optimizer.zero_grad()
    assert repr(sides.optimizer) == repr(sides.eager_optimizer)
    sides.optimizer.param_groups[0]["lr"] *= 0.5
    assert sides.step._setup.is_due
    assert type(sides.optimizer) is not torch.optim.SGD
    sides.step.flush()
    assert type(sides.optimizer) is torch.optim.SGD
    assert all(type(p) is torch.nn.Parameter for p in sides.streamed.parameters())


def test_a_step_that_is_gone_leaves_an_ordinary_optimizer() -> None:
    sides = due(steps=2)
    optimizer = sides.optimizer
    expected = snapshot(sides.eager, sides.eager_optimizer)
    streamed = sides.streamed
    del sides
    gc.collect()
    assert type(optimizer) is torch.optim.SGD
    assert_same(expected, snapshot(streamed, optimizer))


# -- failures --------------------------------------------------------------------------------------------------------


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize(("name", "mode"), checkered(["exp_avg", "exp_avg_sq", "step"], ["serial", "deferred"]))
def test_an_update_of_a_fused_optimizer_that_fails_in_its_middle_is_undone(mode: str, name: str) -> None:
    options: dict[str, Any] = {"overlap": False} if mode == "serial" else {"max_grad_norm": 0.5}
    sides = SideBySide.of("hazardous", fused, **options)
    for number in range(2):
        sides.take(batch(number), seed=number)
    sides.assert_same()
    if mode == "deferred":
        sides.take(batch(2), seed=2)
    state = vars(sides.optimizer)["state"][sides.streamed.layers[0].norm.bias]
    kept = state.pop(name)
    before = [p.detach().clone() for p in map(torch.Tensor.detach, plain(sides))]
    torch.manual_seed(2)
    with pytest.raises(Exception, match=name):
        sides.step.flush() if mode == "deferred" else sides.step(batch(2))
    torch.manual_seed(2)
    assert_same(before[:4], [p.clone() for p in plain(sides)][:4], "a block of which one update can't be taken")
    state[name] = kept
    if mode == "serial":  # other blocks were updated ahead of it, so the step is completed
        assert sides.step.progress.count == 3
        sides.expect(batch(2))
    sides.take(batch(3), seed=3)
    sides.assert_same()


def plain(sides: SideBySide) -> list[torch.Tensor]:
    """The first block's parameters as they are in memory, without taking what is due."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach() for p in sides.streamed.layers[0].parameters()]


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[SideBySide], object]] = {
    "step": lambda sides: sides.step(batch(2)),
    "flush": lambda sides: sides.step.flush(),
    "read": lambda sides: sides.streamed.layers[0].fc.weight.norm(),
    "state": lambda sides: sides.optimizer.state.get(torch.ones(1)),
}


@pytest.mark.parametrize("use", USES)
def test_an_interrupt_while_marking_or_unmarking_leaves_all_usable(use: str) -> None:
    sides = due(adamw, steps=2)
    at = 0
    while True:
        at += 1 if at < 12 else 83  # the lines are those of a loop over tensors
        torch.manual_seed(at)
        count = sides.step.progress.count
        lines = Lines("training/completion.py", at=at)
        try:
            with lines.watched():
                USES[use](sides)
        except KeyboardInterrupt:
            assert lines.where
        drawn = torch.get_rng_state()
        if sides.step.progress.count > count:
            torch.manual_seed(at)
            sides.expect(batch(2))
        torch.set_rng_state(drawn)
        if not lines.where:
            break
        if at % 3 == 0:
            sides.assert_same(lines.where)
        sides.take(batch(at), seed=at)
    sides.assert_same()
    assert at > 10
