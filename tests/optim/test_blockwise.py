"""Block by block, an optimizer leaves the bits that its own step leaves."""

import random
from typing import Any

import pytest
import torch

from megatrain.errors import OptimizerError, OptionError
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.per_parameter import is_per_parameter, register, unregister
from megatrain.optim.proxy import is_same

SHAPES = ((5, 3), (5,), (4, 4), (3,), (6, 2), (1,), (2, 3), ())
BLOCKS = ((0, 1), (2, 0), (3,), (), (4, 5))  # 0 is tied, 6 is in no block, a block may have none


@register
class Lion(torch.optim.Optimizer):
    """A user's optimizer that counts its steps in an attribute and in its groups."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "taken": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["taken"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.lerp(p.grad, mean, group["betas"][0]).sign_(), alpha=group["lr"] / self.count)
                mean.lerp_(p.grad, 1 - group["betas"][1])


def two_groups(parameters, **second):
    return [{"params": parameters[:3]}, {"params": parameters[3:], **second}]


MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0, lr=1e-2), lr=1e-3, weight_decay=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0), fused=True),
    "adamw mixed": lambda ps: torch.optim.AdamW(
        two_groups(ps, foreach=True, maximize=True, amsgrad=True), foreach=False
    ),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
    "lion": lambda ps: Lion(two_groups(ps, lr=0.1)),
}
for each in "Adafactor RAdam NAdam Adagrad RMSprop Adamax Adadelta ASGD Rprop".split():
    MAKERS[each] = lambda ps, each=each: getattr(torch.optim, each)(ps, lr=0.1)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def by_blocks(optimizer, ps, **options) -> BlockOptimizer:
    return BlockOptimizer(optimizer, [[ps[i] for i in block] for block in BLOCKS], **options)


def step_by_blocks(blocks: BlockOptimizer, order) -> None:
    blocks.begin()
    for block in order:
        blocks.update(block)
    blocks.finish()


def set_gradients(sides, generator: torch.Generator, skipped=()) -> None:
    for index, pair in enumerate(zip(*sides, strict=True)):
        gradient = torch.randn(pair[0].shape, generator=generator)
        for p in pair:
            p.grad = None if index in skipped else gradient.clone()


def assert_equal(whole, ps, parts, qs) -> None:
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p, q)
    assert is_same(whole.state_dict(), parts.state_dict())


@pytest.mark.parametrize("name", MAKERS)
def test_steps_leave_the_same_bits_in_any_order(name: str):
    ps, qs = parameters(), parameters()
    whole, parts = MAKERS[name](ps), MAKERS[name](qs)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10) for o in (whole, parts)]
    blocks = by_blocks(parts, qs)
    generator, order = torch.Generator().manual_seed(1), list(range(len(BLOCKS)))
    for step in range(9):
        random.Random(step).shuffle(order)
        set_gradients((ps, qs), generator, skipped={step % 11})
        whole.step()
        step_by_blocks(blocks, order)
        for schedule in schedules:
            schedule.step()
        for optimizer in (whole, parts):
            if step == 7:
                optimizer.param_groups[-1]["weight_decay"] = 0.05
    assert_equal(whole, ps, parts, qs)
    assert any(not torch.equal(p, q) for p, q in zip(ps, parameters(), strict=True))
    assert schedules[0].state_dict().keys() == schedules[1].state_dict().keys()


class NormSGD(torch.optim.SGD):
    """Scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / norm, alpha=group["lr"])


class Named(torch.optim.AdamW):
    """Adds what no step calls."""

    label = "mine"

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.note = "mine"

    def state_dict(self):
        return super().state_dict()


class Sneaking(torch.optim.AdamW):
    def _init_group(self, *args):
        return super()._init_group(*args)


class Reading(torch.optim.AdamW):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


def changed_object(ps):
    optimizer: Any = torch.optim.SGD(ps)
    optimizer._init_group = lambda *args: False
    return optimizer


def overridden(ps):
    """As bitsandbytes does, which finds options by the position of a parameter."""
    optimizer: Any = torch.optim.SGD(ps)
    module = torch.nn.Module()
    module.weight = ps[0]
    optimizer.mng = type("Manager", (), {"module_weight_config_triple": [(module, "weight", {"optim_bits": 32})]})()
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Named, True),
        (Lion, True),
        (Sneaking, False),
        (Reading, False),
        (changed_object, False),
        (overridden, False),
        (type("Kin", (Lion,), {}), False),
        (type("Mixed", (type("First", (), {"step": lambda self: None}), torch.optim.AdamW), {}), False),
    ],
)
def test_torchs_own_code_is_known_and_what_replaces_a_part_of_it_is_not(make, expected: bool):
    assert is_per_parameter(make(parameters())) is expected


def test_a_promise_is_given_and_taken_back():
    optimizer = NormSGD(parameters())
    assert not is_per_parameter(optimizer)
    assert register(NormSGD) is NormSGD
    assert is_per_parameter(optimizer)
    unregister(NormSGD)
    assert not is_per_parameter(optimizer)
    with pytest.raises(OptionError, match="the class and not an object of it"):
        register(optimizer)  # pyright: ignore


class Holding(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def holding(value):
    def make(ps):
        optimizer: Any = Holding(ps, lr=0.1)
        optimizer.other = [value(ps)]
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "needs `closure`"),
        (holding(lambda ps: torch.nn.Linear(2, 2)), "`other` holds a Linear"),
        (holding(lambda ps: torch.nn.Parameter(torch.ones(2))), "`other` holds a Parameter"),
        (holding(lambda ps: torch.optim.SGD([*ps, torch.ones(2)])), "`other` holds a SGD"),
    ],
)
def test_what_no_call_of_step_updates_is_refused(make, reason: str):
    ps = parameters()
    with pytest.raises(OptimizerError, match=reason):
        by_blocks(make(ps), ps)
    by_blocks(holding(lambda ps: torch.optim.SGD(ps))(ps), ps)


def test_a_step_that_was_replaced_or_given_arguments_is_refused():
    ps = parameters()
    optimizer = torch.optim.SGD(ps, lr=0.1)
    blocks = by_blocks(optimizer, ps)
    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: (args, {"closure": lambda: 0}))
    with pytest.raises(OptimizerError, match="gives `step` arguments"):
        blocks.begin()
    handle.remove()
    optimizer.step = lambda closure=None: None
    with pytest.raises(OptimizerError, match="was replaced"):
        blocks.begin()
    del optimizer.step
    step_by_blocks(blocks, range(len(BLOCKS)))
