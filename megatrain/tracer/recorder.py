"""Records every torch call of a running forward as a node of one fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain.tracer.guards import PLAIN, Guard, is_metadata_read
from megatrain.tracer.modes import autocast_state
from megatrain.tracer.refusals import call_on_fakes, check_call, refuse, refuse_kept, refuse_read, refuse_unknown
from megatrain.tracer.restart import MakeFakeError, Site
from megatrain.tracer.source import user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.targets import as_call, call_name, is_property_get
from megatrain.tracer.watch import EffectWatch, storage_key

_RECORDED_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}


# Calls that hand the contents of a tensor to Python and that fake tensors answer with errors of their own.
_VALUE_READS = {"numpy", "__array__", "__dlpack__", "__format__"}


class Recorder(TorchFunctionMode):
    """Runs each torch call with itself switched off and appends what it saw to `graph`.

    Tensors map to nodes by identity, so whatever road a tensor takes through the user's Python (hooks,
    attributes, dicts, closures) it is still known. State is fake. What depends on inputs and constants alone
    is computed for real, so that Python code may read it; what was read becomes a guard.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        originals: dict[int, torch.Tensor],
        make_fake: set[Site],
        earlier: Recorder | None = None,
    ):
        super().__init__()
        self.graph = fx.Graph()
        self.guards: list[Guard] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.module_stack: list[tuple[str, int]] = []
        self.effects = EffectWatch(self._check_read, self._check_write)
        self.is_recording = False
        self._fake_mode = fake_mode
        self._originals = originals
        self._make_fake = make_fake
        self._earlier = earlier
        self._site: Site = (None, "")
        self._operands: set[int] = set()
        self._reads_graph = False
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._made_by: dict[int, Site] = {}
        self._from_inputs: set[fx.Node] = set()
        self._storages: dict[int, int] = {}
        self._by_storage: dict[int, list[tuple[fx.Node, torch.Tensor]]] = {}

    # -- binding tensors to nodes -------------------------------------------------------------------------

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Makes `node` the latest definition of `tensor`."""
        storage = self._storages.setdefault(storage_key(tensor), len(self._storages))
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        self._by_storage.setdefault(storage, []).append((node, tensor))
        node.meta.update(
            spec=TensorSpec.of(tensor),
            requires_grad=tensor.requires_grad,
            storage=storage,
            storage_bytes=tensor.untyped_storage().nbytes(),
        )

    def bind_input(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Binds an input or constant; what is computed from such alone may be read by Python code."""
        self.bind(tensor, node)
        if not isinstance(tensor, FakeTensor):
            self._from_inputs.add(node)

    def bind_state(self, tensor: torch.Tensor, key: str) -> None:
        """Binds a parameter or buffer."""
        node = self.graph.get_attr(key.replace(".", "_"))
        node.target = key
        self.bind(tensor, node)
        node.meta["key"] = key

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Returns the node of a tensor; one never seen before is a constant of the model."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if self._earlier is not None and self._earlier.has_computed(tensor):
            refuse_kept()
        if tensor.requires_grad or isinstance(tensor, FakeTensor):
            refuse_unknown(tensor)
        key = f"constant.{len(self.constants)}"
        self.constants[key] = tensor
        with self.graph.inserting_before(self._first_call()):
            self.bind_state(tensor, key)
        self._from_inputs.add(self._nodes[id(tensor)])
        return self._nodes[id(tensor)]

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor stems from inputs or state, rather than being the same at each call."""
        node = self._nodes.get(id(tensor))
        return node is not None and (isinstance(tensor, FakeTensor) or node in self._from_inputs)

    def _first_call(self) -> fx.Node | None:
        return next((n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), None)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Switches the mode off around a call that is recorded by hand."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            yield

    # -- recording ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        if self.is_recording or (is_property_get(func) and name not in _RECORDED_PROPERTIES):
            if not self.is_recording:
                check_call(func, kwargs)
            return func(*args, **kwargs)
        return self.record(func, args, kwargs)

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call and appends its node; used directly for calls that no mode can see."""
        args, kwargs = self._as_recorded(args, kwargs)
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._site = (user_line(), call_name(func))
        check_call(func, kwargs)
        result = self._run(func, args, kwargs, operands)
        has_tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
        if has_tensors or self.effects.written:
            result = self._append(func, args, kwargs, operands, result)
        elif not is_metadata_read(call_name(func)):
            self._guard(func, args, kwargs, operands, result)
        return result

    def _as_recorded(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Puts fake state where real state stands, and the integers that tensors stand for inside slices."""

        def recorded(x: Any) -> Any:
            if isinstance(x, slice):
                bounds = (x.start, x.stop, x.step)
                return slice(*(self._index(b) if isinstance(b, torch.Tensor) else b for b in bounds))
            return self._originals.get(id(x), x) if isinstance(x, torch.Tensor) else x

        return pytree.tree_map(recorded, (args, kwargs))

    def _index(self, tensor: torch.Tensor) -> int:
        return self.record(torch.Tensor.__index__, (tensor,), {})

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        has_fakes = any(isinstance(x, FakeTensor) for x in operands)
        if has_fakes and self._site[1] in _VALUE_READS:
            refuse_read(*self._site)
        if not is_metadata_read(self._site[1]):
            for operand in operands:
                self.node_of(operand)
        self._operands = {storage_key(x) for x in operands if x.layout == torch.strided}
        # A backward reads what the graph behind its arguments saved.
        self._reads_graph = func is torch.autograd.grad
        self.effects.clear()
        self.is_recording = True
        try:
            if not has_fakes and self._site not in self._make_fake:
                with self.effects:
                    return func(*args, **kwargs)
            with self._fake_mode, self.effects:
                return call_on_fakes(func, args, kwargs, *self._site)
        except (DataDependentOutputException, DynamicOutputShapeException):
            refuse_read(*self._site)
        finally:
            self.is_recording = False

    def _check_read(self, tensor: torch.Tensor) -> None:
        storage = storage_key(tensor)
        if storage in self._storages and storage not in self._operands and not self._reads_graph:
            refuse(
                f"reads a tensor inside `{self._site[1]}` that isn't among its arguments",
                "What a call reads must be visible in the graph; this would become a constant.",
                "Pass the tensor as an argument.",
            )

    def _check_write(self, tensor: torch.Tensor) -> None:
        for node, known in self._by_storage.get(self._storages.get(storage_key(tensor), -1), []):
            if node.op == "placeholder":
                refuse(
                    f"writes into its input `{node.name}` in place",
                    "Inputs belong to the caller.",
                    "Clone the input first.",
                )
            if isinstance(known, FakeTensor):
                continue
            if node.op == "get_attr":
                refuse(
                    "writes into a tensor that is neither a parameter nor a buffer",
                    "Only buffers are written back after a step.",
                    "Register the tensor with register_buffer.",
                )
            if id(known) in self._made_by:
                raise MakeFakeError(self._made_by[id(known)])

    def _append(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], result: Any) -> Any:
        op, target = as_call(func)
        if is_property_get(func):
            op, target, args, kwargs = "call_function", getattr, (args[0], call_name(func)), {}
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        node = self.graph.create_node(op, target, tuple(node_args), dict(node_kwargs))
        node.meta.update(self._context())
        node.meta["is_random"] = self.effects.is_random
        is_real = not any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(result))
        if is_real and self.effects.is_random:
            result = pytree.tree_map_only(torch.Tensor, self._as_fake, result)
            is_real = False
        if is_real and any(self._nodes.get(id(x)) in self._from_inputs for x in operands):
            self._from_inputs.add(node)
        self._bind_results(node, result, is_real)
        self._note_writes(node)
        if is_real and self.effects.is_value_dependent:
            self._guard_shapes(node, result)
        return result

    def _guard_shapes(self, node: fx.Node, result: Any) -> None:
        """Fixes the shapes of results that depend on values, and what stands for the call without them."""
        node.meta["results"] = pytree.tree_map_only(torch.Tensor, TensorSpec.of, result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._nodes[id(tensor)] in self._from_inputs:
                made = (self._nodes[id(tensor)],)
                self.guards.append(Guard("call_method", "size", made, {}, tensor.size(), self._site[0]))

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        self.is_recording = True
        try:
            with self._fake_mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        finally:
            self.is_recording = False

    def _context(self) -> dict[str, Any]:
        return {
            "modules": tuple(self.module_stack),
            "source": self._site[0],
            "grad": torch.is_grad_enabled(),
            "autocast": autocast_state(),
        }

    def _bind_results(self, node: fx.Node, result: Any, is_real: bool) -> None:
        if isinstance(result, torch.Tensor):
            self._bind_one(result, node, is_real)
        elif isinstance(result, tuple | list):
            for index, item in enumerate(result):
                self._bind_item(node, index, item, is_real)

    def _bind_item(self, node: fx.Node, index: int, item: Any, is_real: bool) -> None:
        if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(item)):
            return
        part = self.graph.call_function(getitem, (node, index))
        part.meta.update({k: node.meta[k] for k in ("modules", "source", "grad", "autocast")}, is_random=False)
        if node in self._from_inputs:
            self._from_inputs.add(part)
        self._bind_results(part, item, is_real)

    def _bind_one(self, tensor: torch.Tensor, node: fx.Node, is_real: bool) -> None:
        known = self._nodes.get(id(tensor))
        is_written = any(t is tensor for t in self.effects.written)
        if known is not None and not is_written and known.meta["requires_grad"] == tensor.requires_grad:
            return  # the call gave back a tensor it was given (`x.to(x.dtype)`): nothing new was defined
        if is_real:
            self._made_by.setdefault(id(tensor), self._site)
        self.bind(tensor, node)

    def _note_writes(self, node: fx.Node) -> None:
        written: list[fx.Node] = []
        for storage in {storage_key(t) for t in self.effects.written}:
            for known, tensor in self._by_storage.get(self._storages.get(storage, -1), []):
                if known is node or known in written:
                    continue
                known.meta["requires_grad"] |= tensor.requires_grad
                written.append(known)
        if written:
            node.meta["writes"] = tuple(written)

    def _guard(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], result: Any) -> None:
        nodes = [self._nodes.get(id(x)) for x in operands]
        if operands and not all(isinstance(x, PLAIN) for x in pytree.tree_leaves(result)):
            refuse(
                f"calls `{self._site[1]}`, which returns neither tensors nor plain values",
                "Its effect is invisible, so no graph can repeat it.",
                "Do it outside the forward.",
            )
        if any(n in self._from_inputs for n in nodes):
            node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
            op, target = as_call(func)
            # The user may go on to change the list or array that was read.
            expected = copy.deepcopy(result)
            self.guards.append(Guard(op, target, node_args, node_kwargs, expected, self._site[0]))
