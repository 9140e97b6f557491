"""Users' forward hooks: those that compute are captured, those that keep books see real tensors at every call."""

from __future__ import annotations

import contextvars
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, TraceError
from megatrain.tracer.recording.opaque import Observer

Collect = Callable[[], list[torch.Tensor]]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


def _copied(tensors: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(x).detach().clone() for x in tensors]


class Collector:
    """A hook that is an object, and whose methods are hooks."""

    def __init__(self) -> None:
        self.rows = 0
        self.features: deque[torch.Tensor] = deque()

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.rows += output.shape[0]

    def keep(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.features.append(output.detach())

    def before(self, module: nn.Module, inputs: Any) -> None:
        self.rows += 100

    def found(self) -> list[torch.Tensor]:
        return [torch.tensor(self.rows), *_copied(self.features)]


def a_dict_by_name(model: nn.Sequential) -> Collect:
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        found[name] = output.detach()

    for name, module in model.named_modules():
        module.register_forward_hook(functools.partial(keep, name))
    return lambda: _copied(found[name] for name in sorted(found))


def an_object(model: nn.Sequential) -> Collect:
    collector = Collector()
    model.register_forward_hook(collector)
    model[1].register_forward_hook(collector.keep)
    model[2].register_forward_pre_hook(collector.before)
    return collector.found


def an_attribute(model: nn.Sequential) -> Collect:
    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        module.last = output.detach()
        module.calls = getattr(module, "calls", 0) + 1

    model[1].register_forward_hook(keep)
    return lambda: _copied([model[1].last, model[1].calls])


def a_count_for_another_hook(model: nn.Sequential) -> Collect:
    count = {"n": 0}

    def add(module: nn.Module, inputs: Any) -> None:
        count["n"] += 1

    model[1].register_forward_pre_hook(add)
    model[1].register_forward_hook(lambda m, i, o: o * count["n"])  # pyright: ignore[reportOperatorIssue]
    return lambda: [torch.tensor(count["n"])]


def a_gradient_hook(model: nn.Sequential) -> Collect:
    found: list[torch.Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        found.append(torch.zeros(1))
        output.register_hook(lambda gradient: found.append(gradient.detach().clone()))

    model[1].register_forward_hook(watch)
    return lambda: _copied(found)


def a_residual(model: nn.Sequential) -> Collect:
    kept: dict[str, torch.Tensor] = {}
    model[1].register_forward_pre_hook(lambda m, i: kept.__setitem__("x", i[0]))
    model[1].register_forward_hook(lambda m, i, o: o + kept["x"])  # pyright: ignore[reportOperatorIssue]
    return lambda: _copied(kept.values())


def _trained(hooks: Callable[[nn.Sequential], Collect], **options: Any) -> tuple[list[torch.Tensor], Any]:
    model = _model()
    collect = hooks(model)
    call: Any = megatrain.compile(model, device="cpu", transfer="copy", **options) if options else model
    found: list[torch.Tensor] = []
    for step in range(4):
        torch.manual_seed(step)
        y = call(torch.randn(4 + step // 3, 8))  # another shape at last: another capture
        loss = y.square().mean()
        loss.backward()
        found += [y.detach(), loss.detach(), *collect()]
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)], call


OBSERVERS = (a_dict_by_name, an_object)
RUN_AGAIN = (an_attribute, a_count_for_another_hook, a_gradient_hook)


@pytest.mark.parametrize("hooks", [*OBSERVERS, *RUN_AGAIN, a_residual])
def test_what_hooks_find_is_what_they_find_in_eager(hooks: Any) -> None:
    eager, _ = _trained(hooks)
    ours, compiled = _trained(hooks, activations="offload")
    assert len(eager) == len(ours)
    for left, right in zip(eager, ours, strict=True):
        assert torch.equal(left, right)
    calls = [node.target for each in compiled.program.templates.values() for node in each.graph.nodes]
    assert any(isinstance(call, Observer) for call in calls) == (hooks in OBSERVERS)
    assert [call.name for call in compiled.program.opaque_calls] == (["1"] if hooks in RUN_AGAIN else [])
    assert len(compiled.program.blocks) >= 4
    if hooks is an_object:
        assert "hook of 1(" in str(compiled.program)
        assert "hook of the model(" in str(compiled.program)
    if hooks is not a_residual:  # what its dictionary holds before the first call is another state
        assert len(list(compiled.megatrain._variants)) == 2


HIDDEN: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("HIDDEN")
QUEUE: deque[torch.Tensor] = deque()


class Leaving(nn.Linear):
    """Keeps a tensor in a global, or where nobody looks."""

    is_hidden = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        (HIDDEN.get() if self.is_hidden else QUEUE).append(y.detach())
        return y.tanh()


def test_a_forward_leaves_its_own_tensors_in_globals() -> None:
    QUEUE.clear()
    model = Leaving(8, 8)
    compiled = megatrain.compile(model, device="cpu")
    for step in range(3):
        x = torch.full((2, 8), float(step))
        compiled(x)
        assert len(QUEUE) == step + 1
        assert torch.equal(QUEUE[-1], nn.functional.linear(x, model.weight, model.bias))


def test_a_tensor_that_is_kept_out_of_sight_is_refused() -> None:
    model = Leaving(8, 8)
    model.is_hidden = True
    HIDDEN.set([])
    with pytest.raises(TraceError, match=r"leaves a tensor, made in `the model` at test_hooks.py:\d+") as caught:
        megatrain.compile(model, device="cpu")(torch.ones(2, 8))
    assert "Keep the tensor in one of these places, or return it from the model." in str(caught.value)


@pytest.mark.parametrize("what", ["keeps a history", "returns", "writes"])
def test_an_observer_that_turns_into_more_is_refused(what: str) -> None:
    kept: list[torch.Tensor] = []

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        kept.append(output.detach())
        if float(output[0, 0]) < 100 or what == "returns":
            return output * 2 if len(kept) > 1 and what == "returns" else None
        if what == "writes":
            output.mul_(2)
        else:
            kept.append(output)
        return None

    model: Any = _model()
    model[0][0].register_forward_hook(look)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations="recompute")
    has_grad = what != "writes"  # under autograd, torch itself refuses to write into what a hook is given
    with torch.set_grad_enabled(has_grad):
        compiled(torch.zeros(2, 8))
    with torch.no_grad():
        model[0][0].bias.fill_(1000.0)
    expected = "a tensor that a forward hook has kept" if what == "keeps a history" else f"forward hook of `0.0` {what}"
    with torch.set_grad_enabled(has_grad), pytest.raises(ExecuteError, match=expected):
        (compiled(torch.zeros(2, 8)).sum() + kept[-1].sum()).backward()


class Drawing(nn.Linear):
    """Draws from Python, so that it runs by its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Counting(nn.Linear):
    """Reads what hooks have left."""

    def __init__(self, rows: int, columns: int, found: list[float]) -> None:
        super().__init__(rows, columns)
        self.found = found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + len(self.found))


def _logging(*, is_counting: bool) -> tuple[nn.Sequential, list[float]]:
    torch.manual_seed(0)
    found: list[float] = []
    layers = [nn.Linear(8, 8), Drawing(8, 8), Counting(8, 8, found) if is_counting else nn.Linear(8, 8)]
    for module in layers[: 2 if is_counting else 3]:
        module.register_forward_hook(lambda module, given, output: found.append(float(output.detach().sum())))
    return nn.Sequential(*layers), found


def test_hooks_of_a_module_that_runs_again_leave_what_others_leave_in_the_same_list() -> None:
    results: list[Any] = []
    for compiles in (False, True):
        model, found = _logging(is_counting=False)
        call: Any = megatrain.compile(model, device="cpu") if compiles else model
        for step in range(3):
            random.seed(step)
            call(torch.full((2, 8), 1.0 + step)).sum().backward()
        results.append((found, [p.grad for p in model.parameters()]))
    (expected, eager), (found, ours) = results
    assert found == expected
    assert len(found) == 9
    assert all(map(torch.equal, eager, ours))


def test_a_list_of_such_hooks_that_the_graph_reads_is_refused() -> None:
    model, _ = _logging(is_counting=True)
    with pytest.raises(TraceError, match=r"is changed both by captured code and by code that runs again at each step"):
        megatrain.compile(model, device="cpu")(torch.ones(2, 8))
