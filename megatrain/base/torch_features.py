"""Tries the private parts of torch on which numbers depend, once a process, before anything is captured."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from megatrain.base import torch_private as private
from megatrain.base.patches import original_of, replaced_here
from megatrain.errors import TorchError, UntestedTorchWarning

_lock = threading.Lock()
_tried: list[bool] = []


def check_torch() -> None:
    """Tries torch at the first call in a process, and warns of one that is newer than the tested ones.

    Raises:
        TorchError: If a part is missing or does something else, at each call.
    """
    with _lock:
        if not _tried:
            check_features()
            _tried.append(True)
            if TorchVersion(torch.__version__) >= private.UNTESTED:
                text = f"torch {torch.__version__} is newer than those that megatrain is tested with"
                warnings.warn(f"{text}: {private.TESTED}.", UntestedTorchWarning, stacklevel=2)


def check_features() -> None:
    """Tries all parts now, on a new thread, where no mode of the caller is active.

    Raises:
        TorchError: If one is missing or does something else.
    """
    missing = [found for found in vars(private).values() if private.is_missing(found)]
    if missing:
        raise private.unsupported(missing[0].name, "it doesn't exist")
    failed: list[TorchError] = []

    def run() -> None:
        for name, does, works in _PROBES:
            problem = _problem(does, works)
            if problem is not None:
                failed.append(private.unsupported(name, problem))
                return

    _make_first_fakes()
    thread = threading.Thread(target=run, name="torch features")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _problem(does: str, works: Callable[[], bool]) -> str | None:
    try:
        return None if works() else f"which must {does}, doesn't"
    except Exception as error:  # any error of an unknown torch is a reason to refuse this torch
        return f"which must {does}, fails ({type(error).__name__}: {error})"


@cache
def _make_first_fakes() -> None:
    """Enters a fake mode on a thread that never ends, for torch 2.11 with CUDA and no device.

    This torch keeps a part of the first thread that enters one, and crashes once that thread has ended; see pull
    request 178950 of pytorch.
    """
    if TorchVersion(torch.__version__) >= "2.12" or not torch.backends.cuda.is_built():
        return
    made, never = threading.Event(), threading.Event()

    def run() -> None:
        with private.FakeTensorMode():
            made.set()
        never.wait()

    threading.Thread(target=run, name="megatrain: first fake tensors", daemon=True).start()
    made.wait()


class _Asking(torch.autograd.Function):
    """Doubles; its backward asks the engine, as a compiled call does, and returns another gradient than autograd's."""

    nodes: tuple[Any, ...] = ()
    answers: list[Any] = []  # noqa: RUF012  # cleared by the only user, on one thread

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        row: list[Any] = [private.keeps_graph()]
        for node in _Asking.nodes:
            try:
                row.append(private.will_execute_node(node))
            except RuntimeError:
                row.append("captured")
        _Asking.answers.append(row)
        return grads[0] * 7, grads[0]


def _leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _functions_are_looked_up() -> bool:
    kind, looked_up = private.function_class, list[tuple[str, bool]]()
    find = original_of(kind, "__getattribute__")

    def look_up(function: Any, name: str) -> Any:
        if function is _Asking:
            looked_up.append((name, torch.is_grad_enabled()))
            if looked_up[-1] == ("forward", False):
                return lambda ctx, a, b: a * 3  # pyright: ignore
        return find(function, name)

    early, a = _Asking.apply, _leaf()
    with replaced_here(kind, "__getattribute__", look_up):
        result: Any = early(a, torch.ones(2))
        seen, looked_up = looked_up, []
        _Asking.apply(a, a)
    result.sum().backward()
    is_ordered = seen.index(("_backward_cls", True)) < seen.index(("forward", False)) and "apply" not in dict(seen)
    trained = a.grad is not None and a.grad.tolist() == [7, 7] and result.tolist() == [3, 3]
    return is_ordered and trained and looked_up[0] == ("apply", True)


