"""Rewriter: nodes get all of their meta, take each other's places, and are refused where that would be wrong."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.errors import LowerError
from megatrain.passes.call_trial import Site, tried
from megatrain.passes.pipeline import lower
from megatrain.passes.rewriter import Rewriter
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from tests.models import MODELS
from tests.tracer.parity import assert_same_step, eager_step, program_step

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """A product, a view of it that is written, a dropout, a sum under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        y = F.relu(self.fc(x))
        z = torch.add(y, 1)
        z.view(-1).mul_(2.0)
        with torch.no_grad():
            self.total.add_(z.sum())
        return z + torch.sigmoid(y), x.transpose(0, 1) * 2


def _traced() -> TracedModule:
    return trace(Net(), (X,))


def _input(rewriter: Rewriter):
    return next(n for n in rewriter.graph.nodes if n.op == "placeholder")


def assert_same(change: Callable[[Rewriter], None]) -> TracedModule:
    """Changes the graph of a model, and takes a step of it and of the model: equal to the bit."""
    traced = _traced()
    before = str(traced)

    def changed(capture: TracedModule) -> TracedModule:
        rewriter = Rewriter(capture)
        change(rewriter)
        return rewriter.done()

    kept: list[Any] = []
    program = lower(
        traced, rewrites=(changed,), after_pass=lambda name, made: kept.append(made) if name == "changed" else None
    )
    assert str(traced) == before
    model = Net()
    assert_same_step(program_step(traced, program, model, (X,), {}), eager_step(Net(), (X,), {}))
    return kept[0]


def test_a_call_gets_its_meta_from_the_trial_and_from_the_call_it_is_like():
    rewriter = Rewriter(_traced())
    linear = rewriter.calls(F.linear)[0]
    node = rewriter.call(linear, "mul", linear, 2)
    assert node.prev is linear
    assert node.meta == {
        "spec": TensorSpec((4, 6), torch.float32),
        "requires_grad": True,
        "has_history": True,
        "storage": node.meta["storage"],
        "storage_bytes": 96,
        "modules": linear.meta["modules"],
        "source": linear.meta["source"],
        "grad": True,
        "autocast": (),
        "is_random": False,
    }
    assert node.meta["modules"][-1][0] == "fc"
    numbers = [n.meta["storage"] for n in rewriter.graph.nodes if "storage" in n.meta]
    assert numbers.count(node.meta["storage"]) == 1


def test_a_call_that_draws_is_marked():
    rewriter = Rewriter(_traced())
    linear = rewriter.calls(F.linear)[0]
    state = torch.get_rng_state()
    assert rewriter.call(linear, F.dropout, linear, 0.5).meta["is_random"]
    assert not rewriter.call(linear, F.dropout, linear, 0.5, training=False).meta["is_random"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_may_be_put_behind_another_and_take_its_place():
    def change(rewriter: Rewriter) -> None:
        (linear,) = rewriter.calls(F.linear)
        rewriter.replace(linear, rewriter.call(linear, "neg", rewriter.call(linear, "neg", linear)))

    made = assert_same(change)
    linear, inner, outer = (n for n in made.graph.nodes if n.target in (F.linear, "neg"))
    assert [inner.args, outer.args] == [(linear,), (inner,)]
    assert set(outer.users) & set(inner.users) == set()


def test_what_replaces_a_call_takes_its_name_its_views_and_the_writes_into_it():
    def change(rewriter: Rewriter) -> None:
        (added,) = rewriter.calls(torch.add)
        rewriter.replace(added, rewriter.call(added, "add", *added.args))

    made = assert_same(change)
    node = next(n for n in made.graph.nodes if n.name == "add")
    assert node.op == "call_method"
    view = next(n for n in made.graph.nodes if n.target == "view")
    assert view.meta["storage"] == node.meta["storage"]
    write = next(n for n in made.graph.nodes if n.target == "mul_")
    assert node in write.meta["writes"]
    assert view in write.meta["writes"]


def test_what_is_dead_goes_with_the_state_that_nobody_reads():
    traced = trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,))
    rewriter = Rewriter(traced)
    (relu,) = rewriter.calls(F.relu)
    zeros = rewriter.call(relu, torch.zeros, 4, 6, device=rewriter.device)
    assert not zeros.meta["requires_grad"]
    with pytest.raises(LowerError, match=r"`zeros` requires a gradient: False, and `relu`.*, True"):
        rewriter.replace(relu, zeros)
    rewriter.replace(relu, rewriter.call(relu, "mul", relu.args[0], 0))
    made = rewriter.done()
    assert [n.name for n in made.graph.nodes if n.op == "call_function"] == ["linear"]
    assert "relu" in [n.name for n in made.graph.nodes]
    with pytest.raises(LowerError, match="isn't a node of this graph"):
        rewriter.call(relu, "abs", relu)  # it was replaced
    assert set(made.state) == {"0.weight", "0.bias"}


