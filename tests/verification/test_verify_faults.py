"""verify() finds faults: every one of these systems is broken on purpose, and the report says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.passes.interpret import Code
from megatrain.runtime.block import BlockRunner, LocalGraph
from megatrain.runtime.executor import Executor
from megatrain.runtime.operations import Run
from megatrain.runtime.stores.offload_buffers import OffloadBuffer
from megatrain.runtime.stores.slots import Slots
from tests.models import MODELS, Block, Stack

STREAMED = {"device": "cpu", "memory": "1MiB"}


def report_of(name: str, **options: Any) -> megatrain.Report:
    model, args, kwargs = MODELS[name]()
    return megatrain.verify(model, *args, **STREAMED | options, **kwargs)


def first(report: megatrain.Report) -> Any:
    assert not report.ok
    assert report.first_difference is not None, report
    assert str(report.first_difference) in str(report)
    return report.first_difference


# -- the runtime ---------------------------------------------------------------------------------------------


def broken_runner(monkeypatch: pytest.MonkeyPatch, method: str, block: int, change: Callable[[Any], Any]) -> None:
    """Changes what one method of one block's runner returns; the runner is found by its place in the executor."""
    real = Executor.__init__

    class Broken:
        def __init__(self, runner: BlockRunner):
            self._runner = runner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._runner, name)
            return found if name != method else lambda *args, **options: change(found(*args, **options))

    def init(self: Executor, *args: Any) -> None:
        real(self, *args)
        runners: list[Any] = self.loaded.runners
        runners[block] = Broken(runners[block])

    monkeypatch.setattr(Executor, "__init__", init)


def test_a_wrong_forward_names_its_block(monkeypatch):
    block = 2

    def change(outputs):
        return (outputs[0] * 1.01, *outputs[1:])

    broken_runner(monkeypatch, "forward", block, change)
    found = first(report_of("stack", activations="recompute"))
    assert (found.culprit, found.block, found.phase, found.step) == ("runtime", block, "forward", 0)
    assert found.what.startswith("output `")
    assert found.relative == pytest.approx(0.01, rel=1e-3)


class WrongGraph:
    """A graph whose gradients of inputs (0) or of state (1) are 1 % too large."""

    def __init__(self, graph: LocalGraph, part: int):
        self._graph = graph
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def gradients(self, *args: Any) -> Any:
        found = list(self._graph.gradients(*args))
        found[self._part] = [g if g is None else g * 1.01 for g in found[self._part]]
        return tuple(found)


def test_a_wrong_recompute_is_told_from_a_wrong_forward(monkeypatch):
    def change(made):
        graph, outputs = made
        return WrongGraph(graph, 1), tuple(t * 1.01 for t in outputs)

    broken_runner(monkeypatch, "forward_with_graph", 1, change)
    found = first(report_of("stack", activations="recompute"))
    assert (found.culprit, found.block, found.phase) == ("runtime", 1, "recompute")


def test_a_slot_that_holds_another_blocks_weights_is_found(monkeypatch):
    real = Slots.prefetch

    def prefetch(self, block, where, **options):
        real(self, block, where, **options)
        if block == 2:
            self._arena.slot(*where)[:4] = 0

    monkeypatch.setattr(Slots, "prefetch", prefetch)
    found = first(report_of("stack"))
    assert (found.culprit, found.block, found.name, found.phase) == ("runtime", 2, "blocks.1", "forward")
    assert found.what == "state `blocks.1.fc.weight`"


def test_a_parked_value_that_comes_back_changed_is_found(monkeypatch):
    real = OffloadBuffer.get

    def get(self, name, out, *places):
        real(self, name, out, *places)
        out += 1e-3 if name == "add_1" else 0

    monkeypatch.setattr(OffloadBuffer, "get", get)
    report = report_of("stack", activations="offload")
    found = first(report)
    assert (found.culprit, found.phase, found.what) == ("runtime", "recompute", "input `add_1`")
    assert found.name == "blocks.2"


def test_a_buffer_that_is_not_committed_is_found(monkeypatch):
    monkeypatch.setattr(Run, "write_buffers", lambda self: None)
    report = report_of("ema_buffer", steps=1)
    found = first(report)
    assert {d.kind for d in report.differences if not d.ok} == {"buffer"}
    assert (found.culprit, found.phase) == ("runtime", "after")
    assert found.what.startswith("buffer `blocks.")
    assert found.name.startswith("blocks.")


def test_what_does_not_happen_again_is_said_to_be_unrepeatable(monkeypatch):
    real = Code.__call__
    calls = []

    def once(self, arguments, **options):
        outputs = real(self, arguments, **options)
        calls.extend([self] * (type(outputs[0]) is torch.Tensor))
        return tuple(t * 2 for t in outputs) if len(calls) == 2 else outputs

    monkeypatch.setattr(Code, "__call__", once)
    assert first(report_of("stack")).culprit == "unrepeatable"


# -- a pass --------------------------------------------------------------------------------------------------


class Scaled(Block):
    """A block with a literal of its own, so that none shares its template."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


def scaled_stack() -> Any:
    torch.manual_seed(0)
    model = Stack(0)
    model.blocks = nn.ModuleList(Scaled(1.0 + i / 8) for i in range(4))
    return model


def test_a_template_with_another_literal_names_its_block(monkeypatch):
    block, real = 4, megatrain.planning.step_programs.lowered_with

    def lowered_with(costs, traced, **options):
        program = real(costs, traced, **options)
        (node,) = (n for n in program.templates[program.blocks[block].template].graph.nodes if n.target == "mul")
        node.args = (node.args[0], node.args[1] + 0.01)
        return program

    monkeypatch.setattr(megatrain.planning.step_programs, "lowered_with", lowered_with)
    found = first(megatrain.verify(scaled_stack(), torch.ones(2, 3), device="cpu"))
    assert (found.culprit, found.block, found.phase) == ("passes", block, "forward")
    assert found.name == f"blocks.{block - 1}"
    assert found.relative == pytest.approx(0.01 / (1 + (block - 1) / 8), rel=1e-3)


def test_a_template_with_a_wrong_gradient_is_the_passes_fault(monkeypatch):
    real = megatrain.planning.step_programs.lowered_with

    def lowered_with(costs, traced, **options):
        program = real(costs, traced, **options)
        nodes = program.templates[program.blocks[2].template].graph.nodes
        (node,) = (n for n in nodes if n.name.startswith("tanh"))
        node.meta["grad"] = False
        return program

    monkeypatch.setattr(megatrain.planning.step_programs, "lowered_with", lowered_with)
    report = megatrain.verify(scaled_stack(), torch.ones(2, 3), device="cpu")
    assert not [d for d in report.differences if d.kind == "output" and not d.ok]
    found = first(report)
    assert (found.culprit, found.phase) == ("passes", "after")
    assert found.block <= 2


# -- the capture and the model -----------------------------------------------------------------------------


class SeesTheCapture(Scaled):
    """Does something else while torch functions are watched."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if torch._C._len_torch_function_stack() else y


def test_a_capture_that_is_not_the_model_names_the_module():
    model = scaled_stack()
    model.blocks[2] = SeesTheCapture(1.0)
    found = first(megatrain.verify(model, torch.ones(2, 3), device="cpu"))
    assert (found.culprit, found.name, found.block, found.phase) == ("capture", "blocks.2", 3, "forward")
    assert "traced graph" in str(found)
