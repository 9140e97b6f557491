"""Edits: what a user does to a model and its optimizer between two steps, the same on both sides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn


@dataclass
class Side:
    """One of the two that are trained alike."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flush: Callable[[], object] = lambda: None

    def parameter(self, number: int) -> nn.Parameter:
        found = list(self.model.parameters())
        return found[number % len(found)]


@dataclass(frozen=True)
class Edit:
    """A name of `EDITS`, and a number that says of what."""

    name: str
    number: int

    def apply(self, side: Side) -> None:
        EDITS[self.name](side, self.number)


# Factors are powers of two: a hook sees the gradient of a whole step here and that of a micro-batch in eager.


def _rate(side: Side, number: int) -> None:
    for group in side.optimizer.param_groups[number % 2 :]:
        group["lr"] = group["lr"] * 0.5


def _decay(side: Side, number: int) -> None:
    for group in side.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * (number % 3)


def _turn(side: Side, number: int) -> None:
    """Freezes a parameter, or trains it again; the first one stays trained, so that there is something to do."""
    parameters = list(side.model.parameters())
    parameter = parameters[1 + number % (len(parameters) - 1)]
    parameter.requires_grad_(not parameter.requires_grad)


def _scale(side: Side, number: int) -> None:
    with torch.no_grad():
        side.parameter(number).mul_(0.75)


def _data(side: Side, number: int) -> None:
    parameter = side.parameter(number)
    parameter.data = parameter.data * 1.25


def _hook(side: Side, number: int) -> None:
    parameter = side.parameter(number)
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: gradient * 0.5)


def _post_hook(side: Side, number: int) -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5

    parameter = side.parameter(number)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(halve)


def _forward_hook(side: Side, number: int) -> None:
    modules = list(side.model.children())
    modules[number % len(modules)].register_forward_hook(lambda module, args, result: result * 2)  # pyright: ignore[reportOperatorIssue]


def _step_hook(side: Side, number: int) -> None:
    def slow(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.75

    register = side.optimizer.register_step_post_hook if number % 2 else side.optimizer.register_step_pre_hook
    register(slow)


def _moments(side: Side, number: int) -> None:
    parameter = side.parameter(number)
    if not side.optimizer.state.get(parameter):
        side.flush()  # a state that the due update makes isn't there before it
    for value in side.optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            value.mul_(0.5)


def _can_forget(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's own optimizer goes on without state: Adagrad of torch 2.11 makes it in its constructor alone."""
    parameter = torch.nn.Parameter(torch.ones(1))
    probe: Any = type(optimizer)([parameter], lr=0.1)  # pyright: ignore[reportCallIssue]
    probe.state.clear()
    parameter.grad = torch.ones(1)
    try:
        probe.step()
    except KeyError:
        return False
    return True


def _forget(side: Side, number: int) -> None:
    if not _can_forget(side.optimizer):
        return
    side.flush()  # what isn't an operation of torch is undone by updates that are due
    side.optimizer.state.pop(side.parameter(number), None)


def _reload(side: Side, number: int) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def _reload_model(side: Side, number: int) -> None:
    side.model.load_state_dict(copy.deepcopy(side.model.state_dict()))


def _eval(side: Side, number: int) -> None:
    modules = list(side.model.children())
    module = modules[number % len(modules)]
    module.train(not module.training)


EDITS: dict[str, Callable[[Side, int], None]] = {
    "rate": _rate,
    "decay": _decay,
    "turn": _turn,
    "scale": _scale,
    "data": _data,
    "hook": _hook,
    "post hook": _post_hook,
    "forward hook": _forward_hook,
    "step hook": _step_hook,
    "moments": _moments,
    "forget": _forget,
    "reload": _reload,
    "reload model": _reload_model,
    "eval": _eval,
}
# With several micro-batches, eager calls these once for each; what they do adds up to something else.
ONE_BATCH = {"post hook"}


def edits(names: list[str]) -> st.SearchStrategy[Edit]:
    return st.builds(Edit, st.sampled_from(names), st.integers(0, 7))