def _engine_tells() -> bool:
    a, b = _leaf(), _leaf()
    _Asking.answers = []
    _Asking.nodes = tuple(torch.autograd.graph.get_gradient_edge(x).node for x in (a, b))
    results: list[Any] = [_Asking.apply(a, b) for _ in range(4)]
    results[0].sum().backward()
    results[1].sum().backward(retain_graph=True)
    results[2].sum().backward(inputs=[a])
    torch.autograd.grad(results[3].sum(), [a])
    _Asking.nodes = ()
    answers = [[False, True, True], [True, True, True], [False, True, False], [False, "captured", False]]
    return _Asking.answers == answers


def _vmap_can_be_replaced() -> bool:
    seen, original = list[Any](), original_of(private.vmap_home, "vmap_impl")

    def vmap(*args: Any, **kwargs: Any) -> Any:
        seen.append((callable(args[0]), *args[1:5], len(args)))
        return original(*args, **kwargs)

    def mapped(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.are_transforms_active())
        return x + 1

    with replaced_here(private.vmap_home, "vmap_impl", vmap):
        result = torch.vmap(mapped)(torch.ones(2, 1))
    is_told = seen == [(True, 0, 0, "error", None, 6), True] and not private.are_transforms_active()
    return is_told and result.tolist() == [[2], [2]]


