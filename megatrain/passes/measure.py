"""measure: runs each template on fake tensors and notes its memory and work."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import pytree
from megatrain.errors import LowerError
from megatrain.hardware.work import Kernels
from megatrain.passes.canonicalize import copied_graph, template_key
from megatrain.passes.fused import fused_kernels
from megatrain.passes.interpret import Code, exact_fakes, opaque_calls
from megatrain.passes.kept_results import kept_cost, may_be_worth
from megatrain.passes.kernels import is_of_flash_attn
from megatrain.passes.measured_runs import Workspace, fixed_work_obstacle, measure_backward, measure_forward
from megatrain.passes.program import Program, Template, TemplateCost
from megatrain.passes.rewrites.tiled_region import without_results
from megatrain.tracer.calls import applied_function, call_text
from megatrain.tracer.guards import Expectation
from megatrain.tracer.recording.packed_calls import PackedCall
from megatrain.tracer.spec import TensorSpec

Needs = tuple[bool, ...]
"""Whether a block needs the gradient, of each placeholder of its template."""
MOST = 1000
"""So many costs are kept, the latest ones."""


class KnownCosts:
    """The costs of one planner's, or one capture's, programs.

    A model is lowered many times until a step fits: each time with a few other templates, while the others stay as they
    are. Blocks of one program whose templates are equal share a cost; so do those of several programs.
    """

    def __init__(self) -> None:
        # With the template: what a key knows by its identity must live as long as the key.
        self._known: dict[Any, tuple[Template, TemplateCost]] = {}

    def of(
        self,
        template: Template,
        needs: Sequence[Needs],
        device: torch.device,
        measured: Callable[[], TemplateCost],
        *,
        fuses: bool = False,
    ) -> TemplateCost:
        """Returns the cost of a template, for its uses: which of its inputs and state need a gradient in each.

        With `fuses`, its kernels count as a compiler makes them.
        """
        histories = tuple(node.meta.get("has_history") for node in template.graph.nodes)
        key = template_key(template), histories, tuple(needs), device, fuses
        if key not in self._known:
            self._known[key] = template, measured()
            if len(self._known) > MOST:
                del self._known[next(iter(self._known))]
        return self._known[key][1]


def measure(program: Program, costs: KnownCosts | None = None, *, fuses: bool = False) -> Program:
    """Returns `program` with the cost of every template filled in; allocates nothing.

    Args:
        fuses: Whether kernels count as a compiler makes them, which fuses chains of element-wise calls. Bytes of memory
            are still those of eager's kernels.
    """
    costs = KnownCosts() if costs is None else costs
    needs: dict[str, list[Needs]] = {}
    for block in program.blocks:
        needs.setdefault(block.template, []).append(program.needs_gradients(block))
    templates = {
        name: dataclasses.replace(
            template, cost=_cost(template, list(dict.fromkeys(needs[name])), program, costs, fuses=fuses)
        )
        for name, template in program.templates.items()
    }
    return dataclasses.replace(program, templates=templates)


def _cost(template: Template, needs: list[Needs], program: Program, costs: KnownCosts, *, fuses: bool) -> TemplateCost:
    if opaque_calls(template.graph):
        return _upper_bound(template, "a module runs its own code")
    if _has_unknown_shapes(template.graph):
        return _upper_bound(template, "a shape depends on values")
    try:
        with Interrupts():  # an error that leaves a dispatch mode called from C++ ends the process
            measured = partial(_measured, template, needs, program, fuses=fuses)
            return costs.of(template, needs, program.device, measured, fuses=fuses)
    except LowerError:
        raise
    except Exception as error:  # the bound is right for any failure, and printed with it
        # Some kernels refuse fake tensors that they accept with values, with errors of any type; the capture ran on
        # values, then.
        told = " ".join(str(error).split())[:80]
        return _upper_bound(template, f"it doesn't run without values: {type(error).__name__}: {told}")


def _measured(template: Template, needs: list[Needs], program: Program, *, fuses: bool = False) -> TemplateCost:
    """Measures bytes where all gradients are needed that some block needs, and kernels for each of the `needs`."""
    device, all_needs = program.device, tuple(map(any, zip(*needs, strict=True)))
    code = Code(_to_measure(template.graph, device))
    ports = (*template.inputs, *template.state)
    with exact_fakes():
        arguments = [port.spec.empty(device) for port in ports]
        leaves = _leaves(arguments, all_needs)
        with torch.set_grad_enabled(code.has_inner_grad):
            in_forward, forward = measure_forward(code, leaves if code.has_inner_grad else arguments, device)
        held = _held_state(code, leaves, len(template.inputs)) if _functions(template) else ()
        watched = code.watched(_check_history)
        # A Function's backward is the user's own code, which must run when their backward does, not before. That of
        # packed weights is their library's: only a run shows the weights that it makes in full. So is flash-attn's.
        theirs = [isinstance(n.target, PackedCall) or is_of_flash_attn(n.target) for n in _functions(template)]
        runs_backward = all(theirs)
        measure_with = partial(measure_backward, num_inputs=len(template.inputs), device=device)
        repeated = _repeated(template.graph, device)
        saved, in_backward, backward = measure_with(watched, leaves, runs_backward=runs_backward)
        if repeated is not None:
            _, in_backward, backward = measure_with(repeated, leaves, runs_backward=runs_backward)
        results = None
        if runs_backward and may_be_worth(forward) and not code.has_inner_grad:
            hollow = code.graph if repeated is None else repeated.graph
            results = kept_cost((template.graph, code.graph, hollow), leaves, len(template.inputs), device, forward)
        others = [each for each in needs if each != all_needs and runs_backward]
        backwards = tuple(
            (each, measure_with(code, _leaves(arguments, each), runs_backward=True)[2]) for each in others
        )
    if in_backward is None:
        in_backward = Workspace(2 * _result_bytes(template), ())
        backward = tuple(Kernels(rate, 2 * flops, 2 * nbytes, 2 * count) for rate, flops, nbytes, count in forward)
    held_parts = [template.state[index].spec.device_bytes for index in held]
    parts = tuple(sorted((*saved, *held_parts), reverse=True))
    cost = TemplateCost(
        sum(parts),
        in_forward.nbytes,
        in_backward.nbytes,
        forward,
        backward,
        held_state=held,
        backwards=backwards,
        saved_parts=parts,
        workspace_parts=(in_forward.parts, in_backward.parts),
        results=results,
    )
    is_eager = not fuses or not runs_backward or fixed_work_obstacle(dataclasses.replace(template, cost=cost))
    return cost if is_eager else _fused(cost, template, needs, program)


def _fused(cost: TemplateCost, template: Template, needs: list[Needs], program: Program) -> TemplateCost:
    """The same with the kernels that a compiler makes."""
    all_needs = tuple(map(any, zip(*needs, strict=True)))
    each = list(dict.fromkeys([all_needs, *needs]))
    code = Code(_to_measure(template.graph, program.device))
    with exact_fakes():
        arguments = [port.spec.empty(program.device) for port in (*template.inputs, *template.state)]
        forward, backwards = fused_kernels(code, [_leaves(arguments, one) for one in each], program.device)
        found = dict(zip(each, backwards, strict=True))
    others = tuple((one, works) for one, works in found.items() if one != all_needs)
    return dataclasses.replace(cost, forward=forward, backward=found[all_needs], backwards=others)


def _repeated(graph: fx.Graph, device: torch.device) -> Code | None:
    """The code of a forward that is repeated for its backward, if it isn't that of the first."""
    changed = without_results(graph)
    return None if changed is graph else Code(_to_measure(changed, device))


