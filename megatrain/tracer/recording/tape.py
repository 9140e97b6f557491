"""Tape: the graph of a running forward, with what is known of each tensor in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from megatrain.base.torch_private import FakeTensor, pytree
from megatrain.tracer.calls import as_call, call_name, is_property_get
from megatrain.tracer.guards import Expectation, Guard
from megatrain.tracer.recording.effect_watch import EffectWatch
from megatrain.tracer.recording.obstacles import (
    RUN_AGAIN,
    HookSite,
    Obstacle,
    Site,
    refuse,
)
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.source_line import user_line
from megatrain.tracer.spec import TensorSpec, autocast_state, storage_key


class TensorTable:
    """Maps tensors to nodes by identity, and storages to numbers.

    Fake tensors are kept alive, so that no other object takes their identity. Real ones may be large: they are followed
    weakly and forgotten with the last name that the user's code, or the capture for a weight's values, has for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nodes: dict[int, fx.Node] = {}
        self._kept: dict[int, torch.Tensor | weakref.ref[torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 0
        self._stand_ins: list[torch.Tensor] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._names: dict[int, list[tuple[fx.Node, torch.Tensor | weakref.ref[torch.Tensor]]]] = {}

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Makes `node` the latest definition of `tensor` and describes the tensor in its meta."""
        kept = tensor if isinstance(tensor, FakeTensor) else self._followed(tensor)
        self._nodes[id(tensor)] = node
        self._kept[id(tensor)] = kept
        number = self._number(tensor)
        self._names[number].append((node, kept))
        node.meta.update(
            spec=TensorSpec.of(tensor, self._device),
            requires_grad=tensor.requires_grad,
            has_history=tensor.requires_grad,  # from the call itself; a later write may make it require a gradient
            storage=number,
            storage_bytes=tensor.untyped_storage().nbytes(),
        )

    def bind_equal(self, tensor: FakeTensor, node: fx.Node, like: fx.Node, given: fx.Node | None) -> None:
        """Makes `node` the definition of a tensor that is like that of another node.

        Args:
            like: Defines a tensor that is described alike.
            given: Of the tensor whose memory it views; None if it has memory of its own.
        """
        self._nodes[id(tensor)] = node
        self._kept[id(tensor)] = tensor
        number = self._number(tensor) if given is None else given.meta["storage"]
        self._names[number].append((node, tensor))
        meta = like.meta
        node.meta.update(
            spec=meta["spec"],
            requires_grad=meta["has_history"],
            has_history=meta["has_history"],
            storage=number,
            storage_bytes=meta["storage_bytes"],
        )

    def stand_in(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        """Lets `tensor` count as `original` wherever it appears: the same node, the same memory."""
        self._nodes[id(tensor)] = self._nodes[id(original)]
        self._kept[id(tensor)] = self._followed(tensor)
        self.stand_in_memory(tensor, original)

    def stand_in_memory(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        """Lets the memory of `tensor` count as that of `original`."""
        key = storage_key(original)
        if key in self._numbers:
            self._enter(tensor, self._numbers[key])
            if isinstance(tensor, FakeTensor):
                self._stand_ins.append(tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        """Returns the latest node of a tensor, or None if it was never bound."""
        return self._nodes.get(id(tensor))

    def latest(self, tensor: torch.Tensor) -> fx.Node:
        """Returns the latest node of a tensor that was bound."""
        return self._nodes[id(tensor)]

    def knows_storage(self, key: int) -> bool:
        """Tells whether a bound tensor lies in that storage."""
        return key in self._numbers

    def count(self, number: int) -> int:
        """How many nodes were bound to the memory of a number."""
        return len(self._names[number])

    def names(self, key: int) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Lists what is bound in a storage and still held by somebody, in order of binding."""
        for node, kept in self._names.get(self._numbers.get(key, -1), ()):
            tensor = kept() if isinstance(kept, weakref.ref) else kept
            if tensor is not None:
                yield node, tensor

    def made(self) -> Iterator[tuple[torch.Tensor, fx.Node]]:
        """Lists the fake tensors, with the node of each."""
        for identity, kept in self._kept.items():
            if isinstance(kept, FakeTensor):
                yield kept, self._nodes[identity]

    def forget(self) -> None:
        """Lets go of all tensors, when the capture is over."""
        for table in (self._nodes, self._kept, self._names):
            table.clear()
        self._storages.clear()
        self._stand_ins.clear()

    def _followed(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        identity = id(tensor)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if self._kept.get(identity) is reference:
                del self._kept[identity], self._nodes[identity]

        return weakref.ref(tensor, forget)

    def _number(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        if key not in self._numbers:
            self._enter(tensor, self._next_number)
            self._names[self._next_number] = []
            self._next_number += 1
        return self._numbers[key]

    def _enter(self, tensor: torch.Tensor, number: int) -> None:
        """Gives the storage of `tensor` a number, for as long as it lives."""
        key, numbers = storage_key(tensor), self._numbers
        numbers[key] = number
        if not isinstance(tensor, FakeTensor):
            self._storages[key] = weakref.ref(tensor.untyped_storage(), lambda _: numbers.pop(key, None))


def place_of(node: fx.Node) -> str:
    """Says where in the model the call of a node is."""
    modules, source = node.meta.get("modules", ()), node.meta.get("source")
    where = f"in `{modules[-1][0] or 'the model'}`" if modules else "in the model"
    return f"{where} at {source}" if source is not None else where


class Escapes:
    """Remembers, weakly, what opaque modules and observers computed inside: such a tensor may not appear outside."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], tuple[tuple[str, ...], frozenset[HookSite]]]] = {}

    def note(self, tensor: torch.Tensor, calls: tuple[str, ...], hooks: frozenset[HookSite] = frozenset()) -> None:
        """Notes a tensor made while the model was in `calls`, by one of `hooks` if there are any."""
        self._origins[id(tensor)] = (weakref.ref(tensor), (calls, hooks))

    def origin(self, tensor: torch.Tensor) -> tuple[tuple[str, ...], frozenset[HookSite]] | None:
        """Returns the module calls and the hooks in which a tensor was made; None if it was made elsewhere."""
        reference, origin = self._origins.get(id(tensor), (None, None))
        return origin if reference is not None and reference() is tensor else None


class Tape:
    """Appends nodes and binds their results.

    Tensors map to nodes by identity, so a tensor may take any path through the user's Python (hooks, attributes,
    dicts, closures). A value that depends on inputs and constants alone is *known* before the step: Python code may
    read the value, and the read becomes a guard. A read of any other value becomes a check in the graph.

    Args:
        effects: What the call being recorded does; cleared before each.
        uses_values: All tensors are real; what is known can't be told from their type.
        earlier: The tape of a first run of which this is the repetition.
    """

    def __init__(self, effects: EffectWatch, device: torch.device, *, uses_values: bool, earlier: Tape | None):
        self.graph = fx.Graph()
        self.guards: list[Guard] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.module_stack: list[tuple[str, int]] = []
        self.escapes = Escapes()
        self.table = TensorTable(device)
        self.made_by: dict[fx.Node, Site] = {}
        self.site: Site = (None, "")
        self._effects = effects
        self._device = device
        self._uses_values = uses_values
        self._earlier = earlier
        self._known: set[fx.Node] = set()
        self._from_inputs: set[fx.Node] = set()

    def bind_input(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Binds an input or constant; what is computed from such alone may be read by Python code."""
        self.table.bind(tensor, node)
        if not isinstance(tensor, FakeTensor):
            self._known.add(node)
            self._from_inputs.add(node)

    def bind_state(self, tensor: torch.Tensor, key: str) -> None:
        """Binds a parameter or buffer."""
        node = self.graph.create_node("get_attr", key, name=key.replace(".", "_"))
        self.table.bind(tensor, node)
        node.meta["key"] = key

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Returns the node of a tensor; one never seen before is a constant of the model."""
        node = self.table.node(tensor)
        if node is not None:
            return node
        origin = self.escapes.origin(tensor)
        if origin is not None:
            raise Obstacle(
                "uses a tensor made inside a module that runs its own code",
                "The tensor left the module by another way than the module's result.",
                "Return the tensor from the module.",
                remedy=RUN_AGAIN,
                place=user_line(),
                calls=origin[0],
                hooks=origin[1],
            )
        if self._earlier is not None and self._earlier.has_computed(tensor):
            refuse(
                "uses a tensor of an earlier call, kept in an attribute,",
                "A capture would use the tensor of the first call for ever.",
                "Keep it in a registered buffer, or pass it as an input.",
                remedy=RUN_AGAIN,
            )
        if tensor.requires_grad or isinstance(tensor, FakeTensor):
            refuse(
                f"uses a tensor {TensorSpec.of(tensor)} of unknown origin",
                "A capture knows only the inputs, the registered parameters and buffers, and tensors computed from "
                "these.",
                "Register it as a parameter or buffer, or detach it.",
            )
        key = f"constant.{len(self.constants)}"
        self.constants[key] = tensor
        with self.graph.inserting_before(self._first_call()):
            self.bind_state(tensor, key)
        self.bind_input(tensor, self.table.latest(tensor))
        return self.table.latest(tensor)

    def used(self, tensor: torch.Tensor) -> fx.Node:
        """Returns the node of a tensor that a call is about to use, or that the model returns.

        Raises:
            Obstacle: If the model's own run has given it a history that the graph doesn't know.
        """
        node = self.node_of(tensor)
        if node.meta["requires_grad"] != tensor.requires_grad:
            has_one = "has a history" if tensor.requires_grad else "has no history"
            raise Obstacle(
                f"uses a tensor {TensorSpec.of(tensor)} that {has_one} which no recorded call explains",
                "A graph must have the same gradients as the model's own run.",
                "Call custom Functions by their `apply`, inside a module of their own.",
                remedy=RUN_AGAIN,
                place=user_line(),
                calls=self.calls() or ("",),
            )
        return node

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor stems from inputs or state, rather than being the same at each call."""
        node = self.table.node(tensor)
        if node is None or (node in self._known and node.op == "get_attr"):
            return False
        return node not in self._known or node in self._from_inputs

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor depends on inputs and constants alone."""
        return self.node_of(tensor) in self._known

    def calls(self) -> tuple[str, ...]:
        """Names of the modules whose calls the running code is in, outermost first."""
        return tuple(name for name, _ in self.module_stack)

    def _first_call(self) -> fx.Node | None:
        return next((n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), None)

    def append(self, func: Any, args: Any, kwargs: Any, operands: list[fx.Node], result: Any) -> fx.Node:
        """Appends and returns the node of a call that ran, and binds the tensors in its result."""
        op, target = as_call(func)
        if is_property_get(func):
            op, target, args, kwargs = "call_function", getattr, (args[0], call_name(func)), {}
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        node = self.graph.create_node(op, target, tuple(node_args), dict(node_kwargs))
        node.meta.update(self._context(), is_random=self._effects.is_random)
        self._note_hidden_draws(node)
        if self._is_known(operands, result):
            self._known.add(node)
            if any(n in self._from_inputs for n in operands):
                self._from_inputs.add(node)
        self._bind_results(node, result)
        self._note_writes(node)
        if self._effects.is_value_dependent:
            self._fix_shapes(node, result)
        return node

    def append_equal(self, like: fx.Node, args: Any, kwargs: Any, autocast: Any) -> fx.Node:
        """Appends and returns the node of a call that isn't made, as it equals that of another node."""
        node = self.graph.create_node(like.op, like.target)
        node.args, node.kwargs = args, kwargs  # in `create_node`, fx looks for symbolic numbers among them
        node.meta.update(self._context(autocast), is_random=like.meta["is_random"])
        return node

    def append_part(self, node: fx.Node, index: int) -> fx.Node:
        """Appends and returns the node of one of several results of a call."""
        part = self.graph.call_function(getitem, (node, index))
        part.meta.update({k: node.meta[k] for k in ("modules", "source", "grad", "autocast")}, is_random=False)
        return part

    def append_opaque(
        self, opaque: Opaque, operands: list[fx.Node], results: Sequence[torch.Tensor], *, has_drawn: bool
    ) -> fx.Node:
        """Appends and returns the node of an opaque module; another step may draw where this one did not."""
        earlier = sum(isinstance(n.target, Opaque) and n.target.name == opaque.name for n in self.graph.nodes)
        node = self.graph.call_function(opaque, tuple(operands))
        node.meta.update(self._context(), is_random=True, modules=(*self.module_stack, (opaque.name, earlier)))
        if not has_drawn:
            node.meta["drew_nothing"] = True
        self._note_hidden_draws(node)
        self._bind_results(node, tuple(results))
        self._note_writes(node)
        return node

    def _note_hidden_draws(self, node: fx.Node) -> None:
        if self._effects.hides_draws:
            node.meta["hides_draws"] = True

    def append_observer(self, observer: Any, operands: list[fx.Node]) -> None:
        """Appends the node of a hook that only looks at its operands."""
        node = self.graph.call_function(observer, tuple(operands))
        node.meta.update(self._context(), is_random=False)

    def _is_known(self, operands: list[fx.Node], result: Any) -> bool:
        """Tells whether a result depends on inputs and constants alone."""
        if self._uses_values:
            return not self._effects.is_random and all(n in self._known for n in operands)
        return not any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(result))

    def _fix_shapes(self, node: fx.Node, result: Any) -> None:
        """Fixes the shapes of results that depend on values, and what stands for the call without them."""
        node.meta["results"] = pytree.tree_map_only(torch.Tensor, lambda t: TensorSpec.of(t, self._device), result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.fix("call_method", "size", (self.table.latest(tensor),), {}, tensor.size())

    def _context(self, autocast: Any = None) -> dict[str, Any]:
        return {
            "modules": tuple(self.module_stack),
            "source": self.site[0],
            "grad": torch.is_grad_enabled(),
            "autocast": autocast_state() if autocast is None else autocast,
        }

    def _bind_results(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._bind_one(result, node)
        elif isinstance(result, tuple | list):
            for index, item in enumerate(result):
                self._bind_item(node, index, item)

    def _bind_item(self, node: fx.Node, index: int, item: Any) -> None:
        if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(item)):
            return
        part = self.append_part(node, index)
        for group in (self._known, self._from_inputs):
            if node in group:
                group.add(part)
        self._bind_results(part, item)

    def _bind_one(self, tensor: torch.Tensor, node: fx.Node) -> None:
        known = self.table.node(tensor)
        is_written = any(t is tensor for t in self._effects.written)
        if known is not None and not is_written and known.meta["requires_grad"] == tensor.requires_grad:
            return  # the call gave back a tensor it was given (`x.to(x.dtype)`): nothing new was defined
        if node in self._known:
            self.made_by.setdefault(node, self.site)
        self.table.bind(tensor, node)

    def _note_writes(self, node: fx.Node) -> None:
        written: list[fx.Node] = []
        for storage in {storage_key(t) for t in self._effects.written}:
            for known, tensor in self.table.names(storage):
                if known is node or known in written:
                    continue
                known.meta["requires_grad"] |= tensor.requires_grad
                written.append(known)
        if written:
            node.meta["writes"] = tuple(written)
            if node not in self._known:
                self._known.difference_update(written)
                self._from_inputs.difference_update(written)

    def fix(self, op: str, target: Any, args: Any, kwargs: Any, expected: Any) -> None:
        """Makes a value part of what the capture assumes: checked before the step, or where the graph computes it."""
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        if all(n in self._known for n in operands):
            if any(n in self._from_inputs for n in operands):
                self.guards.append(Guard(op, target, args, kwargs, expected, self.site[0], len(self.graph.nodes)))
            return
        check = Expectation(op, target, expected, self.site[0], self.calls(), self._name_of(operands[0]))
        node = self.graph.call_function(check, tuple(args), dict(kwargs))
        node.meta.update(self._context(), is_random=False)

    def _name_of(self, node: fx.Node) -> str:
        """The name of the state that a node reads or has written, or else the node's own."""
        number = node.meta.get("storage")
        states = (n for n in self.graph.nodes if n.op == "get_attr" and n.meta["storage"] == number)
        return next((str(state.target) for state in states), node.name)
