"""CompiledModule: the result of `compile`; it can stand in for the model, and its calls stream."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from megatrain.base.checks import instance_of
from megatrain.device import is_on_host, is_same_kind
from megatrain.errors import ExecuteError, OptionError
from megatrain.tracer.source_line import StandIn, original, runs_own_code
from megatrain.training.compiled.inside import Compiled
from megatrain.training.compiled.walking import run_here, walks_here

NAMES = (
    "traced",
    "program",
    "schedule",
    "guards",
    "recompiled_because",
    "peak_bytes",
    "dump",
    "masters",
    "master_state_dict",
    "prepare",
    "load_weights",
    "has_unread_weights",
)
"""What can be read from a compiled model besides the model's own attributes, which come first."""


class CompiledModule(StandIn):
    """A model whose calls run on a static schedule, with its state in host memory; made by `compile`.

    It is an instance of the model's class, and has the model's own `__dict__`: attributes, parameters, modules, hooks
    and modes are the model's, and a change through either object is seen by both. Only the call differs: a call of the
    compiled model streams, while a call of the model itself stays eager, on the host. Copies and pickles are those of
    the plain model.

    `megatrain` is the `Compiled` object behind it. The names in `NAMES` can be read directly, unless the model has an
    attribute of the same name.
    """

    __slots__ = ("_megatrain", "_megatrain_run")

    if TYPE_CHECKING:
        traced: Any
        program: Any
        schedule: Any
        guards: str
        recompiled_because: tuple[str, ...]
        peak_bytes: int
        dump: Callable[..., Any]
        masters: Any
        master_state_dict: Callable[[], Mapping[str, Any]]
        prepare: Callable[..., Any]
        load_weights: Callable[[], None]
        has_unread_weights: bool

    def __init__(self) -> None:
        raise TypeError("a CompiledModule is made by megatrain.compile(model)")

    @property
    def megatrain(self) -> Compiled:
        """The captures, schedules and engine of this model."""
        return self._megatrain

    @property
    def __original__(self) -> nn.Module:
        return object.__getattribute__(self, "_megatrain").model  # past the hook that records what a forward reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, its hooks included; see `Compiled.__call__`."""
        if runs_own_code():
            raise ExecuteError(
                "a compiled model was called in the forward of a compiled model.\n"
                "  One call runs one schedule, and a schedule can't contain another.\n"
                "  Call the plain model in that forward, and compile only the outermost model."
            )
        model = self._megatrain.model
        return model(*args, **kwargs) if walks_here(model) else self._megatrain_run(self._megatrain, args, kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `state_dict`, after all due updates."""
        self._megatrain.complete_updates()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `load_state_dict`, which sets masters exactly; the next call streams the new values."""
        with self._megatrain.loading():
            return super().load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in NAMES:
                return getattr(self._megatrain, name)
            raise

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES, "megatrain"})

    def __repr__(self) -> str:
        """The model's own text: a module or a log that contains a compiled model shows the tree of its modules."""
        return repr(self.__original__)

    def __str__(self) -> str:
        """The text for `print`: options and captures, then the model's own text."""
        return f"{self._megatrain}\n{self.__original__}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.__original__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as the plain model, so that reading it back needs no megatrain.
        return operator.getitem, ((self.__original__,), 0)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> CompiledModule:
        """The method behind `.to()`, `.cuda()`, `.half()`: nothing moves, as the parameters stay on the host.

        Raises:
            ExecuteError: If it would change a dtype, move the model to a device that it doesn't compute on, or put it
                into shared memory.
        """
        everything = [*self.parameters(), *self.buffers()]
        tensors = {(t.dtype, t.dim()): t for t in everything}
        probes = [torch.zeros([2] * dim, dtype=dtype) for dtype, dim in tensors]
        results = [fn(probe) for probe in probes]
        for probe, result in zip(probes, results, strict=True):
            _check_stays(probe, result, self._megatrain.options.device.torch_device)
        # A mere copy, such as to a host that has a number (cpu:0), stays out: it would take the masters' low halves.
        is_new = any(t.is_meta for t in everything)
        moves = [is_on_host(r) and r is not p for p, r in zip(probes, results, strict=True)]
        formats = [p.stride() != r.stride() for p, r in zip(probes, results, strict=True)]
        if any(move and (is_new or format) for move, format in zip(moves, formats, strict=True)):
            self.__original__._apply(fn, recurse)
        return self


def _check_stays(probe: torch.Tensor, result: torch.Tensor, device: torch.device) -> None:
    if result.dtype != probe.dtype:
        raise ExecuteError(
            f"the compiled model can't be converted from {probe.dtype} to {result.dtype}.\n"
            "  Dtypes are fixed when the model is compiled.\n"
            "  Convert the plain model first, then compile it."
        )
    if not is_on_host(result) and not is_same_kind(result.device, device):
        is_meta = result.is_meta
        way = "megatrain.plan takes plain models" if is_meta else "Compile the plain model with device="
        way += " on meta" if is_meta else f'"{result.device}"'
        raise ExecuteError(
            f"the compiled model can't be moved to {result.device}: it computes on {device}.\n"
            "  Its parameters stay in host memory, on any compute device.\n"
            f"  {way}."
        )
    if is_on_host(result) and result.is_shared():
        raise ExecuteError(
            "the compiled model can't be put into shared memory.\n"
            "  Its parameters are in the host store, which belongs to one process.\n"
            "  Share the plain model, and compile it in each process."
        )