def _value(rewriter: Rewriter):
    return rewriter.calls(F.linear)[0]


NOTHING: Any = None
THREE: Any = 3
REFUSED: dict[str, tuple[Callable[[Rewriter], object], str]] = {
    "an input to be like": (lambda r: r.call(_input(r), "abs", _input(r)), r"`\w+` isn't a call"),
    "nothing to be like": (lambda r: r.call(NOTHING, "abs", _value(r)), "None isn't a node of this graph"),
    "another graph's": (lambda r: r.call(_value(r), "abs", _value(Rewriter(_traced()))), "isn't a node of this graph"),
    "a module": (lambda r: r.call(_value(r), nn.Linear(6, 6), _value(r)), "`Linear` is a module"),
    "no function": (lambda r: r.call(_value(r), THREE, _value(r)), "`3` can't be called"),
    "no method": (lambda r: r.call(_value(r), "frobnicate", _value(r)), "`frobnicate` is no method of torch.Tensor"),
    "a tensor": (lambda r: r.call(_value(r), "add", _value(r), torch.ones(6)), "`add` is given a tensor"),
    "a shape": (
        lambda r: r.call(_value(r), "view", _value(r), 7),
        "`view` can't be called with these arguments: RuntimeError",
    ),
    "a keyword": (
        lambda r: r.call(_value(r), F.relu, _value(r), hot=1),
        "`relu` can't be called with these arguments: TypeError",
    ),
    "values": (lambda r: r.call(_value(r), "nonzero", _value(r)), "`nonzero` can't be called with these arguments"),
    "in place": (lambda r: r.call(_value(r), "mul_", _input(r), 2), r"`mul_` writes into `\w+`"),
    "no tensor": (lambda r: r.call(_value(r), "size", _value(r)), "`size` makes no tensor"),
    "too late": (lambda r: r.call(r.calls(F.linear)[0], "abs", r.calls(torch.add)[0]), "made after `linear`"),
    "elsewhere": (lambda r: r.call(_value(r), torch.zeros, 3, device="meta"), "makes a tensor on meta"),
    "replaces an input": (lambda r: r.replace(_input(r), _value(r)), r"`\w+` is no call that makes one tensor"),
    "another shape": (
        lambda r: r.replace(_value(r), r.call(_value(r), "sum", _value(r))),
        r"`sum_\d` is f32\[\], and `linear`, which it is to replace, f32\[4, 6\]",
    ),
    "another layout": (
        lambda r: r.replace(_value(r), r.call(_value(r), "as_strided", _value(r), (4, 6), (1, 4))),
        r"is f32\[4, 6\] stride \(1, 4\), and",
    ),
    "read before": (
        lambda r: r.replace(r.calls(F.linear)[0], r.call(r.calls(torch.add)[0], "neg", r.calls(torch.add)[0])),
        r"`relu` comes before `neg`, which is to replace `linear`",
    ),
    "a view for what is written": (
        lambda r: r.replace(r.calls(torch.add)[0], r.call(r.calls(torch.add)[0], "view_as", *_twice(r))),
        "`add` is written in place, and `view_as` is a view",
    ),
}


def _twice(rewriter: Rewriter):
    (relu,) = rewriter.calls(F.relu)
    return relu, relu


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_break_the_graph_is_refused(case: str):
    change, text = REFUSED[case]
    with pytest.raises(LowerError, match=text) as caught:
        change(Rewriter(_traced()))
    assert len(str(caught.value).splitlines()) == 3, "what, the rule, and the way out"