def _backwards_are_noticed() -> bool:
    seen, original = list[bool](), original_of(private.backward_home, "_engine_run_backward")

    def run(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return original(*args, **kwargs)

    a = _leaf()
    with replaced_here(private.backward_home, "_engine_run_backward", run):
        (a * 2).sum().backward()
        torch.autograd.grad((a * 2).sum(), [a])
    return len(seen) == 2


def _saved_hooks_are_told() -> bool:
    def pack(tensor: torch.Tensor) -> Any:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = private.top_saved_tensors_hooks(False)
    return private.top_saved_tensors_hooks(False) is None and found[0] is pack


def _meta_gets_memory() -> bool:
    parameter, seen = nn.Parameter(torch.empty(2, device="meta")), list[torch.Tensor]()
    parameter.register_hook(seen.append)
    hooks: Any = parameter._backward_hooks
    real = private.make_subclass(nn.Parameter, torch.ones(2), True)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    parameter._backward_hooks = hooks
    (parameter * 2).sum().backward()
    is_right = parameter.is_leaf and parameter.grad is not None and parameter.grad.tolist() == [2, 2]
    return is_right and parameter.tolist() == [1, 1] and len(seen) == 1


def _fused_adamw_updates() -> bool:
    values, gradients, mean, square = ([torch.tensor([value])] for value in (1.0, 0.5, 0.25, 0.125))
    options: Any = {"lr": 0.1, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.5, "eps": 0.0, "amsgrad": False}
    private.fused_adamw(values, gradients, mean, square, [], [torch.tensor(2.0)], maximize=False, **options)
    # exp_avg = 0.375, exp_avg_sq = 0.15625; corrected by 1 - 0.5**2 and 1 - 0.75**2.
    expected = 0.95 - 0.1 * (0.375 / 0.75) / (0.15625 / 0.4375) ** 0.5
    return abs(values[0].item() - expected) < 1e-6 and mean[0].item() == 0.375 and square[0].item() == 0.15625


def _softmaxes_work_in_place() -> bool:
    logits = torch.arange(66.0).view(2, 33).sin().requires_grad_()
    expected, marks = torch.log_softmax(logits, -1), torch.eye(33)[:2]
    (gradient,) = torch.autograd.grad(expected, logits, marks)
    memory = logits.detach().clone()
    torch.log_softmax(memory, -1, out=memory)  # pyright: ignore[reportCallIssue]  # the stubs lack `out`
    are_equal = torch.equal(memory, expected)
    private.log_softmax_backward(marks, memory, -1, memory.dtype, out=memory)
    return are_equal and torch.equal(memory, gradient)


def _norms_are_grouped() -> bool:
    tensors = [torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    groups = private.group_by_dtype([tensors], with_indices=True)
    return sorted(indices for _, indices in groups.values()) == [[0, 2], [1]]


def _writes_are_counted() -> bool:
    tensor = torch.ones(2)
    view, before = tensor[:1], tensor._version
    view.add_(1)
    return tensor._version > before


def _memory_is_told() -> bool:
    tensor = torch.ones(2)
    weak, view = private.StorageWeakRef(tensor.untyped_storage()), tensor[:1]
    viewed, address = private.storage_use_count(weak.cdata), tensor.data_ptr()
    del view
    alone, found = private.storage_use_count(weak.cdata), private.storage_of(weak.cdata).data_ptr()
    del tensor
    return viewed == alone + 1 and found == address and weak.expired()


def _nodes_are_numbered() -> bool:
    first = _leaf() * 2
    return private.sequence_number((first * 2).grad_fn) > private.sequence_number(first.grad_fn)


def _draws_are_tagged() -> bool:
    names = "rand randn randint randperm native_dropout normal_ uniform_ multinomial".split()
    drawing = [getattr(torch.ops.aten, name).default for name in names]
    return all(torch.Tag.nondeterministic_seeded in op.tags for op in (*drawing, torch.ops.aten.bernoulli_.float))


def _calls_of_modules_can_be_replaced() -> bool:
    module, seen, original = nn.Identity(), list[Any](), original_of(nn.Module, "__call__")

    def call(called: nn.Module, *args: Any) -> Any:
        seen.append(called)
        return original(called, *args)

    with replaced_here(nn.Module, "__call__", call):
        module(1)
    return seen == [module]


def _donation_can_be_forbidden() -> bool:
    config: Any = importlib.import_module("torch._functorch.config")
    before = config.donated_buffer
    with private.patch_functorch(donated_buffer=not before):
        is_set = config.donated_buffer is not before
    return is_set and config.donated_buffer is before


def _priorities_are_told() -> bool:
    before = list(private.attention_priority())
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return list(private.attention_priority()) != before


def _python_kernels_are_told() -> bool:
    library = torch.library.Library("megatrain_probe", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x, "CPU")
    kernels = private.kernels_of_op("megatrain_probe::f").splitlines()
    is_named = "megatrain_probe/f/CPU" in private.python_kernels
    return is_named and any(line.startswith("CPU: ") and f" {__file__}:" in line for line in kernels)


_PROBES: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    ("autograd.Function.apply", "look a Function's methods up in its class", _functions_are_looked_up),
    ("torch._functorch.apis.vmap_impl", "run every call of torch.vmap", _vmap_can_be_replaced),
    ("torch.autograd._engine_run_backward", "run every backward", _backwards_are_noticed),
    ("torch._C._autograd._top_saved_tensors_default_hooks", "return the hooks", _saved_hooks_are_told),
    ("torch._C._will_engine_execute_node", "tell of the running backward, as `keep_graph`", _engine_tells),
    ("torch.Tensor._make_subclass", "give memory to a parameter on meta", _meta_gets_memory),
    ("torch._C._get_sdp_priority_order", "list kernels of attention", _priorities_are_told),
    ("torch._C._dispatch_dump", "name the files of kernels in Python", _python_kernels_are_told),
    ("torch._fused_adamw_", "take a step of AdamW", _fused_adamw_updates),
    ("torch.ops.aten._log_softmax_backward_data", "write over log-probabilities", _softmaxes_work_in_place),
    ("_foreach_utils._group_tensors_by_device_and_dtype", "group by dtype", _norms_are_grouped),
    ("torch._functorch.config.patch", "set donated_buffer for a time", _donation_can_be_forbidden),
    ("torch.Tensor._version", "count writes into all views of a memory", _writes_are_counted),
    ("torch._C._storage_Use_Count", "count what looks at a memory", _memory_is_told),
    ("torch.autograd.graph.Node._sequence_nr", "number nodes as they are made", _nodes_are_numbered),
    ("torch.Tag.nondeterministic_seeded", "mark operations that draw", _draws_are_tagged),
    ("torch.nn.Module.__call__", "be what a call of a module runs", _calls_of_modules_can_be_replaced),
)
"""The private name, the behaviour that it must have, and a trial of the behaviour."""