GENERATE = "generate"
"""The method of a model that makes its own sequences, call by call."""
COMPILED = instance_of(CompiledModule, "a model that megatrain.compile made", "megatrain.compile(model)")


class _Forward:
    """The attribute `forward` of a compiled model: every call of it streams, even after it is replaced.

    If a tool replaces `forward` by its own function, a capture runs this function, and it is streamed.
    """

    def __init__(self, forward: Callable[..., Any]):
        @functools.wraps(forward)
        def streamed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(module, CompiledModule) or _runs_plain(module):
                return forward(original(module), *args, **kwargs)
            return _call_through(module, None, args, kwargs)

        self._streamed = streamed

    def __get__(self, module: CompiledModule | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return self._streamed
        replaced = vars(module).get("forward")
        function = self._streamed if replaced is None else _standing_for(replaced)
        return types.MethodType(function, module)

    def __set__(self, module: CompiledModule, value: Any) -> None:
        if isinstance(value, types.MethodType) and value.__self__ is module:
            value = types.MethodType(value.__func__, module.__original__)  # as if it were set on the plain model
        vars(module)["forward"] = value

    def __delete__(self, module: CompiledModule) -> None:
        if "forward" not in vars(module):
            raise AttributeError("forward")
        del vars(module)["forward"]


def _runs_plain(module: CompiledModule) -> bool:
    """Whether a call means the model's own method, because it comes from the model's own code."""
    return runs_own_code() or walks_here(module.__original__)


def _standing_for(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that streams a call of a model whose `forward` was replaced."""

    @functools.wraps(replaced)
    def streamed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, CompiledModule) or _runs_plain(module):
            return replaced(*args, **kwargs)
        return _call_through(module, replaced, args, kwargs)

    own = inspect.signature(replaced)
    module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    names = [p.replace(name=f"{p.name}_") if p.name == "module" else p for p in own.parameters.values()]
    setattr(streamed, "__signature__", own.replace(parameters=[module, *names]))  # noqa: B010  # unknown to pyright
    return streamed


def _walked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of the model a walk: it calls parts of the model by themselves, and others with caches."""

    @functools.wraps(method)
    def walked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, CompiledModule) or _runs_plain(module):
            return method(original(module), *args, **kwargs)
        return module.megatrain.walked(f"{GENERATE}()", functools.partial(method, original(module)), args, kwargs)

    return walked


def _call_through(module: CompiledModule, expected: Any, args: Any, kwargs: Any) -> Any:
    """Streams a call of `forward` itself, if that is what a call of the model runs."""
    model = module.__original__
    if vars(model).get("forward") is not expected:
        raise ExecuteError(
            "this `forward` of the compiled model was replaced by another.\n"
            "  A schedule is made from a call of the model itself.\n"
            "  Call the compiled model itself, or put this `forward` back in place."
        )
    if model._forward_hooks or model._forward_pre_hooks:
        raise ExecuteError(
            "`forward` was called on a compiled model that has forward hooks.\n"
            "  In eager, a direct call of `forward` skips the hooks; a schedule runs them.\n"
            "  Call the compiled model itself, or remove the hooks."
        )
    return module(*args, **kwargs)


@functools.cache
def _left_alone() -> Callable[[Compiled, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns `run_here`, which torch's compiler leaves alone: inside it would make other graphs than the schedule's.

    To say so imports that compiler, which takes a second, so that it waits for the first compiled model.
    """
    return cast(Any, torch.compiler.disable)(run_here)


_CLASSES: weakref.WeakValueDictionary[int, type[CompiledModule]] = weakref.WeakValueDictionary()
"""By the id of the model's class, which the made class keeps alive."""


def compiled_module(compiled: Compiled) -> CompiledModule:
    """Makes the object that stands in for the model.

    Raises:
        OptionError: If no subclass of the model's class can be made.
    """
    module = object.__new__(_class_of(type(compiled.model)))
    object.__setattr__(module, "__dict__", vars(compiled.model))
    object.__setattr__(module, "_megatrain", compiled)
    object.__setattr__(module, "_megatrain_run", _left_alone())
    return module


def _class_of(kind: type[nn.Module]) -> type[CompiledModule]:
    known = _CLASSES.get(id(kind))
    if known is not None:
        return known
    content: dict[str, Any] = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__new__": lambda _, *args, **kwargs: kind(*args, **kwargs),  # `type(compiled)(config)` means a plain model
        "forward": _Forward(kind.forward),
    }
    if callable(getattr(kind, GENERATE, None)):
        content[GENERATE] = _walked(getattr(kind, GENERATE))
    if hasattr(kind, "__del__"):
        content["__del__"] = lambda _: None  # the model's own runs when the model goes
    try:
        made = types.new_class(kind.__name__, (CompiledModule, kind), exec_body=lambda body: body.update(content))
    except TypeError as error:
        raise OptionError(
            f"a {kind.__qualname__} can't be compiled: {error}.\n"
            "  A compiled model is an instance of a class derived from the model's own.\n"
            "  Put the model into a module of your own, and compile your module."
        ) from error
    found = _CLASSES[id(kind)] = cast(type[CompiledModule], made)
    return found
