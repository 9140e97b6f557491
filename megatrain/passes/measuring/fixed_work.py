"""Fixed work: templates whose kernels are the same in each run, and the memory of their recordings (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from megatrain.passes.interpret import has_inner_grad, opaque_calls
from megatrain.passes.program import Program, Template, shared_templates
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.torch_private import pytree
from megatrain.tracer.calls import applied_function, function_text
from megatrain.tracer.expectations import Expectation
from megatrain.tracer.packed.packed_call import PackedCall
from megatrain.tracer.python.followed_numbers import OnNumbers
from megatrain.tracer.recording.observer import Observer
from megatrain.tracer.recording.vmap import Mapped

# Whose Python decides by its arguments and by torch's settings alone; and the operators that are torch's own.
_KNOWN = frozenset({"torch", "builtins", "_operator", "operator", "math", __name__.partition(".")[0]})
_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "torchvision"})
recordable: set[type[torch.autograd.Function] | str] = set()
"""The Functions, and the operators by their names, that users have marked: their Python decides nothing anew."""


def fixed_work_obstacle(template: Template) -> str:
    """Says what in a template keeps it from being compiled or recorded as fixed work; empty if nothing does."""
    graph = template.graph
    if any(isinstance(node.target, Expectation | Observer) for node in graph.nodes):
        return "it compares values with those of the capture"
    if any(isinstance(node.target, OnNumbers) for node in graph.nodes):
        return "it computes with a Python number that changes from step to step"
    if opaque_calls(graph):
        return "it runs a module's own code (opaque)"
    if has_inner_grad(graph):
        return "it differentiates in its forward"
    holds = template.cost is not None and template.cost.held_state
    if any(node.meta["spec"].on_host for node in graph.nodes if "spec" in node.meta):
        return "it reads or makes tensors on the host"
    return "its backward reads weights that its forward kept for itself" if holds else ""


def launch_graph_obstacle(template: Template) -> str:
    """Says why a template can't be recorded; empty if it may be."""
    if template.hides_draws:
        return "it draws random numbers that nothing repeats"
    if template.is_random and any(applied_function(node.target) for node in template.graph.nodes):
        return "it draws random numbers, and the backward of an autograd.Function may draw others"
    return fixed_work_obstacle(template) or _python_in(template.graph)


def _python_in(graph: fx.Graph) -> str:
    """Says which Python of others a run calls, forward or backward: launches of a recording would leave it out."""
    return next(filter(None, map(_python_of, graph.nodes)), "")


def _python_of(node: fx.Node) -> str:
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(target, TiledRegion):
        return _python_in(target.graph)
    for given in pytree.tree_leaves((node.args, node.kwargs)):
        if callable(given) and not _is_known(given):
            return f"it gives the function {function_text(given)} to a call, and a recording {_WOULD}"
    if isinstance(target, Mapped | PackedCall):
        return f"it calls {function_text(target)} with Python of its own, and a recording {_WOULD}"
    function = applied_function(target)
    if function is not None:
        is_fixed = function in recordable or _is_known(function)
        name = f"the autograd.Function {function.__module__}.{function.__qualname__}"
    elif type(target).__module__ == "torch._ops":
        operator = "::".join(str(target).split(".")[:2])
        is_fixed = operator in recordable or operator.partition("::")[0] in _NAMESPACES
        name = f"the operator {operator}"
    else:
        is_fixed, name = node.op == "call_method" or _is_known(target), function_text(target)
    return "" if is_fixed else f"it calls {name}, and a recording {_WOULD}. {_MARK}"


_WOULD = "would repeat what its Python decided once"
_MARK = "megatrain.extending.mark_recordable tells of Functions and operators that decide nothing"


def _is_known(value: Any) -> bool:
    """Tells whether a callable is torch's own, Python's or ours."""
    if isinstance(value, nn.Module):
        return False
    modules = getattr(value, "__module__", None) or "torch", type(value).__module__
    return all(module.partition(".")[0] in _KNOWN for module in modules)


def launch_graph_bytes(programs: Iterable[Program]) -> int:
    """Bytes that recordings of programs hold on the device beyond what schedules count.

    Each template has memory for what goes in: inputs, and gradients of outputs and inputs. Recordings run in memory
    that they share, but tensors of one template, or of blocks that need other gradients, may find no hole that another
    has left: so each of these kinds counts. Templates that one block alone runs aren't recorded.
    """
    found = 0
    for program in {id(program): program for program in programs}.values():
        for name in shared_templates(program):
            template = program.templates[name]
            cost = template.cost
            if cost is None or launch_graph_obstacle(template):
                continue
            inputs, state, outputs = (
                sum(port.spec.nbytes for port in ports) for ports in (template.inputs, template.state, template.outputs)
            )
            kinds = {program.needs_gradients(block) for block in program.blocks if block.template == name}
            running = cost.forward_workspace_bytes + cost.backward_workspace_bytes + inputs + state + outputs
            found += 2 * inputs + outputs + len(kinds) * running
    return found
