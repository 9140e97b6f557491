"""Records every torch call of a running forward as a node of one fx graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from megatrain.errors import TraceError
from megatrain.tracer.guards import Guard, is_metadata_read
from megatrain.tracer.source import user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.targets import as_call, call_name, is_property_get, is_property_set
from megatrain.tracer.watch import EffectWatch, storage_key

_RECORDED_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class MakeFakeError(Exception):
    """A real tensor got fake contents; the capture starts again with the output of this call fake."""

    def __init__(self, call_number: int):
        super().__init__(call_number)
        self.call_number = call_number


class Recorder(TorchFunctionMode):
    """Runs each torch call with itself switched off and appends what it saw to `graph`.

    Tensors map to nodes by identity, so whatever road a tensor takes through the user's Python (hooks,
    attributes, dicts, closures) it is still known. State is fake. What depends on inputs and constants alone
    is computed for real, so that Python code may read it; what was read becomes a guard.
    """

    def __init__(self, fake_mode: FakeTensorMode, originals: dict[int, torch.Tensor], make_fake: set[int]):
        super().__init__()
        self.graph = fx.Graph()
        self.guards: list[Guard] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.module_stack: list[tuple[str, int]] = []
        self.effects = EffectWatch()
        self.is_recording = False
        self._fake_mode = fake_mode
        self._originals = originals
        self._make_fake = make_fake
        self._calls = 0
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._made_by: dict[int, int] = {}
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
        """Binds an input of the model; what is computed from it alone may be read by Python code."""
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
        if tensor.requires_grad or isinstance(tensor, FakeTensor):
            raise TraceError(
                f"a tensor {TensorSpec.of(tensor)} appears from nowhere at {user_line()}.\n"
                "  A capture knows the inputs, the registered parameters and buffers, and what is computed from them.\n"
                "  Register it as a parameter or buffer, or detach it."
            )
        key = f"constant.{len(self.constants)}"
        self.constants[key] = tensor
        with self.graph.inserting_before(self._first_call()):
            self.bind_state(tensor, key)
        return self._nodes[id(tensor)]

    def _first_call(self) -> fx.Node | None:
        return next((n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switches the mode off around a call that is recorded by hand."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            yield

    # -- recording ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_recording or (is_property_get(func) and call_name(func) not in _RECORDED_PROPERTIES):
            return func(*args, **kwargs)
        self._calls += 1
        return self.record(func, args, kwargs)

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call and appends its node; used directly for calls that no mode can see."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: self._originals.get(id(t), t), (args, kwargs)
        )
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if is_property_set(func):
            raise TraceError(
                f"the model assigns to `.{call_name(func)}` of a tensor at {user_line()}.\n"
                "  A capture sees calls, not assignments behind autograd's back.\n"
                "  Use an in-place operation under torch.no_grad()."
            )
        result = self._run(func, args, kwargs, operands)
        has_tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
        if has_tensors or self.effects.written:
            result = self._append(func, args, kwargs, operands, result)
        elif not is_metadata_read(call_name(func)):
            self._guard(func, args, kwargs, operands, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        is_fake = any(isinstance(x, FakeTensor) for x in operands) or self._calls in self._make_fake
        self.effects.clear()
        self.is_recording = True
        try:
            if not is_fake:
                with self.effects:
                    return func(*args, **kwargs)
            with self._fake_mode, self.effects:
                result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                f"the model reads the value of a tensor at {user_line()} (`{call_name(func)}`).\n"
                "  The tensor depends on weights or random numbers, so the plan can't be fixed before the step.\n"
                "  Use torch.where or masking instead of a Python branch."
            ) from error
        finally:
            self.is_recording = False
        for tensor in self.effects.written:
            if not isinstance(tensor, FakeTensor):
                self._refuse_real_write(tensor)
        return result

    def _refuse_real_write(self, tensor: torch.Tensor) -> None:
        for node, known in self._by_storage.get(self._storages.get(storage_key(tensor), -1), []):
            if id(known) in self._made_by:
                raise MakeFakeError(self._made_by[id(known)])
            if node.op == "placeholder":
                self._refuse_input_write(node)

    def _refuse_input_write(self, node: fx.Node) -> None:
        raise TraceError(
            f"the model writes into its input `{node.name}` in place at {user_line()}.\n"
            "  Inputs belong to the caller.\n  Clone the input first."
        )

    def _append(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], result: Any) -> Any:
        op, target = as_call(func)
        if op == "call_function" and is_property_get(func):
            target, args, kwargs = getattr, (args[0], call_name(func)), {}
        if op == "call_method" and is_property_get(func):
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
        return result

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _context(self) -> dict[str, Any]:
        devices = ["cpu", torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else ["cpu"]
        autocast = tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))
        return {
            "modules": tuple(self.module_stack),
            "source": user_line(),
            "grad": torch.is_grad_enabled(),
            "autocast": autocast,
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
        is_written = any(t is tensor for t in self.effects.written)
        if id(tensor) in self._nodes and not is_written:
            return  # the call gave back a tensor it was given (`x.to(x.dtype)`): nothing new was defined
        if is_real:
            self._made_by.setdefault(id(tensor), self._calls)
        self.bind(tensor, node)

    def _note_writes(self, node: fx.Node) -> None:
        written: list[fx.Node] = []
        for storage in {storage_key(t) for t in self.effects.written}:
            for known, tensor in self._by_storage.get(self._storages.get(storage, -1), []):
                if known is node or known in written:
                    continue
                if known.op == "placeholder":
                    self._refuse_input_write(known)
                known.meta["requires_grad"] |= tensor.requires_grad
                written.append(known)
        if written:
            node.meta["writes"] = tuple(written)

    def _guard(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], result: Any) -> None:
        nodes = [self._nodes.get(id(x)) for x in operands]
        if any(n in self._from_inputs for n in nodes):
            node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
            op, target = as_call(func)
            self.guards.append(Guard(op, target, node_args, node_kwargs, result, user_line()))

