"""The private names of torch: each is imported here and nowhere else (`tests/test_places.py`).

The names imported at the top are types and tables that every torch so far has with the same meaning. Numbers depend on
the other names. If this torch lacks one of them, the import succeeds: `torch_features.check_torch` refuses the torch
before the first capture, and so it does where a part on which numbers depend behaves differently. Private attributes of
a tensor, a module or an optimizer are read where they are needed; `tests/test_places.py` lists them with reasons.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import importlib
from operator import methodcaller
from typing import Any

import torch
from torch import autograd, nn
from torch._C import ScriptFunction, ScriptMethod
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.optim.optimizer import _global_optimizer_post_hooks as GLOBAL_POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as GLOBAL_PRE_HOOKS
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatrain.errors import TorchError

TESTED = "2.11 to 2.14"
"""The versions of torch that the tests run on, for errors."""
UNTESTED = "2.15.dev0"
"""The first version after those."""


class MissingError(Exception):
    """Stands for a name that this torch doesn't have: it may be caught or called."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Refuses the call.

        Raises:
            TorchError: Always.
        """
        raise unsupported(cls.name, "it doesn't exist")


def is_missing(found: object) -> bool:
    """Tells whether a name of this module is one that this torch doesn't have."""
    return isinstance(found, type) and issubclass(found, MissingError) and found is not MissingError


def unsupported(name: str, problem: str) -> TorchError:
    """Returns the error for a torch that can't be used."""
    return TorchError(
        f"torch {torch.__version__} can't be used: `{name}`, {problem}.\n"
        "  Gradients depend on this private part of torch, and there is no public way to it.\n"
        f"  Install a version that megatrain is tested with: {TESTED}."
    )


def _found(home: str, name: str) -> Any:
    try:
        owner: Any = importlib.import_module(home)
        for part in name.split("."):
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return type("MissingError", (MissingError,), {"name": f"{home}.{name}"})
    return owner