def test_a_buffer_is_written_from_what_replaced_its_value():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return self.fc(x)

    traced = trace(Counted(), (X,))
    rewriter = Rewriter(traced)
    (value,) = rewriter.kept
    rewriter.replace(value, rewriter.call(value, "add", value.args[0], 0))
    made = rewriter.done()
    made.check()
    assert [(key, node.target) for key, node in made.writes_back] == [("mean", "add")]


def halves(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return one + other, other[2:]


def test_calls_that_are_alike_are_tried_once_and_get_what_their_own_trial_would_give(monkeypatch: pytest.MonkeyPatch):
    count = 0

    def noted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return tried(*given)

    monkeypatch.setattr("megatrain.passes.rewriter.tried", noted)

    def made(rewriter: Rewriter, one: Any, other: Any, *, trials: int, target: Any = halves, grad: bool = True) -> Any:
        nonlocal count
        count = 0
        (linear,) = rewriter.calls(F.linear)
        site = dataclasses.replace(Site.of(linear), grad=grad)
        found = rewriter.add(site, target, (one, other))
        assert count == trials
        anew = Rewriter(rewriter.done())
        expected = anew.add(
            site, target, tuple(next(n for n in anew.graph.nodes if n.name == o.name) for o in (one, other))
        )
        keys = ("spec", "requires_grad", "storage_bytes")
        assert [[n.meta[key] for key in keys] for n in found] == [[n.meta[key] for key in keys] for n in expected]
        assert found[1].meta["storage"] == other.meta["storage"] != found[0].meta["storage"]
        return found

    rewriter = Rewriter(_traced())
    x, (linear,) = _input(rewriter), rewriter.calls(F.linear)
    weight = linear.args[1]
    made(rewriter, x, linear, trials=1)
    made(rewriter, x, linear, trials=0)
    made(rewriter, linear, x, trials=1)  # another one needs a gradient
    made(rewriter, x, x, trials=1)  # one tensor twice
    made(rewriter, weight, weight, trials=1)  # another shape
    made(rewriter, x, linear, trials=1, grad=False)
    made(rewriter, x, linear, trials=1, target=functools.partial(halves))
    made(rewriter, x, linear, trials=0)


def test_modes_are_those_of_the_call_it_is_like():
    rewriter = Rewriter(_traced())
    (total,) = [n for n in rewriter.calls("sum") if not n.meta["grad"]]
    without = rewriter.call(total, "exp", total)
    assert (without.meta["grad"], without.meta["requires_grad"]) == (False, False)
    rewriter = Rewriter(trace(*MODELS["autocast_region"]()))
    narrow = next(n for n in rewriter.calls(F.linear) if n.meta["autocast"])
    made = rewriter.call(narrow, F.linear, *narrow.args)
    assert made.meta["autocast"] == narrow.meta["autocast"]
    assert made.meta["spec"].dtype == torch.bfloat16
    rewriter = Rewriter(_traced())
    (linear,) = rewriter.calls(F.linear)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # of whoever runs the pass: these don't count
        made = rewriter.call(linear, F.linear, *linear.args)
    assert made.meta["spec"] == linear.meta["spec"]
    assert made.meta["requires_grad"]


def test_a_view_shares_the_memory_of_its_operand():
    rewriter = Rewriter(_traced())
    linear = rewriter.calls(F.linear)[0]
    view = rewriter.call(linear, "narrow", linear, 0, 1, 2)
    assert (view.meta["storage"], view.meta["storage_bytes"]) == (linear.meta["storage"], 96)
    turned = rewriter.call(linear, "transpose", linear, 0, 1)
    assert turned.meta["spec"].stride == (1, 6)


def test_a_call_with_several_results_gives_a_node_for_each():
    rewriter = Rewriter(_traced())
    linear = rewriter.calls(F.linear)[0]
    values, places = rewriter.call(linear, torch.max, linear, dim=1)
    assert (values.target, places.target) == (operator.getitem, operator.getitem)
    assert (values.meta["requires_grad"], places.meta["requires_grad"]) == (True, False)
    assert places.meta["spec"] == TensorSpec((4,), torch.int64)
    halves = rewriter.call(linear, torch.chunk, linear, 2)
    assert [half.meta["storage"] for half in halves] == [linear.meta["storage"]] * 2
    rewriter.done().check()
