"""Optimizers of users' own, and edits: what a user does to a model and its optimizer, before and between two steps."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import megatrain
from tests.training.user_code import TABLE, VARIABLE, Part, Side, square

# -- optimizers ------------------------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """SGD whose classes say what all parameters have in common in a step, and how far each goes; `number` says when."""

    def __init__(self, params: Any, number: int = 0):
        super().__init__(params, {"lr": 0.1, "phase": 0})
        self.number, self.calls, self.trains = number, 0, True

    def train(self, mode: bool = True) -> None:
        self.trains = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        common = self.common([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.add_(self.direction(group, p, state, common), alpha=-group["lr"])

    def common(self, gradients: list[torch.Tensor]) -> Any:
        return None

    def direction(self, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
        return p.grad / (1 if common is None else common)


def _norm_above(self: Any, gradients: list[torch.Tensor]) -> Any:
    norm = nn.utils.get_total_norm(gradients) if gradients else torch.ones(())
    return (norm / (0.01, 0.3, 3.0, 30.0)[self.number]).clamp(min=1).cpu()


def _counted(self: Any, gradients: list[torch.Tensor]) -> Any:
    self.calls += 1
    return self.calls


def _phases(self: Any, gradients: list[torch.Tensor]) -> Any:
    for group in self.param_groups:
        group["phase"] += 1
    return self.param_groups[0]["phase"]


def _moody(self: Any, gradients: list[torch.Tensor]) -> None:
    if not self.trains:
        raise RuntimeError("call train() first")


def _coupled(self: Any, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
    return p.grad / common if state["step"] > 2 + self.number else p.grad


def _switching(self: Any, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
    found = p.grad.sign() if group["phase"] == 0 else p.grad
    if state["step"] == 2 + self.number and p.ndim == 1:
        group["phase"] = 1
    return found


def _neighbour(self: Any, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
    before, common[0] = common[0], p.detach().sum().cpu()
    return p.grad * (1 + before) if state["step"] > 2 + self.number else p.grad


def _noisy(self: Any, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
    return p.grad + (torch.randn(p.shape).to(p.device) if self.number % 2 else random.random())


def _averaging(self: Any, group: Any, p: Any, state: Any, common: Any) -> torch.Tensor:
    slow = state.setdefault("slow", p.detach().clone())
    if state["step"] % 2 == 0:
        slow.lerp_(p, 0.5)
        p.copy_(slow)
    return p.grad


def torchs(name: str, **options: Any) -> Part:
    narrow = name in ("SGD", "Adam", "RMSprop") or "fused" in options  # AdamW has the bits of its fused code
    return Part(lambda params, number: getattr(torch.optim, name)(params, **options), narrow=narrow)


def own(name: str, **methods: Callable[..., Any]) -> Part:
    return Part(type(name, (Own,), methods), ("optimizer", name))


OPTIMIZERS: dict[str, Part] = {
    "sgd": torchs("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": torchs("SGD", lr=0.1),
    "adam": torchs("Adam", lr=0.01, foreach=True),
    "adamw": torchs("AdamW", lr=0.01),
    "fused": torchs("AdamW", lr=0.01, fused=True),
    "8 bit": Part(lambda params, number: megatrain.AdamW8bit(params, lr=0.01), narrow=True),
    "amsgrad": torchs("AdamW", lr=0.01, amsgrad=True, foreach=False),
    "rmsprop": torchs("RMSprop", lr=0.01, momentum=0.5, centered=True),
    "adagrad": torchs("Adagrad", lr=0.05),
    "adadelta": torchs("Adadelta", lr=0.5),
    "adamax": torchs("Adamax", lr=0.01),
    "nadam": torchs("NAdam", lr=0.01),
    "radam": torchs("RAdam", lr=0.01),
    "asgd": torchs("ASGD", lr=0.05),
    "rprop": torchs("Rprop", lr=0.01),
    "adafactor": torchs("Adafactor", lr=0.05),
    "clipping": own("Clipping", common=_norm_above),
    "coupled": own(
        "Coupled", common=lambda self, g: sum((t.square().sum().cpu() for t in g), torch.ones(())), direction=_coupled
    ),
    "switching": own("Switching", direction=_switching),
    "neighbours": own("Neighbours", common=lambda self, gradients: [torch.zeros(())], direction=_neighbour),
    "calls": own("Calls", common=_counted),
    "phases": own("Phases", common=_phases),
    "noisy": own("Noisy", direction=_noisy),
    "averaging": own("Averaging", direction=_averaging),
    "moody": own("Moody", common=_moody),
    "sharing": own("Sharing", common=lambda self, gradients: len(gradients)),
}

# -- edits -----------------------------------------------------------------------------------------------------------

EDITS: dict[str, Part] = {}
ALL = ("start", "steps", "forward")
Do = Callable[[Side, int], object]


def edit(*words: str, **flags: Any) -> Callable[[Do], Do]:
    """Adds a function to `EDITS`, by its name."""

    def added(do: Do) -> Do:
        EDITS[do.__name__.replace("_", " ")] = Part(do, words, **flags)
        return do

    return added


@edit(narrow=True)
def rate(side: Side, number: int) -> None:
    for group in side.optimizer.param_groups[number % 2 :]:
        group["lr"] = group["lr"] * 0.5


@edit(narrow=True)
def decay(side: Side, number: int) -> None:
    for group in side.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * (number % 3)


@edit(narrow=True)
def mode(side: Side, number: int) -> None:
    if hasattr(side.optimizer, "train"):
        side.optimizer.train(number % 2 == 0)  # pyright: ignore[reportAttributeAccessIssue]


@edit()
def turn(side: Side, number: int) -> None:
    """Freezes a parameter, or trains it again; the first one stays trained, so that there is something to do."""
    parameters = list(side.model.parameters())
    parameter = parameters[1 + number % (len(parameters) - 1)]
    parameter.requires_grad_(not parameter.requires_grad)


@edit("evaluation", "eval", narrow=True)
def evaluating(side: Side, number: int) -> None:
    modules = list(side.model.layers)
    module = modules[number % len(modules)]
    module.train(not module.training)


# Hooks. Factors are powers of two: a hook sees the gradient of a whole step here and that of a micro-batch in eager.


@edit("hook", narrow=True)
def gradient_hook(side: Side, number: int) -> None:
    side.parameter(number).register_hook(lambda gradient: gradient * 0.5)


@edit("hook", one_batch=True, narrow=True)
def logging_hooks(side: Side, number: int) -> None:
    for name, p in side.model.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient, name=name: side.say(name, gradient))


@edit("hook", "draw", one_batch=True, narrow=True)
def drawing_hooks(side: Side, number: int) -> None:
    def noisy(gradient: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(gradient.shape) if number % 2 else torch.tensor(random.random())
        return gradient * (1 + noise.to(gradient))

    for p in side.model.parameters():
        if p.requires_grad:
            p.register_hook(noisy)


@edit("hook", one_batch=True, narrow=True)
def sharing_hooks(side: Side, number: int) -> None:
    """Each gradient is scaled by how many came before it in all steps."""
    count = [0]

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return gradient * (1 + 0.1 * count[0])

    for p in side.model.parameters():
        if p.requires_grad:
            p.register_hook(scaled)


@edit("hook", one_batch=True, narrow=True)
def post_hook(side: Side, number: int) -> None:
    def halve(parameter: torch.Tensor) -> None:
        side.say("accumulated", parameter.grad)
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5

    side.parameter(number).register_post_accumulate_grad_hook(halve)


@edit("hook", one_batch=True)
def updating_hook(side: Side, number: int) -> None:
    """The optimizer in the backward: the weight moves as soon as its gradient is there."""

    def move(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            side.say("moved", parameter)
            (parameter.data if number % 2 else parameter.detach()).add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

    side.parameter(number).register_post_accumulate_grad_hook(move)


@edit("hook", "buffer", one_batch=True)
def hook_and_buffers(side: Side, number: int) -> None:
    """A hook on a gradient sees the buffers that the forward wrote, and writes one."""

    def seen(gradient: torch.Tensor) -> None:
        side.say("buffers", *side.model.buffers())
        if (buffer := side.buffer(number)) is not None:
            buffer.mul_(0.5)

    side.parameter(number).register_hook(seen)


@edit("hook", narrow=True)
def forward_hook(side: Side, number: int) -> None:
    modules = list(side.model.layers)
    modules[number % len(modules)].register_forward_hook(lambda module, args, result: result * 2)


@edit("hook", "opaque", "code that runs again", narrow=True)
def logging_forward_hook(side: Side, number: int) -> None:
    modules = list(side.model.layers)
    modules[number % len(modules)].register_forward_pre_hook(
        lambda module, args: side.say("given", float(args[0].detach().sum()))
    )


def _step_hook(side: Side, number: int, hook: Callable[[Any], None]) -> None:
    optimizer = side.optimizer
    register = optimizer.register_step_post_hook if number % 2 else optimizer.register_step_pre_hook
    register(lambda optimizer, args, kwargs: hook(optimizer))


@edit("hook", narrow=True)
def rate_in_hook(side: Side, number: int) -> None:
    def slow(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            side.say("rate", group["lr"])
            group["lr"] *= 0.75

    _step_hook(side, number, slow)


@edit("hook", "buffer", narrow=True)
def buffers_in_hook(side: Side, number: int) -> None:
    def moved(optimizer: Any) -> None:
        side.say("buffers", *side.model.buffers())
        if (buffer := side.buffer(number)) is not None:
            buffer.mul_(0.5)

    _step_hook(side, number, moved)


@edit("hook")
def weights_in_hook(side: Side, number: int) -> None:
    def clamped(optimizer: Any) -> None:
        p = side.parameter(number)
        side.say("weights", p, p.grad, *(v for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)))
        with torch.no_grad():
            p.clamp_(-0.3, 0.3)
            if p.grad is not None:
                p.grad.mul_(0.5)

    _step_hook(side, number, clamped)


# Writes, into memory that is named by the parameter itself, by `.data`, or by what the user kept.


@edit("in place", "inplace", "modified", "written", at=ALL)
def scale(side: Side, number: int) -> None:
    with torch.no_grad():
        side.parameter(number).mul_(0.75)


@edit("written", "wrote", "changed", ".data", at=ALL)
def data_scale(side: Side, number: int) -> None:
    side.parameter(number).data.mul_(0.75)


@edit("written", "wrote", "changed", "modified", ".data", at=ALL)
def new_data(side: Side, number: int) -> None:
    parameter = side.parameter(number)
    parameter.data = parameter.data * 1.25


@edit("written", "wrote", "changed", "modified", at=("forward",))
def input_scale(side: Side, number: int) -> None:
    side.shared.held["input"].data.mul_(0.5)


@edit("buffer", narrow=True, at=ALL)
def buffer_scale(side: Side, number: int) -> None:
    if (buffer := side.buffer(number)) is not None:
        buffer.mul_(0.5)


@edit("buffer", narrow=True, at=ALL)
def new_buffers(side: Side, number: int) -> None:
    for module in side.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer * 0.5 if buffer.is_floating_point() else buffer + 1)


@edit("memory", "flat", "view", at=("start",))
def flatten(side: Side, number: int) -> None:
    """All weights become views of one vector, which later edits write."""
    parameters = [p for p in side.model.parameters() if p.dtype == torch.float32]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view(p.shape)
    side.shared.held["flat"] = flat


@edit("memory", "state", at=("start", "steps"))
def hold(side: Side, number: int) -> None:
    """Keeps what names the weights' memory; it's read at the end."""
    side.shared.held |= {"state": side.model.state_dict(), "data": side.parameter(number).data}


@edit("memory", "flat", "held", "written", at=ALL)
def held_scale(side: Side, number: int) -> None:
    side.flush()  # what isn't an operation on the parameter itself comes after this: docs/training.md
    held = side.shared.held
    for value in [held.get("flat"), held.get("data"), *held.get("state", {}).values()][number % 3 : number % 3 + 1]:
        if value is not None and value.is_floating_point():
            value.detach().mul_(0.5)


@edit("memory", "swap", ".data")
def pointer_swap(side: Side, number: int) -> None:
    """Each weight changes places with a tensor that the user keeps."""
    side.flush()
    others = side.shared.held.setdefault("others", {})
    for name, p in side.model.named_parameters():
        others.setdefault(name, torch.zeros_like(p.data))
        p.data, others[name] = others[name], p.data


@edit("memory", "swap", ".data")
def averaged(side: Side, number: int) -> None:
    """Evaluates a moving average, swapped in by pointer, and swaps it out again."""
    side.flush()
    kept = side.shared.held.setdefault("average", {n: p.detach().clone() for n, p in side.model.named_parameters()})
    for name, p in side.model.named_parameters():
        kept[name].lerp_(p.detach(), 0.5)
    before = {name: p.data for name, p in side.model.named_parameters()}
    for name, p in side.model.named_parameters():
        p.data = kept[name]
    evaluate(side, number)
    for name, p in side.model.named_parameters():
        p.data = before[name]


@edit("swap", "memory", "parameter")
def swap_tensors(side: Side, number: int) -> None:
    side.flush()
    parameter = side.parameter(number)
    other = side.shared.held.setdefault(f"other {tuple(parameter.shape)}", nn.Parameter(torch.zeros_like(parameter)))
    torch.utils.swap_tensors(parameter, other)


@edit("memory", "storage", ".data", "set_")
def new_storage(side: Side, number: int) -> None:
    side.flush()
    parameter = side.parameter(number)
    side.shared.held["before"] = parameter.data
    with torch.no_grad():
        parameter.set_(parameter.detach().clone())  # pyright: ignore[reportArgumentType]


@edit("parameter", "view", "vector")
def from_vector(side: Side, number: int) -> None:
    side.flush()
    parameters = [p for p in side.model.parameters() if p.dtype == torch.float32 and p.numel()]
    vector = nn.utils.parameters_to_vector(parameters).detach() * 0.75
    side.shared.held["vector"] = vector
    nn.utils.vector_to_parameters(vector, parameters)


@edit()
def reload_model(side: Side, number: int) -> None:
    state = copy.deepcopy(side.model.state_dict())
    side.model.load_state_dict({n: v * 0.5 if v.is_floating_point() else v for n, v in state.items()})


@edit("assign", "parameter", "memory")
def assign(side: Side, number: int) -> None:
    """Gives the model other memory, which the user keeps, under the same parameters."""
    side.flush()
    kept = side.shared.held.setdefault("assigned", {})
    for name, p in side.model.named_parameters():
        p.data = kept[name] = p.detach().clone() * 0.75


@edit()
def moments(side: Side, number: int) -> None:
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


@edit()
def forget(side: Side, number: int) -> None:
    if not isinstance(side.optimizer, Own) and _can_forget(side.optimizer):
        side.flush()  # what isn't an operation of torch is undone by updates that are due
        side.optimizer.state.pop(side.parameter(number), None)


@edit()
def reload(side: Side, number: int) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


# Python state that layers, losses and Functions read.


@edit(narrow=True, at=ALL)
def anneal(side: Side, number: int) -> None:
    side.shared.factor *= 0.5 + 0.25 * (number % 2)
    for module in side.model.layers:
        if hasattr(module, "factor") and isinstance(module.factor, float):
            module.factor *= 0.5


@edit(narrow=True, at=ALL)
def tables(side: Side, number: int) -> None:
    TABLE.append(1 + 0.25 * number)
    side.shared.table.append(1 + 0.25 * number)
    side.shared.queue.append(1 + 0.5 * number)
    side.shared.entries["factor"] = 1 - 0.125 * number


@edit(narrow=True, at=ALL)
def environment(side: Side, number: int) -> None:
    os.environ[VARIABLE] = str(1 + 0.25 * number)


@edit(narrow=True)
def evaluate(side: Side, number: int) -> None:
    """A call without gradients, between two steps."""
    with torch.no_grad():
        given = torch.linspace(-1, 1, 12).view(3, 4).to(side.shared.held["device"])
        side.say("evaluated", square(side.call(given)))
