"""Block by block, an optimizer leaves the bits that its own step leaves."""

import copy
import random
import threading

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatrain.errors import OptimizerError
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.impostor import is_same
from tests.gradients import grad_of

SHAPES = ((5, 3), (5,), (4, 4), (3,), (6, 2), (1,), (2, 3), ())
BLOCKS = ((0, 1), (2, 0), (3,), (), (4, 5))  # 0 is tied, 6 is in no block, a block may have none


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


class Child(torch.optim.SGD):
    """Calls its parent's step, which torch wraps with hooks too."""

    def step(self, closure=None):
        return super().step(closure)


def two_groups(parameters, **second):
    return [{"params": parameters[:3]}, {"params": parameters[3:], **second}]


MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0, lr=1e-2), lr=1e-3, weight_decay=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(two_groups(ps, weight_decay=0.0), fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(two_groups(ps, maximize=True, amsgrad=True), foreach=True),
    "adamw mixed": lambda ps: torch.optim.AdamW(two_groups(ps, foreach=True, maximize=True), foreach=False),
    "adamw tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2)),
    "adam": lambda ps: torch.optim.Adam(ps, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "lion": lambda ps: Lion(two_groups(ps, lr=0.1)),
    "child": lambda ps: Child(ps, lr=0.1),
    "names": lambda ps: torch.optim.AdamW([(f"p{i}", p) for i, p in enumerate(ps)]),
}


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
def test_twenty_steps_leave_the_same_bits_in_any_order(name: str):
    ps, qs = parameters(), parameters()
    whole, parts = MAKERS[name](ps), MAKERS[name](qs)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10) for o in (whole, parts)]
    blocks = by_blocks(parts, qs)
    generator, order = torch.Generator().manual_seed(1), list(range(len(BLOCKS)))
    for step in range(20):
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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize(
    "make", [lambda ps: torch.optim.SparseAdam(ps), lambda ps: torch.optim.SGD(ps, lr=0.1), torch.optim.Adagrad]
)
def test_sparse_gradients(make):
    ps, qs = ([torch.nn.Embedding(6, 3, sparse=True).weight for _ in range(2)] for _ in range(2))
    for p, q in zip(ps, qs, strict=True):
        q.data.copy_(p.data)
    whole, parts = make(ps), make(qs)
    blocks = BlockOptimizer(parts, [[q] for q in qs])
    for step in range(5):
        for p, q in zip(ps, qs, strict=True):
            for weight in (p, q):
                weight.grad = None
                torch.nn.functional.embedding(
                    torch.tensor([step % 3, 5]), weight, sparse=True
                ).square().sum().backward()
        whole.step()
        step_by_blocks(blocks, (1, 0))
    assert_equal(whole, ps, parts, qs)


def test_a_scheduler_finds_that_the_step_was_called(recwarn):
    ps = parameters()
    optimizer = torch.optim.SGD(ps, lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    set_gradients((ps,), torch.Generator())
    step_by_blocks(by_blocks(optimizer, ps), range(len(BLOCKS)))
    schedule.step()
    assert not recwarn.list


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


def test_parameters_stay_in_their_groups_for_everybody_else_while_a_block_is_updated():
    ps = parameters()
    seen = []

    class Peeking(torch.optim.SGD):
        def step(self, closure=None):
            if len(self.param_groups[0]["params"]) < len(SHAPES) and "optimizer" in globals():
                seen.append(len(globals()["optimizer"].param_groups[0]["params"]))
            return super().step(closure)

    globals()["optimizer"] = Peeking(ps, lr=0.1)
    try:
        step_by_blocks(by_blocks(globals()["optimizer"], ps), range(len(BLOCKS)))
    finally:
        del globals()["optimizer"]
    assert seen
    assert set(seen) == {len(SHAPES)}


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


def test_the_trial_leaves_everything_as_it_was():
    ps = parameters()
    optimizer = Lion(ps)
    set_gradients((ps,), torch.Generator())
    optimizer.step()
    state, gradients = copy.deepcopy(optimizer.state_dict()), [p.grad.clone() for p in ps]
    random_state = torch.get_rng_state()
    by_blocks(optimizer, ps)
    assert is_same(optimizer.state_dict(), state)
    assert optimizer.count == 1
    assert len(optimizer.state) == len(ps)
    assert all(torch.equal(grad_of(p), g) for p, g in zip(ps, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_updates_on_another_thread():
    ps, qs = parameters(), parameters()
    whole, parts = (torch.optim.AdamW(x) for x in (ps, qs))
    set_gradients((ps, qs), torch.Generator())
    blocks = by_blocks(parts, qs)
    whole.step()
    blocks.begin()
    thread = threading.Thread(target=lambda: [blocks.update(block) for block in range(len(BLOCKS))])
    thread.start()
    thread.join()
    blocks.finish()
    assert_equal(whole, ps, parts, qs)


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
    """Scales by the norm of all gradients, as LARC and Adafactor's kin do globally."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Keeps a list, which each call would lengthen."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.log = []

    def step(self, closure=None):
        self.log.append(1)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


class Distance(torch.optim.SGD):
    """Leaves an estimate from the gradients it was given in its group, as D-adaptation does."""

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        group["distance"] = group.get("distance", 0.0) + sum(float(p.grad.norm()) for p in group["params"])


class Lookahead(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = [torch.optim.SGD(params, lr=0.1)]


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "needs `closure`"),
        (lambda ps: NormSGD(ps, lr=0.1), "give another value of a"),
        (lambda ps: NormSGD(ps, lr=0.0), "give another value of a"),  # where a scheduler that warms up begins
        (lambda ps: NormSGD(ps, lr=1e-12), "give another value of a"),
        (Counting, "give another `log`"),
        (lambda ps: Noisy(ps, lr=0.1), "give another value of a"),
        (lambda ps: Distance(ps, lr=0.1), "two values of `distance`"),
        (Lookahead, "`inner` holds a SGD"),
        (lambda ps: Failing(ps, lr=0.1), "no such layer"),
    ],
)
def test_what_needs_all_parameters_at_once_is_refused(make, reason: str):
    ps = parameters()
    before = [p.detach().clone() for p in ps]
    with pytest.raises(OptimizerError, match=reason):
        by_blocks(make(ps), ps)
    assert all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))


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


def test_groups_added_later_take_part():
    ps, qs = parameters(), parameters()
    whole, parts = (torch.optim.AdamW(x[:4]) for x in (ps, qs))
    blocks = by_blocks(parts, qs)
    for optimizer, x in ((whole, ps), (parts, qs)):
        optimizer.add_param_group({"params": x[4:], "lr": 0.1})
    set_gradients((ps, qs), torch.Generator())
    whole.step()
    step_by_blocks(blocks, range(len(BLOCKS)))
    assert_equal(whole, ps, parts, qs)
