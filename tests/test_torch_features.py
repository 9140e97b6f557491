"""A torch whose private parts are missing, or do something else, is refused by name before anything is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.base import torch_features, torch_private
from megatrain.errors import TorchError, UntestedTorchWarning
from megatrain.optim.blockwise import BlockOptimizer


class Unused:
    """Another module in the place of one whose function torch calls."""

    @staticmethod
    def vmap_impl(*args: Any) -> None:
        """Never called."""


class Fixed(torch.nn.Identity):
    """A module whose calls aren't those of all modules."""

    def __call__(self, x: Any) -> Any:
        return x


# What stands in the place of each name, doing something else.
BROKEN: dict[str, Any] = {
    "function_class": type("Other", (type,), {}),
    "vmap_home": Unused,
    "are_transforms_active": lambda: True,
    "patch_functorch": lambda **_: nullcontext(),
    "top_saved_tensors_hooks": lambda _: None,
    "keeps_graph": lambda: False,
    "will_execute_node": lambda _: True,
    "make_subclass": lambda kind, data, _: data.clone(),
    "attention_priority": list,
    "python_kernels": set[str](),
    "kernels_of_op": lambda _: "",
    "fused_adamw": lambda *args, **kwargs: args[0][0].mul_(0.9),
    "group_by_dtype": lambda tensors, with_indices: {0: (tensors, [0, 1, 2])},
    "log_softmax_backward": lambda grad, output, dim, dtype, out: out.copy_(grad),
    "storage_use_count": lambda _: 1,
    "storage_of": lambda _: None,
    "sequence_number": lambda _: 0,
}
PUBLIC: dict[str, tuple[Any, Any]] = {
    "_version": (torch.Tensor, 0),
    "Tag": (torch, type("Tag", (), {"nondeterministic_seeded": object()})),
    "Identity": (torch.nn, Fixed),
}


@pytest.mark.parametrize("name", [*BROKEN, *PUBLIC])
def test_a_part_that_does_something_else_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    home, broken = PUBLIC[name] if name in PUBLIC else (torch_private, BROKEN[name])
    monkeypatch.setattr(home, name, broken)
    with pytest.raises(TorchError, match=r"torch \S+ can't be used: `\S+`, which must .*(doesn't|fails)") as caught:
        torch_features.check_features()
    assert "2.11 to 2.14" in str(caught.value)


@pytest.mark.parametrize("name", ["keeps_graph", "disable_current_modes", "DataDependentOutputException"])
def test_a_missing_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_private, name, torch_private._found("torch", "_C.gone"))
    with pytest.raises(TorchError, match=r"can't be used: `torch\._C\.gone`, it doesn't exist"):
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
        with pytest.raises(TorchError, match="_will_engine_execute_node"):
            use(torch.nn.Linear(2, 2))


def test_torch_is_tried_once_and_a_newer_one_is_named_once(monkeypatch: pytest.MonkeyPatch):
    tried = list[bool]()
    monkeypatch.setattr(torch_features, "_tried", tried)
    monkeypatch.setattr(torch_private, "UNTESTED", "2.10")
    said = r"^torch \S+ is newer than those that megatrain is tested with: 2.11 to 2.14\.$"
    with pytest.warns(UntestedTorchWarning, match=said):
        torch_features.check_torch()
    torch_features.check_torch()  # warnings are errors here
    assert tried == [True]


def test_no_other_module_imports_a_private_part_on_which_numbers_depend():
    private = "_top_saved_tensors_default_hooks _will_engine_execute_node _fused_adamw_ _make_subclass torch._functorch"
    own = {"torch_private.py", "torch_features.py"}
    files = [path for path in Path(torch_private.__file__).parents[1].rglob("*.py") if path.name not in own]
    assert [(path, name) for path in files for name in private.split() if name in path.read_text()] == []
