"""A change between two calls of anything that the forward read gives what eager gives, never the old graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from megatrain.tracer.spec import is_equal
from megatrain.training.compiled import captures as variants
from tests.comparing import assert_same
from tests.runtime import settings
from tests.runtime.settings import gain

SCALE = 2.0
TABLE = {"shift": 0.5, "order": [1, 2]}
UNNAMED = 1.0


class Mode(Enum):
    ADD = 1
    SUB = 2


@dataclass
class Config:
    """What a model is built from, and asks again in its forward."""

    use_gate: bool = False
    powers: list[int] = field(default_factory=lambda: [1, 2])
    mode: Mode = Mode.ADD
    inner: Any = None


class Plain:
    """A class that is no dataclass, with an attribute of its own class."""

    factor = 1.0

    def __init__(self) -> None:
        self.offset = 0.25

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


class Reader(nn.Module):
    """Reads Python state in the ways that models do."""

    bias_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.25)) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.scale = 1.0
        self.unread = 1
        self.config = Config(inner=SimpleNamespace(power=1))
        self.helper = Plain()
        self.weights = [1.0, 0.5]
        self.named = {"a": 1.0, "b": {"c": 2.0}}
        self.steps = (1, (2, 3))
        self.skipped: set[int] = set()
        self.array = np.array([1.0, 2.0])
        self.loose = torch.tensor(2.0)
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.optional: float | None = None
        self.late: list[nn.Module] = []

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = x + layer(x) * self.scale
        x = self.head(self.tied(self.norm(x))) * self.bias_scale
        x = x * SCALE + TABLE["shift"] * TABLE["order"][0]
        x = x * settings.GAIN * gain()
        if self.config.use_gate:
            x = x.sigmoid()
        x = self.merge(x, sum(x**p for p in self.config.powers) ** self.config.inner.power)
        x = self.helper.apply(self.act(x))
        x = x * sum(self.weights) * self.named["b"]["c"] * self.steps[1][0] * float(self.array.sum()) * self.loose
        if self.optional is not None:
            x = x + self.optional
        x = x + (self.extra if hasattr(self, "extra") else 0.0)
        return x + torch.zeros(4)

    def merge(self, x, y):
        return x + y if self.config.mode is Mode.ADD else x - y


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def halved(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] / 2,)


def _child(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(4.0) / 8)


CHANGES: dict[str, Callable[[Reader], Any]] = {
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "its type": lambda m: setattr(m, "scale", 1),
    "its sign": lambda m: setattr(m, "scale", -1.0),
    "a flag of a dataclass": lambda m: setattr(m.config, "use_gate", True),
    "a list of a dataclass": lambda m: m.config.powers.append(3),
    "an enum of a dataclass": lambda m: setattr(m.config, "mode", Mode.SUB),
    "an object in an object": lambda m: setattr(m.config.inner, "power", 2),
    "a whole object": lambda m: setattr(m, "config", Config(True, inner=SimpleNamespace(power=1))),
    "an attribute of a helper": lambda m: setattr(m.helper, "offset", 1.0),
    "a helper's shadow of its class": lambda m: setattr(m.helper, "factor", 3.0),
    "a list": lambda m: m.weights.append(2.0),
    "an item of a list": lambda m: m.weights.__setitem__(0, 4.0),
    "a nested dict": lambda m: m.named["b"].update(c=5.0),
    "a tuple": lambda m: setattr(m, "steps", (1, (5, 3))),
    "a set": lambda m: m.skipped.add(1),
    "an array in place": lambda m: m.array.__setitem__(0, 7.0),
    "a loose tensor": lambda m: setattr(m, "loose", torch.tensor(3.0)),
    "a loose tensor in place": lambda m: m.loose.add_(1.0),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "None to a value": lambda m: setattr(m, "optional", 1.0),
    "a new attribute": lambda m: setattr(m, "extra", 1.0),
    "a class attribute shadowed": lambda m: setattr(m, "bias_scale", 2.0),
    "a method shadowed": lambda m: setattr(m, "merge", lambda x, y: x * y),
    "a forward shadowed": lambda m: setattr(m.tied, "forward", torch.sin),
    "the rate of a dropout": lambda m: setattr(m.layers[0][2], "p", 0.75),
    "the mode of a submodule": lambda m: m.layers[1].eval(),
    "the mode of a norm": lambda m: m.norm.eval(),
    "the momentum of a norm": lambda m: setattr(m.norm, "momentum", 0.5),
    "a submodule": lambda m: m.layers.__setitem__(1, _child(3)),
    "a submodule to None": lambda m: m.layers.append(_child(4)),
    "one submodule fewer": lambda m: m.layers.__delitem__(2),
    "a forward hook": lambda m: m.layers[0].register_forward_hook(doubled),
    "a forward pre-hook": lambda m: m.layers[0].register_forward_pre_hook(halved),
    "a parameter's hook": lambda m: m.head.weight.register_hook(lambda grad: grad * 2),
    "None to a parameter": lambda m: setattr(m.head, "bias", _weight()),
    "a parameter to None": lambda m: setattr(m.tied, "bias", None),
    "a frozen parameter": lambda m: m.tied.weight.requires_grad_(False),
    "a tie": lambda m: setattr(m.head, "weight", m.tied.weight),
    "a parameter": lambda m: setattr(m.tied, "bias", _weight()),
    "a buffer": lambda m: m.norm.running_mean.fill_(2.0),
}


class SideBySide:
    """An eager model and its compiled copy, changed alike."""

    def __init__(self, model: nn.Module) -> None:
        self.eager: Any = copy.deepcopy(model)
        self.streamed: Any = copy.deepcopy(model)
        self.compiled = megatrain.compile(self.streamed, device="cpu", transfer="copy", activations="recompute")

    def change(self, change: Callable[[Any], Any]) -> None:
        for model in (self.eager, self.streamed):
            change(model)

    def check(self) -> None:
        """Runs a step of each and compares all that it leaves."""
        found: list[dict[str, Any]] = []
        for call, model in ((self.eager, self.eager), (self.compiled, self.streamed)):
            torch.manual_seed(7)
            model.zero_grad(set_to_none=True)
            output = call(torch.linspace(-1, 1, 12).view(3, 4))
            output.square().sum().backward()
            grads = {f"grad {n}": p.grad for n, p in model.named_parameters()}
            found.append({"output": output, "rng": torch.get_rng_state(), **grads, **dict(model.named_buffers())})
        assert_same(found[0], found[1], "step")

    @property
    def count(self) -> int:
        """Captures so far."""
        return len(list(self.compiled.megatrain._variants))


@pytest.fixture
def sides() -> SideBySide:
    torch.manual_seed(0)
    return SideBySide(Reader())


@pytest.fixture
def globals_restored() -> Iterator[None]:
    saved = {name: globals()[name] for name in ("SCALE", "TABLE", "gain", "UNNAMED")}
    table, gain_before, factor = copy.deepcopy(TABLE), settings.GAIN, Plain.factor
    yield
    globals().update(saved)
    TABLE.clear()
    TABLE.update(table)
    settings.GAIN, Plain.factor, Reader.bias_scale = gain_before, factor, 1.0


@pytest.mark.filterwarnings("ignore::megatrain.ManyCapturesWarning")
@pytest.mark.parametrize("turn", range(4))
def test_a_change_between_two_calls_is_seen(sides: SideBySide, turn: int) -> None:
    """A quarter of the changes, one after the other, on one model."""
    sides.check()
    for what in list(CHANGES)[turn::4]:
        before = sides.count
        sides.change(CHANGES[what])
        sides.check()
        sides.check()
        assert sides.count <= before + 1, what


def test_what_the_forward_does_not_read_makes_no_other_capture(sides: SideBySide) -> None:
    sides.check()
    sides.change(lambda m: setattr(m, "unread", 2))
    sides.change(lambda m: setattr(m, "brand_new", 2))
    sides.change(lambda m: m.named.update(b={"c": 2.0}))  # an equal one
    sides.change(lambda m: setattr(m, "weights", [1.0, 0.5]))
    sides.change(lambda m: setattr(m, "config", copy.deepcopy(m.config)))
    sides.change(lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True))
    sides.check()
    assert sides.count == 1
    # What took the place of an equal value is watched from now on.
    sides.change(lambda m: m.weights.append(9.0))
    sides.check()
    assert sides.count == 2


GLOBALS: tuple[Callable[[], Any], ...] = (
    lambda: globals().update(SCALE=5.0),
    lambda: TABLE.update(shift=3.0),
    lambda: TABLE["order"].insert(0, 9),
    lambda: setattr(settings, "GAIN", 0.5),
    lambda: globals().update(gain=lambda: 4.0),
    lambda: setattr(Reader, "bias_scale", 4.0),
    lambda: setattr(Plain, "factor", 4.0),
)


@pytest.mark.filterwarnings("ignore::megatrain.ManyCapturesWarning")
@pytest.mark.usefixtures("globals_restored")
def test_a_change_of_a_global_is_seen_if_code_of_the_model_names_it(sides: SideBySide) -> None:
    sides.check()
    for number, change in enumerate(GLOBALS):
        change()
        sides.check()
        assert sides.count == number + 2
    globals()["UNNAMED"] = 2.0
    sides.check()
    assert sides.count == len(GLOBALS) + 1


@pytest.mark.parametrize(
    ("name", "module"),
    [("<stdin>", "__main__"), ("<ipython-input-3-0a1b2c>", "__main__"), ("/tmp/ipykernel_12/345.py", None),
     ("never_imported.py", "never_imported")],
)  # fmt: skip
def test_a_change_of_a_global_is_seen_whatever_has_run_the_code(name: str, module: str | None) -> None:
    """A notebook, a session, exec(), or a loader that doesn't register what it loads."""
    namespace: dict[str, Any] = {"nn": nn, "scale": 2.0, **({} if module is None else {"__name__": module})}
    code = "class Scaled(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * scale\n"
    exec(compile(code, name, "exec"), namespace)
    sides = SideBySide(nn.Sequential(namespace["Scaled"](4, 4), nn.Tanh()))
    sides.check()
    namespace["scale"] = 3.0
    sides.check()
    assert sides.count == 2


