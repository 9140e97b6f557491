"""Fixed work: templates whose kernels are the same in each run, and the memory of their recordings (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.passes.interpret import has_inner_grad, opaque_calls
from megatrain.passes.program import Program, Template, shared_templates
from megatrain.tracer.expectations import Expectation
from megatrain.tracer.recording.observer import Observer


def fixed_work_obstacle(template: Template) -> str:
    """Says what in a template keeps it from being compiled or recorded as fixed work; empty if nothing does."""
    graph = template.graph
    if any(isinstance(node.target, Expectation | Observer) for node in graph.nodes):
        return "it compares values with those of the capture"
    if opaque_calls(graph):
        return "it runs a module's own code (opaque)"
    if has_inner_grad(graph):
        return "it differentiates in its forward"
    if template.cost is not None and template.cost.held_state:
        return "its backward reads weights that its forward kept for itself"
    if any(node.meta["spec"].on_host for node in graph.nodes if "spec" in node.meta):
        return "it reads or makes tensors on the host"
    return ""


def recording_obstacle(template: Template) -> str:
    """Says why a template can't be recorded; empty if it may be."""
    if template.is_random:
        return "it draws random numbers"
    return fixed_work_obstacle(template)


def recorded_bytes(programs: Iterable[Program]) -> int:
    """Bytes that recordings of programs hold on the device beyond what schedules count.

    Recordings of all templates share the memory in which they run. Each template has memory of its own for what goes
    in: inputs, and gradients of outputs and inputs. Templates that one block alone runs aren't recorded.
    """
    given: dict[int, int] = {}
    running = 0
    for program in programs:
        for name in shared_templates(program):
            template = program.templates[name]
            cost = template.cost
            if cost is None or recording_obstacle(template):
                continue
            inputs, state, outputs = (
                sum(port.spec.nbytes for port in ports) for ports in (template.inputs, template.state, template.outputs)
            )
            given[id(template)] = 2 * inputs + outputs
            forward = cost.forward_workspace_bytes + outputs
            running = max(running, forward + cost.backward_workspace_bytes + inputs + state)
    return running + sum(given.values())
