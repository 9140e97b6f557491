"""Fixed work: templates whose kernels are the same in each run, and the memory of their recordings (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.passes.interpret import has_inner_grad, opaque_calls
from megatrain.passes.program import Program, Template, shared_templates
from megatrain.tracer.calls import applied_function
from megatrain.tracer.expectations import Expectation
from megatrain.tracer.python.followed_numbers import OnNumbers
from megatrain.tracer.recording.observer import Observer


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
    return fixed_work_obstacle(template)


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