__private = {"scale": 2.0}


@torch.fx.wrap
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * __private["scale"]


def test_a_variable_of_a_closure_is_seen() -> None:
    factor = 2.0

    class Closing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * factor

    sides = SideBySide(Closing(4, 4))
    sides.check()
    factor = 3.0
    sides.check()
    assert "factor == 2.0 at test_stale.py" in sides.compiled.recompiled_because[0]


def test_a_value_that_changes_at_every_call_fills_no_memory(sides: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST_STATES", 3)
    for step in range(6):
        sides.change(lambda m, step=step: setattr(m, "scale", 1.0 + step))
        sides.check()
        assert sides.count == min(step + 1, 3)
    runners = len(sides.compiled.megatrain.engine.runners._there)
    sides.change(lambda m: setattr(m, "scale", -1.0))
    sides.check()
    assert len(sides.compiled.megatrain.engine.runners._there) == runners


def test_a_recompiled_capture_says_why(sides: SideBySide) -> None:
    sides.check()
    assert sides.compiled.recompiled_because == ()
    sides.change(lambda m: setattr(m.config.inner, "power", 3))
    sides.check()
    (reason,) = sides.compiled.recompiled_because
    assert reason.startswith("model.config.inner.power == 1 at test_stale.py:")
    assert reason.endswith("; now 3")
    assert "model.config.inner.power == 3" in sides.compiled.guards


NAN, NUMPYS_NAN = float("nan"), np.float32("nan")


class FillsWithNan(nn.Module):
    """Reads NaN wherever a forward can read a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.missing = float("nan")
        self.sides = (float("nan"), 1.0)
        self.known = {float("nan"), 2.0}
        self.array = np.array([np.nan, 1.0])
        self.last = float("nan")

    def forward(self, x: torch.Tensor, *literals: Any) -> torch.Tensor:
        self.last = float("nan")
        number = x.new_full((), math.nan).item()
        values = (NAN, NUMPYS_NAN, np.nan, self.missing, *self.sides, *self.known, *self.array, *literals, number)
        return self.fc(x) + sum(0.0 if math.isnan(value) else float(value) for value in values)


def test_nan_is_the_same_as_nan_wherever_it_is_read() -> None:
    model, x = FillsWithNan(), torch.randn(3, 4)
    compiled = megatrain.compile(model, device="cpu")
    for _ in range(3):
        literals = (float("nan"), np.float64("nan"))
        assert torch.equal(compiled(x, *literals), model(x, *literals))
        model.sides = (float("nan"), 1.0)  # other objects, the same values
        model.known = {2.0, float("nan")}
        model.missing = float("nan")
    assert len(list(compiled.megatrain._variants)) == 1
    assert not compiled.program.opaque_calls


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1, 1.0), (1, True), (NAN, 0.0)])
def test_values_that_a_forward_can_tell_apart_are_not_the_same(before: Any, after: Any) -> None:
    assert is_equal(before, before)
    assert not is_equal(before, after)
    assert not is_equal((before,), (after,))
    assert not is_equal(np.asarray(before), np.asarray(after))
