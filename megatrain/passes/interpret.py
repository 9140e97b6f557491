"""Runs a template's graph on tensors, or without values, as one Python function, under the modes of each call."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from megatrain.base.torch_private import FakeTensor, FakeTensorMode, pytree
from megatrain.device import autocast_kinds
from megatrain.tracer.calls import applied_function
from megatrain.tracer.guards import Expectation
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.python_values import leaves_of
from megatrain.tracer.recording.obstacles import unprinted_failures
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.recording.unseen_kernels import kernels_need_values

_See = Callable[[fx.Node, Any], None]


class Code:
    """A graph made ready to run: results are freed after their last use.

    The graph becomes the text of a function, one line a call: Python runs it several times as fast as a loop over the
    nodes would, and a GPU waits for nothing else where kernels are short.

    Args:
        graph: Straight-line graph without `get_attr` nodes; its placeholders are the arguments, in order.
        see: Called with each node and its result; None for none.
        around: Places of calls among the nodes of the graph that run within a mode of the caller.
    """

    __slots__ = ("_around", "_function", "_kinds", "_num_inputs", "_see", "graph", "has_inner_grad", "opaque")

    def __init__(self, graph: fx.Graph, *, see: _See | None = None, around: Collection[int] = ()):
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        assert list(graph.nodes)[: len(placeholders)] == placeholders, "placeholders come first"
        self.graph, self._see, self._around = graph, see, frozenset(around)
        self._num_inputs = len(placeholders)
        self._function: Callable[..., tuple[torch.Tensor, ...]] | None = None
        self._kinds: tuple[str, ...] = ()
        self.opaque = opaque_calls(graph)
        self.has_inner_grad = has_inner_grad(graph)

    def __call__(
        self,
        arguments: Sequence[torch.Tensor],
        *,
        is_checked: bool = True,
        mode: AbstractContextManager[Any] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the graph; differentiable where the caller's grad mode and the recorded one both allow it.

        Args:
            is_checked: Whether values are compared with those of the capture; each comparison waits for the device.
                False repeats a run that was checked.
            mode: Is active in the calls of `around`, and is entered for each of them.
        """
        assert len(arguments) == self._num_inputs
        assert mode is None or self._around, "no call is to run in a mode"
        if self._function is None:
            self._function = self._made()
            self._kinds = autocast_kinds()
        # The modes of the capture count, not the caller's present modes.
        outer = [kind for kind in self._kinds if torch.is_autocast_enabled(kind)]
        modes = (mode or nullcontext(),) if self._around else ()
        if not outer:
            return self._function(is_checked, *modes, *arguments)
        with ExitStack() as stack:
            for kind in outer:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return self._function(is_checked, *modes, *arguments)

    def _made(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Makes the function of the graph: `function(is_checked, *arguments)`, or `function(is_checked, mode, ...)`."""
        return _Text(self.graph, self._see, self._around).function()

    def watched(self, see: _See) -> Code:
        """Returns the same code, which hands each result to `see`, with the node of its call."""
        return Code(self.graph, see=see, around=self._around)


def opaque_calls(graph: fx.Graph) -> tuple[Opaque, ...]:
    """Lists the modules in a graph that run their own code."""
    return tuple(n.target for n in graph.nodes if isinstance(n.target, Opaque))


def looks_in_backward(graph: fx.Graph) -> bool:
    """Tells whether the user's code may look at the model in the backward.

    Hooks of modules and of tensors may, which make a module opaque, and a Function that is given a module, or whose
    backward names one, or a tensor.
    """
    if any(call.runs_in_backward for call in opaque_calls(graph)):
        return True
    applied = [(node, function) for node in graph.nodes if (function := applied_function(node.target)) is not None]
    given = [leaf for node, _ in applied for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    backwards = {id(function): function.backward for _, function in applied}.values()
    named = [variable.now() for backward in backwards for variable in Outer.of_hook(backward).variables]
    reached = chain(given, *map(leaves_of, named))
    return any(isinstance(each, nn.Module | torch.Tensor) for each in reached)


def reads_values(graph: fx.Graph) -> bool:
    """Tells whether Python code reads values that the graph computes: others may need another capture, in mid-step."""
    return any(isinstance(node.target, Expectation) for node in graph.nodes)


def has_inner_grad(graph: fx.Graph) -> bool:
    """Tells whether the code differentiates inside its own forward, and so needs history in any case."""
    differentiates = any(n.target in (torch.autograd.grad, torch.autograd.backward) for n in graph.nodes)
    return differentiates or bool(opaque_calls(graph))


class _Text:
    """The text of a graph's function, and the objects that it names."""

    def __init__(self, graph: fx.Graph, see: _See | None, around: Collection[int]) -> None:
        self._graph, self._see = graph, see
        self._around = {node for place, node in enumerate(graph.nodes) if place in around}
        self._names = {node: f"v{number}" for number, node in enumerate(graph.nodes)}
        self._objects: dict[str, Any] = {"see": see, "torch": torch}

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns the function; see `Code`."""
        calls = [n for n in self._graph.nodes if n.op in ("call_function", "call_method")]
        last_use = {argument: node for node in self._graph.nodes for argument in node.all_input_nodes}
        dead: dict[fx.Node, list[str]] = {}
        for argument, user in last_use.items():
            if user.op != "output":
                dead.setdefault(user, []).append(self._names[argument])
        arguments = [self._names[n] for n in self._graph.nodes if n.op == "placeholder"]
        modes = ["mode"] if self._around else []
        lines = [f"def run({', '.join(['is_checked', *modes, *arguments])}):"]
        for node in calls:
            lines += [f"    {line}" for line in self._call(node)]
            gone = [*dead.get(node, ()), *([] if node.users else [self._names[node]])]
            if gone:
                lines.append(f"    {' = '.join(gone)} = None")
        outputs: Any = self._graph.output_node().args[0]
        lines.append(f"    return ({''.join(f'{self._names[n]}, ' for n in outputs)})")
        exec("\n".join(lines), self._objects)  # only names and literals that this class wrote
        return self._objects.pop("run")  # a function that its own names hold would wait for the collector

    def _call(self, node: fx.Node) -> list[str]:
        name = self._names[node]
        if node.op == "call_method":
            text = f"{self._literal(node.args[0])}.{node.target}({self._listed(node.args[1:], node.kwargs)})"
        else:
            text = f"{self._object(node.target)}({self._listed(node.args, node.kwargs)})"
        if isinstance(node.target, Expectation):
            lines = [f"if is_checked: {text}", f"{name} = None"]
        else:
            lines = [f"{name} = {text}"]
        modes = ", ".join(self._modes(node))
        if modes:
            lines = [f"with {modes}:", *(f"    {line}" for line in lines)]
        return lines if self._see is None else [*lines, f"see({self._object(node)}, {name})"]

    def _modes(self, node: fx.Node) -> Iterator[str]:
        """Yields the modes of a call, as texts of context managers. The caller may have disabled gradients, too."""
        if not node.meta["grad"]:
            yield "torch.no_grad()"
        if node in self._around:
            yield "mode"
        for device, dtype in node.meta["autocast"]:
            # The weight cache would outlive the slot that the cast weight was read from.
            yield f"torch.autocast({device!r}, dtype={self._object(dtype)}, cache_enabled=False)"

    def _listed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        # `from` is the name of an argument of `Tensor.random_`, and no name in a text of Python.
        plain = {key: value for key, value in kwargs.items() if not keyword.iskeyword(key)}
        rest = {key: value for key, value in kwargs.items() if key not in plain}
        named = [f"{key}={self._literal(value)}" for key, value in plain.items()]
        return ", ".join([*map(self._literal, args), *named, *([f"**{self._literal(rest)}"] if rest else [])])

    def _literal(self, value: Any) -> str:
        """Text whose value is `value`, with tensors for nodes; containers are new ones in each run."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, slice):
            return f"slice({self._listed((value.start, value.stop, value.step), {})})"
        return self._container(value) if isinstance(value, tuple | list | dict) else self._object(value)

    def _container(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._literal(key)}: {self._literal(item)}" for key, item in value.items()) + "}"
        items = "".join(f"{self._literal(item)}, " for item in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"{self._object(type(value))}({items})" if hasattr(value, "_fields") else f"({items})"

    def _object(self, value: Any) -> str:
        name = f"o{len(self._objects)}"
        self._objects[name] = value
        return name


# -- without values ---------------------------------------------------------------------------------------------------


@contextmanager
def exact_fakes(*, allow_non_fake_inputs: bool = False) -> Generator[FakeTensorMode]:
    """A mode in which tensors have no values, and kernels that no mode sees aren't run on them.

    TorchScript on an accelerator is an error, and so are launches of Triton kernels. A kernel that fails raises,
    and nothing is printed.

    Args:
        allow_non_fake_inputs: Whether tensors with values may be used as well. Those that are written have their values
            back at the end.
    """
    fakes = ExactFakes(allow_non_fake_inputs=allow_non_fake_inputs)
    try:
        with unprinted_failures(), kernels_need_values(), fakes as mode:
            yield mode
    finally:
        for tensor, before in reversed(fakes.written):
            tensor.data.copy_(before)


class ExactFakes(FakeTensorMode):
    """A mode of fake tensors that share storages just as real ones would; torch's cache serves it where it can.

    From the cache, a kernel that returns one tensor twice gives two, so that figures would depend on earlier runs in
    the process. Only kernels of one result are looked up there, which halves the time of a run.

    Attributes:
        written: Tensors with values before each write into one: a kernel all of whose tensors have values runs.
        repeats: How often a kernel counts that runs now.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.repeats = 1

    @contextmanager
    def repeated(self, number: int) -> Generator[None]:
        """Lets kernels stand for so many that are alike."""
        self.repeats = number
        try:
            yield
        finally:
            self.repeats = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.allow_non_fake_inputs and func._schema.is_mutable:
            given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if not any(isinstance(each, FakeTensor) for each in given):
                self.written += [(each, each.detach().clone()) for each in given]
        before, self.cache_enabled = self.cache_enabled, _has_one_result(func)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = before


@functools.cache
def _has_one_result(func: Any) -> bool:
    found = func._schema.returns
    return len(found) == 1 and isinstance(found[0].real_type, torch.TensorType)