def _leaves(arguments: list[torch.Tensor], needs: Needs) -> list[torch.Tensor]:
    return [t.detach().requires_grad_(needs_grad) for t, needs_grad in zip(arguments, needs, strict=True)]


def _check_history(node: fx.Node, result: Any) -> None:
    """Compares with the model's own run whether a result has a history: where one is lost, weights would not train."""
    if isinstance(result, torch.Tensor) and node.meta.get("has_history") and not result.requires_grad:
        raise LowerError(
            f"`{node.name} = {call_text(node)}` has no gradient in the program, but has one in the model.\n"
            f"  It was captured at {node.meta['source']}; every weight before it would train wrongly.\n"
            "  Put this call into a module that runs its own code: trace(opaque=...)."
        )


def _upper_bound(template: Template, why: str) -> TemplateCost:
    """A bound of every execution: all results of all calls at once, in the backward with their gradients."""
    calls = opaque_calls(template.graph)
    total = _result_bytes(template) + sum(call.inner_bytes for call in calls)
    owned = sum(p.spec.device_bytes for p in template.state) if any(c.needs_own_state for c in calls) else 0
    held = tuple(range(len(template.state))) if _functions(template) else ()
    held_bytes = sum(template.state[index].spec.device_bytes for index in held)
    return TemplateCost(total + owned + held_bytes, total, 2 * total + owned, unmeasured=why, held_state=held)


def _result_bytes(template: Template) -> int:
    return sum(n.meta["spec"].device_bytes for n in template.graph.nodes if "spec" in n.meta)


def _has_unknown_shapes(graph: fx.Graph) -> bool:
    """Tells whether a shape depends on values with a gradient, so that no empty tensor can stand for the call."""
    return any("results" in n.meta and any(a.meta.get("requires_grad") for a in n.all_input_nodes) for n in graph.nodes)


def _held_state(code: Code, leaves: list[torch.Tensor], num_inputs: int) -> tuple[int, ...]:
    """Finds the state whose memory something keeps for the backward, apart from the tensors that autograd saves."""
    # Copies: autograd keeps leaves.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        state = [leaf.clone() for leaf in leaves[num_inputs:]]
        kept = [weakref.ref(tensor.untyped_storage()) for tensor in state]
        outputs = code([*leaves[:num_inputs], *state])
    state.clear()
    found = tuple(index for index, storage in enumerate(kept) if storage() is not None)
    del outputs  # with its graph, which lived until here
    return found


def _functions(template: Template) -> list[fx.Node]:
    """Lists the calls of autograd.Functions."""
    return [node for node in template.graph.nodes if applied_function(node.target) is not None]


def _to_measure(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Replaces calls whose shapes depend on values (guarded at run time) by empty tensors of those shapes."""
    graph, _ = copied_graph(graph)
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, Expectation):
            graph.erase_node(node)
        elif "results" in node.meta:
            node.op, node.args, node.kwargs = "call_function", (), {}
            node.target = partial(_empty, device, node.meta["results"])
    return graph


def _empty(device: torch.device, specs: Any) -> Any:
    return pytree.tree_map_only(TensorSpec, lambda spec: spec.empty(device), specs)