# What `.to()` and its like run on every module: a model must not be moved in mid-capture.
MODULE_APPLY = nn.Module._apply  # pyright: ignore[reportPrivateUsage]
# The operation of `.item()`, `float()` and `if tensor:`.
ITEM = torch.ops.aten._local_scalar_dense.default
# A look at an attribute of a custom Function asks this class: so calls of Functions are recorded.
function_class: Any = type(autograd.Function)
# `torch.vmap` calls `vmap_impl` in this module: so it becomes one node.
vmap_home: Any = _found("torch._functorch", "apis")
# Which of the user's function modes are active: a call of vmap is repeated under them.
function_modes = _found("torch.overrides", "_get_current_function_mode_stack")
# Which dispatch modes are active: they see calls, and launches of recordings are none.
dispatch_modes = _found("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack")
# How many there are, at little cost: a mode of the user's sees each call.
count_dispatch_modes = _found("torch", "_C._len_torch_dispatch_stack")
count_function_modes = _found("torch", "_C._len_torch_function_stack")
# No mode is asked where a stand-in for a tensor is made.
DisableTorchDispatch = _found("torch", "_C._DisableTorchDispatch")
# What `backward` and `torch.autograd.grad` call in the end, in this module: a capture notices backwards in a forward.
backward_home: Any = _found("torch", "autograd")
run_backward = _found("torch.autograd", "_engine_run_backward")
# In which order attention tries its kernels: recordings were made in one order.
attention_priority = _found("torch", "_C._get_sdp_priority_order")
# The kernels that were written in Python (`aten/mul.Tensor/CUDA`), and all kernels of an operator, as text with files:
# launches of recordings leave the Python of those of others out.
python_kernels = _found("torch.library", "_impls")
kernels_of_op = _found("torch", "_C._dispatch_dump")
# Updates run outside of the caller's function modes.
pop_function_mode = _found("torch.overrides", "_pop_mode_temporarily")
# Switches the recorder off around what it records by hand.
DisableTorchFunction = _found("torch", "_C.DisableTorchFunction")
# Tensors whose update is due are read without taking it again.
DisableTorchFunctionSubclass = _found("torch", "_C.DisableTorchFunctionSubclass")
# Inside a transform of torch.func no graph can name the tensors.
are_transforms_active = _found("torch", "_C._are_functorch_transforms_active")
# Whether hooks on saved tensors may change what a backward computes with.
top_saved_tensors_hooks = _found("torch", "_C._autograd._top_saved_tensors_default_hooks")
# Whether the running backward was called with `retain_graph`.
keeps_graph = _found("torch", "_C._autograd._get_current_graph_task_keep_graph")
# Whether the running backward wants the gradient of a node; raises RuntimeError if `torch.autograd.grad` asked for it.
will_execute_node = _found("torch", "_C._will_engine_execute_node")
# Whether this thread is one of autograd's own, in a backward; -1 outside of it.
current_graph_task = _found("torch", "_C._current_graph_task_id")
# Nodes of autograd's graph are numbered as they are made; the engine runs the latest first.
sequence_number = methodcaller("_sequence_nr")
# With `swap_tensors`: a parameter on meta gets memory and stays the same object.
make_subclass = _found("torch", "Tensor._make_subclass")
# A parameter's copy that the model's own code still views keeps its memory, and may be written into.
storage_use_count = _found("torch", "_C._storage_Use_Count")
# The storage of a weak reference; None if it is gone.
storage_of = _found("torch", "UntypedStorage._new_with_weak_ptr")
# Updates run outside of the caller's dispatch modes.
disable_current_modes = _found("torch.utils._python_dispatch", "_disable_current_modes")
# While a fake tensor's kernel runs, its thread sends ops on all tensors to meta kernels; these take that back.
preserve_dispatch_keys = _found("torch._C", "_PreserveDispatchKeyGuard")
send_to_meta_kernels = _found("torch._C", "_set_meta_in_tls_dispatch_include")
# A fake tensor says by these that only values can answer.
DataDependentOutputException = _found("torch._subclasses.fake_tensor", "DataDependentOutputException")
DynamicOutputShapeException = _found("torch._subclasses.fake_tensor", "DynamicOutputShapeException")
# A count of steps keeps its value among stand-ins.
unset_fake_temporarily = _found("torch._subclasses.fake_tensor", "unset_fake_temporarily")
# Code of C that is given a stand-in fails, rather than write to address 0.
forbid_memory = _found("torch", "_C._set_throw_on_mutable_data_ptr")
# Torch's own AdamW kernel: the bits of `AdamW(fused=True)`.
fused_adamw = _found("torch", "_fused_adamw_")
# The compiler of CUDA at run time, and what loads its kernels: each None if this torch has none, as only a kernel of
# ours needs it, without which the host makes all updates.
gpu_compiler: Any
load_gpu_kernels: Any
gpu_compiler, load_gpu_kernels = (
    None if is_missing(found) else found
    for found in (_found("torch.cuda._utils", name) for name in ("_get_gpu_rtc_library", "_cuda_load_module"))
)
# The backward of a softmax, into memory that is there.
log_softmax_backward = _found("torch", "ops.aten._log_softmax_backward_data.out")
# The norm of each of several tensors, as `clip_grad_norm_` takes them on a device; and copies in one call.
foreach_norm = _found("torch", "_foreach_norm")
foreach_copy = _found("torch", "_foreach_copy_")
# The order in which `clip_grad_norm_` combines norms of several dtypes.
group_by_dtype = _found("torch.utils._foreach_utils", "_group_tensors_by_device_and_dtype")
# Kernels in `torch.library.wrap_triton` call an operator that modes have no rule for, unless this says otherwise.
set_wrap_triton_enabled = _found("torch._library.triton", "set_wrap_triton_enabled")
# A backward that was compiled may write into what its forward has saved, unless this says otherwise.
patch_functorch = _found("torch._functorch.config", "patch")
