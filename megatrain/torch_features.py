"""Tries the behaviour of torch's private parts, once a process, before anything is captured."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from megatrain import torch_private
from megatrain import torch_probes as probes
from megatrain.errors import TorchError


@dataclass(frozen=True, slots=True)
class Feature:
    """A behaviour that torch must have.

    Args:
        name: The private name, for the error.
        does: The behaviour, for the error.
        works: Tries it.
    """

    name: str
    does: str
    works: Callable[[], bool]


_lock = threading.Lock()
_tried: list[bool] = []


def check_torch() -> None:
    """Tries all features at the first call in a process.

    Raises:
        TorchError: If one fails, at each call.
    """
    with _lock:
        if not _tried:
            check_features()
            _tried.append(True)


def check_features() -> None:
    """Tries all features now, on a new thread, where no mode of the caller is active.

    Raises:
        TorchError: If one fails.
    """
    failed: list[TorchError] = []

    def run() -> None:
        for feature in FEATURES:
            problem = _problem(feature)
            if problem is not None:
                failed.append(torch_private.unsupported(feature.name, problem))
                return

    _make_first_fakes()
    thread = threading.Thread(target=run, name="torch features")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


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
        with FakeTensorMode():
            made.set()
        never.wait()

    threading.Thread(target=run, name="megatrain: first fake tensors", daemon=True).start()
    made.wait()


def _problem(feature: Feature) -> str | None:
    try:
        return None if feature.works() else f"which must {feature.does}, doesn't"
    except Exception as error:  # any error of an unknown torch is a reason to refuse this torch
        return f"which must {feature.does}, fails ({type(error).__name__}: {error})"


def _donation_can_be_forbidden() -> bool:
    """Whether a setting of compiled backwards holds in a body alone."""
    config: Any = importlib.import_module("torch._functorch.config")
    before = config.donated_buffer
    with torch_private.patch_functorch(donated_buffer=not before):
        is_set = config.donated_buffer is not before
    return is_set and config.donated_buffer is before


def _kernels_can_stay_unwrapped() -> bool:
    """Whether kernels of Triton stay as they are in a body alone."""
    home: Any = importlib.import_module("torch._library.triton")
    before = home.is_wrap_triton_enabled()
    with torch_private.set_wrap_triton_enabled(False):
        is_wrapped = home.is_wrap_triton_enabled()
    return not is_wrapped and home.is_wrap_triton_enabled() == before


def _softmaxes_work_in_place() -> bool:
    """Whether log-probabilities, and gradients of logits, can be written over what they are made of."""
    logits = torch.arange(66.0).view(2, 33).sin().requires_grad_()
    expected = torch.log_softmax(logits, -1)
    marks = torch.eye(33)[:2]
    (gradient,) = torch.autograd.grad(expected, logits, marks)
    memory = logits.detach().clone()
    torch.log_softmax(memory, -1, out=memory)  # pyright: ignore[reportCallIssue]  # the stubs lack `out`
    are_equal = torch.equal(memory, expected)
    torch_private.log_softmax_backward(marks, memory, -1, memory.dtype, out=memory)
    return are_equal and torch.equal(memory, gradient)


def _priorities_are_told() -> bool:
    """Whether attention tells in which order it tries its kernels."""
    before = list(torch_private.attention_priority())
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return list(torch_private.attention_priority()) != before


def _python_kernels_are_told() -> bool:
    """Whether a kernel that Python gives to an operator is listed, with its file."""
    library = torch.library.Library("megatrain_probe", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x, "CPU")
    kernels = torch_private.kernels_of_op("megatrain_probe::f").splitlines()
    is_named = "megatrain_probe/f/CPU" in torch_private.python_kernels
    return is_named and any(line.startswith("CPU: ") and f" {__file__}:" in line for line in kernels)


def _dispatch_modes_are_listed() -> bool:
    """Whether active dispatch modes are listed."""
    with FakeTensorMode() as mode:
        return torch_private.dispatch_modes() == [mode]


FEATURES: tuple[Feature, ...] = (
    Feature("autograd.Function.apply", "look a Function's methods up in its class", probes.functions_are_looked_up),
    Feature("torch._functorch.apis.vmap_impl", "run every call of torch.vmap", probes.vmap_can_be_replaced),
    Feature("torch._C._are_functorch_transforms_active", "be False outside of transforms", probes.transforms_are_told),
    Feature("torch.overrides._get_current_function_mode_stack", "list modes, outermost first", probes.modes_are_listed),
    Feature("torch.overrides._pop_mode_temporarily", "leave the innermost mode", probes.modes_are_listed),
    Feature("torch._C.DisableTorchFunction", "switch function modes off", probes.functions_can_be_disabled),
    Feature(
        "torch._C.DisableTorchFunctionSubclass",
        "switch only tensor classes off",
        probes.subclasses_can_be_disabled,
    ),
    Feature("torch._C._autograd._top_saved_tensors_default_hooks", "return the hooks", probes.saved_hooks_are_told),
    Feature(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "tell retain_graph",
        probes.engine_tells_of_graphs,
    ),
    Feature("torch._C._will_engine_execute_node", "tell which gradients are wanted", probes.engine_tells_of_nodes),
    Feature("torch._C._current_graph_task_id", "number the backward of a thread", probes.graph_tasks_are_told),
    Feature("torch.Tensor._make_subclass", "give memory to a parameter on meta", probes.meta_gets_memory),
    Feature("torch.utils._python_dispatch._disable_current_modes", "leave fake tensors", probes.modes_can_be_disabled),
    Feature("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "list modes", _dispatch_modes_are_listed),
    Feature("torch._C._get_sdp_priority_order", "list kernels of attention", _priorities_are_told),
    Feature("torch.library._impls", "name kernels in Python", _python_kernels_are_told),
    Feature("torch._C._dispatch_dump", "name the files of kernels", _python_kernels_are_told),
    Feature("torch._C._PreserveDispatchKeyGuard", "end a change of kernels", probes.meta_kernels_can_be_left),
    Feature("torch._C._set_meta_in_tls_dispatch_include", "leave meta kernels", probes.meta_kernels_can_be_left),
    Feature("fake_tensor.DataDependentOutputException", "be raised for a value", probes.fakes_tell_of_values),
    Feature("fake_tensor.DynamicOutputShapeException", "be raised for a shape", probes.fakes_tell_of_shapes),
    Feature("fake_tensor.unset_fake_temporarily", "make real tensors", probes.fakes_can_be_left),
    Feature("torch._C._set_throw_on_mutable_data_ptr", "make data_ptr() raise", probes.memory_can_be_forbidden),
    Feature("torch._fused_adamw_", "take a step of AdamW", probes.fused_adamw_updates),
    Feature(
        "torch.ops.aten._log_softmax_backward_data",
        "write a gradient over log-probabilities",
        _softmaxes_work_in_place,
    ),
    Feature("_foreach_utils._group_tensors_by_device_and_dtype", "group by dtype", probes.norms_are_grouped),
    Feature("torch._functorch.config.patch", "set donated_buffer for a time", _donation_can_be_forbidden),
    Feature("torch._library.triton.set_wrap_triton_enabled", "give kernels unwrapped", _kernels_can_stay_unwrapped),
    Feature("torch.Tensor._version", "count writes into all views of a memory", probes.writes_are_counted),
    Feature("torch._C._storage_Use_Count", "count what looks at a memory", probes.memory_is_told),
    Feature("torch.autograd.graph.Node._sequence_nr", "number nodes as they are made", probes.nodes_are_numbered),
    Feature("torch.Tag.nondeterministic_seeded", "mark operations that draw", probes.draws_are_tagged),
    Feature("torch.nn.Module.__call__", "be what a call of a module runs", probes.calls_of_modules_can_be_replaced),
)
