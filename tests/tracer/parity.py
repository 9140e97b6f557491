"""An eager model, and a capture or a program of it: whatever a forward and a backward leave behind must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.tracer.arguments import Arguments, Structure
from megatrain.tracer.inventory import inventory
from megatrain.tracer.traced import TracedModule
from tests.comparing import assert_same

SEED = 77


@dataclass
class Step:
    """What one forward and backward left behind."""

    result: Any
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rng: torch.Tensor


def eager_step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    """Runs the model itself, from a fixed seed."""
    _, state = inventory(model)
    arguments = Arguments.of(model, tuple(args), dict(kwargs))
    torch.manual_seed(SEED)
    result = model(*args, **kwargs)
    rng = torch.get_rng_state()
    outputs = list(Structure.of(result).placeholders)
    gradients = _gradients(outputs, arguments, state)
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return Step(result, outputs, gradients, buffers, rng)


def graph_step(traced: TracedModule, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    """Runs the captured graph as a whole on the model's state."""
    return _replayed(traced, model, args, kwargs, lambda inputs, state: _run_graph(traced, inputs, state))


def program_step(
    traced: TracedModule, program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Step:
    """Runs a lowered program block by block on the model's state."""
    return _replayed(traced, model, args, kwargs, lambda inputs, state: run_program(program, inputs, state))


Outputs = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def _replayed(
    traced: TracedModule,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    run: Callable[[Sequence[torch.Tensor], Mapping[str, torch.Tensor]], Outputs],
) -> Step:
    _, state = inventory(model)
    arguments = Arguments.of(model, tuple(args), dict(kwargs))
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    torch.manual_seed(SEED)
    everything, commits = run(arguments.tensors, {**state, **traced.constants})
    outputs = everything[: len(traced.outputs.placeholders)]
    rng = torch.get_rng_state()
    gradients = _gradients(outputs, arguments, state)
    after = {k: v.detach().clone() for k, v in commits.items()}
    return Step(traced.result(everything), outputs, gradients, before | after, rng)


def _run_graph(traced: TracedModule, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> Outputs:
    written = {key for key, _ in traced.writes_back}
    values: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            tensor = state[node.target]
            values[node] = tensor.clone() if node.target in written else tensor
        elif node.op in ("call_function", "call_method"):
            values[node] = call(node, values)
    outputs: Any = traced.graph.output_node().args[0]
    return [values[n] for n in outputs], {key: values[n] for key, n in traced.writes_back}


def call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Repeats one recorded call in the modes it was recorded in."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(node.meta["grad"]))
        for device, dtype in node.meta["autocast"]:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)


def run_program(program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> Outputs:
    """The smallest interpreter of programs: a dictionary of values, blocks in order, commits at the end."""
    codes = {name: Code(template.graph) for name, template in program.templates.items()}
    values = dict(zip(program.inputs, inputs, strict=True))
    values |= {name: state[key].clone() for name, key in program.buffers}
    values |= program.constants
    for block in program.blocks:
        entries = [program.state[key] for key in block.binding]
        arguments = [values[n] for n in block.inputs]
        arguments += [state[e.key] if e.base is None else state[e.base][slice(*e.rows)] for e in entries]
        values.update(zip(block.outputs, codes[block.template](arguments), strict=True))
    outputs = [values[r.name] if r.kind == "value" else state[r.name] for r in program.outputs]
    return outputs, {key: values[name] for key, name in program.commits}


def _gradients(
    outputs: Sequence[torch.Tensor], arguments: Arguments, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Pulls a fixed random cotangent back to the parameters and to the inputs that require a gradient."""
    generator = torch.Generator().manual_seed(5)
    roots = [o for o in outputs if o.requires_grad]
    cotangents = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in roots]
    named = {k: t for k, t in state.items() if t.requires_grad}
    named |= {n: t for n, t in zip(arguments.names, arguments.tensors, strict=True) if t.requires_grad}
    if not roots or not named:
        return dict.fromkeys(named)
    found = torch.autograd.grad(roots, list(named.values()), cotangents, allow_unused=True)
    return dict(zip(named, found, strict=True))


def assert_same_step(found: Step, eager: Step) -> None:
    """Compares outputs, gradients, buffers and the random generator, and the kind of the result."""
    one, other = (replace(step, result=type(step.result)) for step in (eager, found))
    assert_same(one, other, "step")
