"""Faults of captures that recall equal calls."""

from __future__ import annotations

from tests.mutants.fault import Fault


def _layers_with(quirk: str) -> tuple[str, ...]:
    return (f"tests/tracer/test_recall.py::test_layers_with_a_quirk[{quirk}]",)


_RECALL = "tracer/recording/recall.py"
FAULTS: list[Fault] = [
    Fault(
        "a call under autocast is taken for one without",
        _RECALL,
        "key = func, told, tuple(shared), autocast, _state()",
        "key = func, told, tuple(shared), _state()",
        _layers_with("autocast"),
    ),
    Fault(
        "a call without gradients is taken for one with",
        _RECALL,
        "key = func, told, tuple(shared), autocast, _state()",
        "key = func, told, tuple(shared), autocast",
        _layers_with("no gradients"),
    ),
    Fault(
        "calls on tensors of other strides are taken for equal",
        _RECALL,
        "form = *_geometry(tensor), tensor.is_leaf",
        "form = tuple(tensor.shape), tensor.is_leaf",
        _layers_with("other strides"),
    ),
    Fault(
        "a call that reads other values is taken for equal",
        _RECALL,
        "return node, self._writes  #",
        "return type(tensor), 0  #",
        _layers_with("pieces by value"),
    ),
    Fault(
        "a write into what a recalled call views goes on without the history",
        _RECALL,
        "if storage_key(tensor) in self._views:",
        "if False:",
        _layers_with("a write into what another layer has left"),
    ),
    Fault(
        "a forward that differentiates meets histories that were left out",
        "tracer/recording/module_calls.py",
        "if recorder.recall.is_used:",
        "if False:",
        _layers_with("a gradient that is tried"),
    ),
    Fault(
        "a forward that seeds before a recalled draw is captured",
        "tracer/recording/recorder.py",
        "        if recipe.is_random:\n",
        "        if False:\n",
        _layers_with("a seed"),
    ),
    Fault(
        "parameters of recalled calls have no place in the order of gradients",
        "tracer/recording/recorder.py",
        "        if recipe.ready is not None:\n",
        "        if False:\n",
        _layers_with("none"),
    ),
]
