"""Runs on fake tensors, which measure the bytes and the kernels of a forward and of its backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.base.torch_private import pytree
from megatrain.hardware.work import Works
from megatrain.passes.interpret import has_inner_grad, opaque_calls
from megatrain.passes.kernels import KernelWork, LiveBytes, is_on
from megatrain.passes.program import Program, Template, shared_templates
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.tracer.block_image import has_strides_of
from megatrain.tracer.calls import applied_function, function_text
from megatrain.tracer.guards import Expectation
from megatrain.tracer.packing import plain_tensors
from megatrain.tracer.python.followed_numbers import OnNumbers
from megatrain.tracer.recording.module_calls import Mapped
from megatrain.tracer.recording.opaque import Observer
from megatrain.tracer.recording.packed_calls import PackedCall

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


def recordable_blocks(programs: Iterable[Program]) -> tuple[frozenset[int], str]:
    """The blocks that can be recorded in each of some programs with the same blocks, and why others can't.

    Templates that one block alone runs aren't recorded: a recording keeps its memory.

    Returns:
        The blocks, and what keeps the first template that others share from being recorded; empty if nothing does.
    """
    found: list[frozenset[int]] = []
    why = ""
    for program in {id(program): program for program in programs}.values():
        obstacles = {name: launch_graph_obstacle(program.templates[name]) for name in shared_templates(program)}
        found.append(frozenset(block.index for block in program.blocks if obstacles.get(block.template) == ""))
        why = why or next((f"template {name}: {text}" for name, text in obstacles.items() if text), "")
    return frozenset.intersection(*found), why


def launch_graph_bytes(programs: Iterable[Program]) -> int:
    """Bytes that recordings of programs hold on the device beyond what schedules count.

    Each template has memory for what goes in: inputs, and gradients of outputs and inputs. Recordings run in memory
    that they share, but tensors of one template, or of blocks that need other gradients, may find no hole that another
    has left: so each of these kinds counts. Templates that one block alone runs aren't recorded.
    """
    distinct = {id(program): program for program in programs}.values()
    return sum(sum(launch_graph_sizes(program).values()) for program in distinct)


def launch_graph_sizes(program: Program) -> dict[str, int]:
    """The same by template, of those that are recorded."""
    found: dict[str, int] = {}
    for name in sorted(shared_templates(program)):
        template = program.templates[name]
        cost = template.cost
        if cost is None or launch_graph_obstacle(template):
            continue
        inputs, state, outputs = (
            sum(port.spec.nbytes for port in ports) for ports in (template.inputs, template.state, template.outputs)
        )
        kinds = {program.needs_gradients(block) for block in program.blocks if block.template == name}
        running = cost.forward_workspace_bytes + cost.backward_workspace_bytes + inputs + state + outputs
        found[name] = 2 * inputs + outputs + len(kinds) * running
    return found


Run = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""What is run: a `Code`, or one with all else that its call needs."""


class Workspace(NamedTuple):
    """What is alive within a run beyond what stays."""

    nbytes: int
    parts: tuple[int, ...]


def measure_forward(code: Run, arguments: list[torch.Tensor], device: torch.device) -> tuple[Workspace, Works]:
    """Returns what is alive within a forward beyond its arguments and outputs, and its kernels."""
    with LiveBytes(arguments, device) as live, KernelWork(device) as kernels:
        outputs = code(arguments)
    own = storage_sizes([t for t in outputs if is_on(t, device)], beyond=[])
    return Workspace(max(0, live.peak - sum(own)), _without(live.peak_parts, own)), kernels.take()


def measure_backward(
    code: Run,
    arguments: list[torch.Tensor],
    num_inputs: int,
    device: torch.device,
    *,
    runs_backward: bool,
    held: Sequence[torch.Tensor] = (),
) -> tuple[list[int], Workspace | None, Works]:
    """Measures a forward under autograd, and its backward.

    Args:
        held: Tensors that don't count.

    Returns:
        The bytes of each tensor that is saved, what is alive beyond arguments and gradients (None without a backward),
        and the kernels of the backward.
    """
    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        saved.extend(weakref.ref(inner) for inner in plain_tensors(kept))
        return kept

    with LiveBytes([*arguments, *held], device) as live:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = code(arguments)
        # Tensors that only a dead branch had saved are gone by now.
        alive = [t for t in (ref() for ref in saved) if t is not None and is_on(t, device)]
        saved_parts = storage_sizes(alive, beyond=[*arguments, *outputs])
        del alive
        # A view of a weight made under no_grad says that it requires grad, but has no history.
        # A step's backward runs without the outputs. Here they stay and count: an allocator's rounding needs room.
        with_history = [o for o in outputs if o.grad_fn is not None]
        seeds = [torch.ones_like(o) for o in with_history]
        roots = [get_gradient_edge(o) for o in with_history]
        leaves = [a for a in arguments if a.requires_grad]
        gradients: Any = ()
        if not runs_backward:
            return saved_parts, None, ()
        with KernelWork(device) as kernels:
            if roots and leaves:
                gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    there = [g for g in gradients if g is not None and is_on(g, device)]
    made = [part.untyped_storage().nbytes() for g in there for part in _parts(g)]
    pairs = zip(gradients, leaves, strict=False)
    state = {id(a) for a in arguments[num_inputs:]}
    # The runtime gives them the strides of their parameters, one after the other.
    copied = [g.nbytes for g, leaf in pairs if g is not None and id(leaf) in state and not has_strides_of(g, leaf)]
    workspace = Workspace(max(0, live.peak - sum(made), *copied), _without(live.peak_parts, made))
    return saved_parts, workspace, kernels.take()


def _without(parts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted((Counter(parts) - Counter(others)).elements(), reverse=True))


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a gradient consists of: itself, or those of a sparse one."""
    return (gradient._indices(), gradient._values()) if gradient.layout == torch.sparse_coo else (gradient,)


def storage_sizes(tensors: Sequence[torch.Tensor], beyond: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each of the distinct storages of `tensors` that none of `beyond` shares."""
    known = {t.untyped_storage()._cdata for t in beyond}  # pyright: ignore[reportPrivateUsage]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}  # pyright: ignore[reportPrivateUsage]
    return [size for key, size in sizes.items() if key not in known]
