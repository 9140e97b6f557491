"""Patterns: a few calls, written as a plain function, that are looked for in a captured graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from megatrain.base.torch_private import pytree
from megatrain.errors import LowerError
from megatrain.tracer.calls import (
    as_call,
    call_name,
    call_text,
    is_property_get,
    literal_text,
    named_arguments,
    target_name,
)
from megatrain.tracer.spec import CALLS, is_equal

Target = str | Callable[..., Any]
"""A function of tensors, or the name of a tensor's method."""


def refuse_rewrite(what: str, rule: str, way_out: str) -> NoReturn:
    """Raises the error for a change that would break a graph."""
    raise LowerError(f"{what}.\n  {rule}\n  {way_out}")


def is_written_after(first: fx.Node, nodes: Iterable[fx.Node]) -> bool:
    """Tells whether `first` or a later call writes into memory of one of these tensors.

    What a pass puts in place of calls reads their operands later than they did, and again in the backward.
    """
    memory = {node.meta["storage"] for node in nodes if "storage" in node.meta}
    writers = (node for node in first.graph.nodes if node.meta.get("writes") and not node < first)
    return any(written.meta.get("storage") in memory for node in writers for written in node.meta["writes"])


# A pattern has no values, so Python code can't ask for them.
_ASKING = frozenset(
    "__bool__ __int__ __float__ __index__ __len__ __iter__ __contains__ item tolist numpy size dim ndimension numel "
    "nelement stride storage_offset element_size data_ptr is_contiguous is_floating_point is_complex get_device".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The calls of a graph that make the same computation as a pattern.

    `match["hidden"]` is what the pattern's parameter `hidden` stands for: a node, or a plain value.

    Args:
        result: The call that makes the pattern's result.
        calls: All calls of the match, in execution order; the last one is `result`.
        given: What each parameter of the pattern stands for.
    """

    result: fx.Node
    calls: tuple[fx.Node, ...]
    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def __str__(self) -> str:
        given = ", ".join(f"{name} = {literal_text(value)}" for name, value in self.given.items())
        return f"{self.result.name}: {call_text(self.result)}{f', where {given}' if given else ''}"


class Pattern:
    """Calls to look for.

    Args:
        function: Takes tensors and plain values, makes torch calls, and returns the result of the last one. It is run
            once, on symbols. A parameter stands for any tensor or value; one that is used twice, for the same in both
            places. Other arguments must be those of the graph, and what isn't given must be the default there.
        through: Calls that may stand between those of the pattern, on their first operand: `("view", "reshape")`.
    """

    def __init__(self, function: Callable[..., Any], through: Collection[Target] = ()):
        self._through = through
        self._names = _parameters(function)
        self._result = _recorded(function, self._names)

    def matches(self, graph: fx.Graph, kept: Collection[fx.Node]) -> list[Match]:
        """Lists where the pattern is in a graph, in execution order; no call is in two matches.

        What a match makes on the way must be read in the match alone, and written into by nothing. The memory that it
        reads must stay as it is once the match has begun: whatever takes its place may read it later.

        Args:
            kept: Nodes that something besides the graph reads.
        """
        taken: set[fx.Node] = set()
        found: list[Match] = []
        for node in graph.nodes:
            attempt = _Attempt(self._through)
            if not attempt.fits(self._result, node):
                continue
            match = Match(node, tuple(sorted(attempt.calls)), {n: attempt.given.get(n) for n in self._names})
            if taken.isdisjoint(match.calls) and _is_closed(match, kept):
                taken.update(match.calls)
                found.append(match)
        return found


def _is_closed(match: Match, kept: Collection[fx.Node]) -> bool:
    """Tells whether a match can be replaced as a whole: see `Pattern.matches`. All of it runs under the same modes."""
    calls = set(match.calls)
    inner = calls - {match.result}
    modes = [(node.meta["grad"], node.meta["autocast"]) for node in match.calls]
    is_inner = all(node not in kept and calls.issuperset(node.users) for node in inner)
    read = {n for call in match.calls for n in call.all_input_nodes} | inner
    return is_inner and all(m == modes[0] for m in modes) and not is_written_after(match.calls[0], read)


class _Attempt:
    """One try to lay a pattern over a graph, from its result backwards."""

    def __init__(self, through: Collection[Target]):
        self._through = through
        self.calls: set[fx.Node] = set()
        self.given: dict[str, Any] = {}

    def fits(self, wanted: fx.Node, found: Any) -> bool:
        """Tells whether a call of the pattern is this node."""
        while _is_call(found) and not _is_one_of(found.target, (wanted.target,)):
            if not self.calls or not found.args or not _is_one_of(found.target, self._through):
                return False
            self.calls.add(found)
            found = found.args[0]
        if not _is_call(found):
            return False
        self.calls.add(found)
        return self._fit_arguments(wanted, found)

    def _fit_arguments(self, wanted: fx.Node, found: fx.Node) -> bool:
        there, defaults = named_arguments(found)
        for key, value in named_arguments(wanted)[0].items():
            if key not in there and key not in defaults:
                return False
            if not self._fits(value, there.pop(key, defaults.get(key))):
                return False
        return all(value is None for value in there.values())  # what the pattern doesn't give must be the default

    def _fits(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, fx.Node):
            if wanted.op == "placeholder":
                return _is_same(self.given.setdefault(wanted.name, found), found)
            return self.fits(wanted, found)
        if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
            return len(wanted) == len(found) and all(map(self._fits, wanted, found))
        return _is_same(wanted, found)


def _is_call(node: Any) -> bool:
    """Tells whether a node makes one tensor from others and does nothing else."""
    if not isinstance(node, fx.Node) or node.op not in CALLS or "spec" not in node.meta:
        return False
    return not node.meta.get("is_random") and not node.meta.get("writes")


def _is_same(left: Any, right: Any) -> bool:
    return left is right if isinstance(left, fx.Node) or isinstance(right, fx.Node) else is_equal(left, right)


def _is_one_of(target: Any, wanted: Collection[Any]) -> bool:
    """Tells whether a call is one of these; `torch.tanh(x)` and `x.tanh()` are one call."""
    methods = [getattr(torch, name, name) if isinstance(name, str) else name for name in (target, *wanted)]
    return target in wanted or methods[0] in methods[1:]


# -- recording a pattern ------------------------------------------------------------------------------------------


class _Symbol(torch.Tensor):
    """Stands for a tensor of which nothing is known; torch hands each call of it to the class instead of making it."""

    node: fx.Node

    @staticmethod
    def of(node: fx.Node) -> _Symbol:
        symbol = torch.empty(0).as_subclass(_Symbol)
        symbol.node = node
        return symbol

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        op, target = as_call(func)
        if is_property_get(func) or call_name(func) in _ASKING:
            name = target_name(fx.Graph().create_node(op, target)) or "a property"
            refuse_rewrite(
                f"a pattern asks for `{name}` of a tensor",
                "A pattern is run on symbols, which have neither values nor shapes.",
                "Take a plain value as a parameter of the pattern; read it from the match, and shapes from its nodes.",
            )
        given = pytree.tree_map_only(_Symbol, lambda s: s.node, (args, dict(kwargs or {})))
        graph = next(_nodes(given)).graph
        return _Symbol.of(graph.create_node(op, target, *given))


def _nodes(given: Any) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(given, lambda node: found.append(node) or node)
    return iter(found)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names what a pattern leaves open."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        parameters = None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if parameters is None or any(parameter.kind not in by_name for parameter in parameters):
        refuse_rewrite(
            "the pattern's parameters have no names",
            "A match gives what each parameter stands for by its name.",
            "Write the pattern as a Python function of named parameters, such as `lambda x: torch.neg(x)`.",
        )
    return tuple(parameter.name for parameter in parameters)


def _recorded(function: Callable[..., Any], names: tuple[str, ...]) -> fx.Node:
    """Runs a pattern on symbols; returns the node of its result."""
    graph = fx.Graph()
    result = function(**{name: _Symbol.of(graph.placeholder(name)) for name in names})
    if not isinstance(result, _Symbol) or result.node.op == "placeholder":
        refuse_rewrite(
            f"the pattern returns {'its parameter' if isinstance(result, _Symbol) else 'something else than a tensor'}",
            "A pattern returns the result of its last call, one tensor.",
            "Return what the call that you look for returns.",
        )
    return result.node
