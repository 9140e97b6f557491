"""Block by block, an optimizer leaves the bits that its own step leaves."""

import copy
import random
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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


@register
class Child(torch.optim.SGD):
    """Calls its parent's step, which torch wraps with hooks too."""

    def step(self, closure=None):
        return super().step(closure)


def two_groups(parameters, **second):
    return [{"params": parameters[:3]}, {"params": parameters[3:], **second}]


MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0, lr=1e-2), lr=1e-3, weight_decay=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0), fused=True),
    "adamw mixed": lambda ps: torch.optim.AdamW(
        two_groups(ps, foreach=True, maximize=True, amsgrad=True), foreach=False
    ),
    "adamw tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2)),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
    "lion": lambda ps: Lion(two_groups(ps, lr=0.1)),
    "child": lambda ps: Child(ps, lr=0.1),
    "names": lambda ps: torch.optim.AdamW([(f"p{i}", p) for i, p in enumerate(ps)]),
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
        # Torch's fused SGD fails where a parameter's first gradient comes later than another's.
        set_gradients((ps, qs), generator, skipped=() if name == "sgd fused" else {step % 11})
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


def test_what_is_set_during_a_step_takes_effect_with_the_next():
    ps, qs = parameters(), parameters()
    whole, parts = (torch.optim.SGD(x, lr=torch.tensor(0.1)) for x in (ps, qs))
    set_gradients((ps, qs), torch.Generator())
    blocks = by_blocks(parts, qs)
    whole.step()
    blocks.begin()
    blocks.update(0)
    parts.param_groups[0]["lr"].fill_(5.0)
    for block in range(1, len(BLOCKS)):
        blocks.update(block)
    blocks.finish()
    assert all(torch.equal(p, q) for p, q in zip(ps, qs, strict=True))
    assert parts.param_groups[0]["lr"] == 5.0


def test_hooks_run_once_a_step_and_see_the_users_optimizer():
    ps = parameters()
    optimizer = torch.optim.SGD(ps, lr=0.1)
    set_gradients((ps,), torch.Generator())
    before = [p.detach().clone() for p in ps]
    events = []

    def note(name):
        def hook(given, args, kwargs):
            assert given is args[0] is optimizer
            assert kwargs == {}
            events.append((name, all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))))

        return hook

    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    handles = [register_optimizer_step_pre_hook(note("all pre")), register_optimizer_step_post_hook(note("all post"))]
    try:
        blocks = by_blocks(optimizer, ps)
        assert events == []
        assert blocks.has_hooks
        step_by_blocks(blocks, range(len(BLOCKS)))
    finally:
        for handle in handles:
            handle.remove()
    assert events == [("all pre", True), ("pre", True), ("post", False), ("all post", False)]


def test_an_abandoned_step_takes_no_further_update_and_counts_nothing():
    ps = parameters()
    optimizer = Lion(ps)
    set_gradients((ps,), torch.Generator())
    blocks = by_blocks(optimizer, ps)
    blocks.begin()
    blocks.update(2)
    blocks.abandon()
    assert optimizer.count == 0
    assert optimizer.param_groups[0]["taken"] == 0
    assert [torch.equal(p, b) for p, b in zip(ps, parameters(), strict=True)].count(False) == 1
    step_by_blocks(blocks, range(len(BLOCKS)))
    assert optimizer.count == 1


class NormSGD(torch.optim.SGD):
    """Scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / norm, alpha=group["lr"])


class Lookahead(torch.optim.SGD):
    """Slow weights, by an optimizer inside."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner, self.slow = [torch.optim.Adam(params)], [p.detach().clone() for p in params]

    def step(self, closure=None):
        self.inner[0].step()
        with torch.no_grad():
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("make", [lambda ps: NormSGD(ps, lr=0.1), Lookahead])
def test_what_isnt_known_to_be_per_parameter_takes_its_own_step_at_the_end(make):
    ps, qs = parameters(), parameters()
    whole, parts = make(ps), make(qs)
    blocks = by_blocks(parts, qs)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        set_gradients((ps, qs), generator, skipped={step})
        torch.manual_seed(step)
        whole.step()
        before = [q.detach().clone() for q in qs]
        torch.manual_seed(step)
        blocks.begin()
        for block in range(len(BLOCKS)):
            blocks.update(block)
        assert blocks.is_at_once
        assert all(torch.equal(q, b) for q, b in zip(qs, before, strict=True))
        blocks.finish()
    assert_equal(whole, ps, parts, qs)


class Failing(torch.optim.SGD):
    """Changes everything that it can, and fails."""

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        group["lr"].mul_(2)
        group["new"] = self.new = 1
        self.count = 5
        group["dampening"] = 0.5
        raise RuntimeError("no such layer")


def test_a_step_at_once_that_fails_leaves_no_option_and_no_attribute():
    ps = parameters()
    optimizer = Failing(ps, lr=torch.tensor(0.1))
    optimizer.count = 4
    before = copy.deepcopy(optimizer.state_dict())
    blocks = by_blocks(optimizer, ps)
    blocks.begin()
    with pytest.raises(RuntimeError, match="no such layer"):
        blocks.finish()
    assert is_same(optimizer.state_dict(), before)
    assert optimizer.count == 4
    assert not hasattr(optimizer, "new")
    assert blocks.left == set(range(len(BLOCKS)))


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


def test_calls_out_of_order_are_refused():
    ps = parameters()
    blocks = by_blocks(torch.optim.SGD(ps, lr=0.1), ps)
    with pytest.raises(OptimizerError, match="no step has begun"):
        blocks.update(0)
    with pytest.raises(OptimizerError, match="no step has begun"):
        blocks.finish()
    blocks.begin()
    with pytest.raises(OptimizerError, match="under way"):
        blocks.begin()
    blocks.update(0)
    with pytest.raises(OptimizerError, match="block 0 has no update left"):
        blocks.update(0)
    with pytest.raises(OptimizerError, match=r"blocks \[1, 2, 3, 4\] were not updated"):
        blocks.finish()
