"""A torch whose private parts are missing, or do something else, is refused by name before anything is captured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import megatrain
from megatrain import torch_features, torch_private
from megatrain.errors import TorchError
from megatrain.optim.blockwise import BlockOptimizer


class Unused:
    """Another module in the place of one whose function torch calls."""

    @staticmethod
    def vmap_impl(*args: Any) -> None:
        """Never called."""


class Other(type):
    """Another class in the place of that of Functions."""


@contextmanager
def _nothing_raised(*_: Any) -> Any:
    yield


# What stands in the place of each name, doing something else.
BROKEN: dict[str, Any] = {
    "function_class": Other,
    "vmap_home": Unused,
    "function_modes": lambda: torch.overrides._get_current_function_mode_stack()[::-1],
    "patch_functorch": lambda **_: nullcontext(),
    "pop_function_mode": nullcontext,
    "DisableTorchFunction": nullcontext,
    "DisableTorchFunctionSubclass": nullcontext,
    "are_transforms_active": lambda: True,
    "top_saved_tensors_hooks": lambda _: None,
    "keeps_graph": lambda: False,
    "will_execute_node": lambda _: True,
    "current_graph_task": lambda: -1,
    "make_subclass": lambda kind, data, _: data.clone(),
    "disable_current_modes": nullcontext,
    "dispatch_modes": list,
    "attention_priority": list,
    "python_kernels": set[str](),
    "kernels_of_op": lambda _: "",
    "preserve_dispatch_keys": nullcontext,
    "send_to_meta_kernels": lambda _: None,
    "set_wrap_triton_enabled": nullcontext,
    "DataDependentOutputException": KeyError,
    "DynamicOutputShapeException": KeyError,
    "unset_fake_temporarily": nullcontext,
    "forbid_memory": lambda _: None,
    "fused_adamw": lambda *args, **kwargs: args[0][0].mul_(0.9),
    "group_by_dtype": lambda tensors, with_indices: {0: (tensors, [0, 1, 2])},
    "log_softmax_backward": lambda grad, output, dim, dtype, out: out.copy_(grad),
    "storage_use_count": lambda _: 1,
    "storage_of": lambda _: None,
    "sequence_number": lambda _: 0,
}
# Imported outright, or no names of torch.
OTHERS = {
    *(
        "FakeTensor",
        "FakeTensorMode",
        "GLOBAL_POST_HOOKS",
        "DropoutNd",
        "GLOBAL_PRE_HOOKS",
        "ITEM",
        "MODULE_APPLY",
        "pytree",
    ),
    *(
        "ScriptFunction",
        "ScriptMethod",
        "StorageWeakRef",
        "TorchDispatchMode",
        "disable_fake_tensor_cache",
        "is_traceable_wrapper_subclass",
    ),
    *(
        "MissingError",
        "TESTED",
        "unsupported",
        "Any",
        "TorchError",
        "annotations",
        "autograd",
        "importlib",
        "methodcaller",
        "nn",
        "torch",
    ),
}
NAMES = sorted(name for name in vars(torch_private) if name not in OTHERS and not name.startswith("_"))


def test_every_private_name_has_a_test():
    assert sorted(BROKEN) == NAMES


def test_this_torch_has_all_features():
    torch_features.check_features()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_does_something_else_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_private, name, BROKEN[name])
    with pytest.raises(TorchError, match=r"torch \S+ can't be used: `\S+`, which must .*(doesn't|fails)") as caught:
        torch_features.check_features()
    assert "2.11 to 2.14" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_private, name, torch_private._found("torch", f"_C.gone_{name}"))
    with pytest.raises(TorchError, match="can't be used"):
        torch_features.check_features()


def _writes_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_version", 0)


def _draws_untagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Tag", type("Tag", (), {"nondeterministic_seeded": object()}))


def _calls_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(torch.nn.Identity):
        def __call__(self, x: Any) -> Any:
            return x

    monkeypatch.setattr(torch.nn, "Identity", Fixed)


@pytest.mark.parametrize("break_it", [_writes_uncounted, _draws_untagged, _calls_fixed])
def test_public_ways_on_which_numbers_depend_are_tried_too(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    break_it(monkeypatch)
    with pytest.raises(TorchError, match="can't be used"):
        torch_features.check_features()


def _train(model: torch.nn.Module) -> object:
    return BlockOptimizer(torch.optim.SGD(model.parameters()), [list(model.parameters())])


@pytest.mark.parametrize(
    "use",
    [
        lambda model: megatrain.trace(model, (torch.ones(1, 2),)),
        lambda model: megatrain.compile(model, device="cpu")(torch.ones(1, 2)),
        lambda model: megatrain.plan(model, torch.ones(1, 2)),
        lambda model: megatrain.verify(model, torch.ones(1, 2)),
        _train,
    ],
)
def test_every_road_to_a_step_tries_torch_first(use: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_features, "_tried", [])
    monkeypatch.setattr(torch_private, "keeps_graph", lambda: True)
    for _ in range(2):
        with pytest.raises(TorchError, match="_get_current_graph_task_keep_graph"):
            use(torch.nn.Linear(2, 2))


def test_torch_is_tried_once():
    torch_features.check_torch()
    assert torch_features._tried == [True]


def test_modes_of_the_caller_change_nothing():
    with torch.inference_mode(), torch.device("meta"), torch.autograd.graph.save_on_cpu():
        torch_features.check_features()


def test_random_numbers_go_on():
    before = torch.get_rng_state()
    torch_features.check_features()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.wide
def test_a_missing_name_breaks_no_import():
    code = """
import torch, torch.overrides, torch.autograd
del torch._C._set_throw_on_mutable_data_ptr, torch._fused_adamw_, torch._C._will_engine_execute_node
import megatrain
try:
    megatrain.trace(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
except megatrain.TorchError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "`torch._C._will_engine_execute_node`" in result.stdout
    assert "doesn't exist" in result.stdout


def test_no_other_module_has_a_private_name_of_the_list():
    import pathlib

    root = pathlib.Path(torch_private.__file__).parent
    private = [
        "_set_throw_on_mutable_data_ptr",
        "_top_saved_tensors_default_hooks",
        "_get_current_graph_task_keep_graph",
        "_will_engine_execute_node",
        "_get_current_function_mode_stack",
        "_fused_adamw_",
        "_make_subclass",
        "_SingleLevelFunction",
        "_FunctionBase",
        "_group_tensors_by_device_and_dtype",
        "_disable_current_modes",
        "_are_functorch_transforms_active",
        "torch._functorch",
    ]
    own = {"torch_private.py", "torch_probes.py", "torch_features.py"}
    texts = {p: p.read_text() for p in root.rglob("*.py") if p.name not in own}
    assert [(p.name, name) for p, text in texts.items() for name in private if name in text] == []


def test_a_thread_that_traces_first_may_end():
    """Torch 2.11 with CUDA and no device crashed in the second round."""
    program = """
import threading, torch, megatrain
def train():
    model = megatrain.compile(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
    model(torch.ones(2, 4)).sum().backward()
first = threading.Thread(target=train)
first.start()
first.join()
kept = [bytearray(200) for _ in range(10000)]  # over the memory of what ended with the thread
train()
print("trained")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.strip()) == (0, "trained"), found.stderr
