"""Small trials of torch's private parts: each tells whether one of them behaves as megatrain assumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from megatrain import torch_private
from megatrain.patches import original_of, replaced_here


def _leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 7


def functions_are_looked_up() -> bool:
    """Whether calls of Functions, looked up early or late, can be recorded."""
    kind, looked_up = torch_private.function_class, list[tuple[str, bool]]()
    find = original_of(kind, "__getattribute__")

    def look_up(function: Any, name: str) -> Any:
        if function is _Doubled:
            looked_up.append((name, torch.is_grad_enabled()))
            if looked_up[-1] == ("forward", False):
                return lambda ctx, x: x * 3  # pyright: ignore
        return find(function, name)

    early, x = _Doubled.apply, _leaf()
    with replaced_here(kind, "__getattribute__", look_up):
        result: Any = early(x)
        seen, looked_up = looked_up, []
        _Doubled.apply(x)
    result.sum().backward()
    is_ordered = seen.index(("_backward_cls", True)) < seen.index(("forward", False)) and "apply" not in dict(seen)
    trained = x.grad is not None and x.grad.tolist() == [7, 7] and result.tolist() == [3, 3]
    return is_ordered and trained and looked_up[0] == ("apply", True)


def vmap_can_be_replaced() -> bool:
    """Whether a replacement of `vmap_impl` gets every call of `torch.vmap`."""
    seen: list[Any] = []
    original = original_of(torch_private.vmap_home, "vmap_impl")

    def vmap(*args: Any, **kwargs: Any) -> Any:
        seen.append((callable(args[0]), *args[1:5], len(args)))
        return original(*args, **kwargs)

    def mapped(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.are_transforms_active())
        return x + 1

    with replaced_here(torch_private.vmap_home, "vmap_impl", vmap):
        result = torch.vmap(mapped)(torch.ones(2, 1))
    return seen == [(True, 0, 0, "error", None, 6), True] and result.tolist() == [[2], [2]]


def transforms_are_told() -> bool:
    """Whether no transform is active outside of one; that one is told inside, the trial of vmap sees."""
    return torch_private.are_transforms_active() is False


class _Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def modes_are_listed() -> bool:
    """Whether active function modes are listed, outermost first, and the innermost can be left."""
    with _Counting() as outer, _Counting() as inner:
        found = torch_private.function_modes()
        with torch_private.pop_function_mode():
            return found == [outer, inner] and torch_private.function_modes() == [outer]


def functions_can_be_disabled() -> bool:
    """Whether function modes can be switched off."""
    tensor = torch.ones(2)
    with _Counting() as mode:
        torch.add(tensor, 1)
        with torch_private.DisableTorchFunction():
            torch.add(tensor, 1)
    return mode.count == 1


def subclasses_can_be_disabled() -> bool:
    """Whether classes of tensors can be switched off, and modes stay on."""
    tensor = torch.ones(2).as_subclass(_Subclass)
    before = _Subclass.count
    with torch_private.DisableTorchFunctionSubclass(), _Counting() as mode:
        torch.add(tensor, 1)
    return _Subclass.count == before and mode.count == 1


def saved_hooks_are_told() -> bool:
    """Whether the innermost hooks on saved tensors are told."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = torch_private.top_saved_tensors_hooks(False)
    return torch_private.top_saved_tensors_hooks(False) is None and found[0] is pack


class _Asking(torch.autograd.Function):
    """Asks the engine in its backward, as a compiled call does."""

    nodes: tuple[Any, ...] = ()
    answers: list[Any] = []  # noqa: RUF012  # cleared by the only user, on one thread

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        row: list[Any] = [torch_private.keeps_graph()]
        for node in _Asking.nodes:
            try:
                row.append(torch_private.will_execute_node(node))
            except RuntimeError:
                row.append("captured")
        _Asking.answers.append(row)
        return grads[0], grads[0]


def _asked_in_backwards() -> list[list[Any]]:
    a, b = _leaf(), _leaf()
    _Asking.answers = []
    _Asking.nodes = tuple(torch.autograd.graph.get_gradient_edge(x).node for x in (a, b))
    results: list[Any] = [_Asking.apply(a, b) for _ in range(4)]
    results[0].sum().backward()
    results[1].sum().backward(retain_graph=True)
    results[2].sum().backward(inputs=[a])
    torch.autograd.grad(results[3].sum(), [a])
    _Asking.nodes = ()
    return _Asking.answers


def engine_tells_of_graphs() -> bool:
    """Whether a backward tells of `retain_graph`."""
    return [row[0] for row in _asked_in_backwards()] == [False, True, False, False]


def engine_tells_of_nodes() -> bool:
    """Whether a backward tells which gradients are wanted."""
    answers = [row[1:] for row in _asked_in_backwards()]
    return answers == [[True, True], [True, True], [True, False], ["captured", False]]


def graph_tasks_are_told() -> bool:
    """Whether a backward has a number, and nothing outside of it."""
    leaf, seen = torch.ones(1, requires_grad=True), list[int]()
    leaf.register_hook(lambda _: seen.append(torch_private.current_graph_task()))
    leaf.sum().backward()
    return torch_private.current_graph_task() == -1 and -1 not in seen


def meta_gets_memory() -> bool:
    """Whether a parameter on meta can get memory and keep its hooks."""
    parameter, seen = nn.Parameter(torch.empty(2, device="meta")), list[torch.Tensor]()
    parameter.register_hook(seen.append)
    hooks: Any = parameter._backward_hooks
    real = torch_private.make_subclass(nn.Parameter, torch.ones(2), True)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    parameter._backward_hooks = hooks
    (parameter * 2).sum().backward()
    is_right = parameter.is_leaf and parameter.grad is not None and parameter.grad.tolist() == [2, 2]
    return is_right and parameter.tolist() == [1, 1] and len(seen) == 1


def modes_can_be_disabled() -> bool:
    """Whether fake tensors can be left."""
    with FakeTensorMode(), torch_private.disable_current_modes():
        return not isinstance(torch.ones(1), FakeTensor)


def meta_kernels_can_be_left() -> bool:
    """Whether ops that are sent to meta kernels can be sent elsewhere for a while."""
    one = torch.ones(1)
    with torch_private.preserve_dispatch_keys():
        torch_private.send_to_meta_kernels(True)
        with torch_private.preserve_dispatch_keys():
            torch_private.send_to_meta_kernels(False)
            is_left = one.item() == 1
        try:
            one.item()
        except RuntimeError:
            return is_left
    return False


def fakes_tell_of_values() -> bool:
    """Whether a fake tensor refuses to be read."""
    with FakeTensorMode():
        try:
            torch.ones(1).item()
        except torch_private.DataDependentOutputException:
            return True
    return False


def fakes_tell_of_shapes() -> bool:
    """Whether a fake tensor refuses a result of unknown shape."""
    with FakeTensorMode():
        try:
            torch.ones(1).nonzero()
        except torch_private.DynamicOutputShapeException:
            return True
    return False


def fakes_can_be_left() -> bool:
    """Whether real tensors can be made among fake ones."""
    with FakeTensorMode(), torch_private.unset_fake_temporarily():
        return torch.ones(1).item() == 1


def memory_can_be_forbidden() -> bool:
    """Whether the address of a stand-in can be refused."""
    with FakeTensorMode():
        tensor = torch.empty(2)
    torch_private.forbid_memory(tensor)
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def fused_adamw_updates() -> bool:
    """Whether torch's kernel takes a step of AdamW."""

    def column(value: float) -> list[torch.Tensor]:
        return [torch.tensor([value])]

    values, gradients, mean, square = column(1.0), column(0.5), column(0.25), column(0.125)
    options: Any = {"lr": 0.1, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.5, "eps": 0.0, "amsgrad": False}
    torch_private.fused_adamw(values, gradients, mean, square, [], [torch.tensor(2.0)], maximize=False, **options)
    # exp_avg = 0.375, exp_avg_sq = 0.15625; corrected by 1 - 0.5**2 and 1 - 0.75**2.
    expected = 0.95 - 0.1 * (0.375 / 0.75) / (0.15625 / 0.4375) ** 0.5
    return abs(values[0].item() - expected) < 1e-6 and mean[0].item() == 0.375 and square[0].item() == 0.15625


def norms_are_grouped() -> bool:
    """Whether tensors are grouped by dtype, with their places."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    groups = torch_private.group_by_dtype([[torch.empty(0, dtype=d) for d in dtypes]], with_indices=True)
    return sorted(indices for _, indices in groups.values()) == [[0, 2], [1]]


def writes_are_counted() -> bool:
    """Whether a write through a view shows in the version of the whole."""
    tensor = torch.ones(2)
    view, before = tensor[:1], tensor._version
    view.add_(1)
    keys = {t.untyped_storage()._cdata for t in (tensor, view)}  # pyright: ignore[reportPrivateUsage]
    return tensor._version > before and len(keys) == 1


def memory_is_told() -> bool:
    """Whether a view of a tensor shows in the count of its memory, and the end of the last in a weak reference."""
    tensor = torch.ones(2)
    weak, view = torch_private.StorageWeakRef(tensor.untyped_storage()), tensor[:1]
    viewed, address = torch_private.storage_use_count(weak.cdata), tensor.data_ptr()
    del view
    alone, found = torch_private.storage_use_count(weak.cdata), torch_private.storage_of(weak.cdata).data_ptr()
    del tensor
    return viewed == alone + 1 and found == address and weak.expired()


def nodes_are_numbered() -> bool:
    """Whether a node of autograd that was made later has the larger number."""
    with torch.enable_grad():
        first = torch.ones(2, requires_grad=True) * 2
        later = first * 2
    return torch_private.sequence_number(later.grad_fn) > torch_private.sequence_number(first.grad_fn)


def draws_are_tagged() -> bool:
    """Whether operations that draw random numbers say so."""
    aten = torch.ops.aten
    drawing: tuple[Any, ...] = (
        aten.rand.default, aten.randn.default, aten.randint.default, aten.randperm.default, aten.bernoulli_.float,
        aten.native_dropout.default, aten.normal_.default, aten.uniform_.default, aten.multinomial.default,
    )  # fmt: skip
    return all(torch.Tag.nondeterministic_seeded in op.tags for op in drawing)


def calls_of_modules_can_be_replaced() -> bool:
    """Whether each call of a module goes through `__call__` of `nn.Module`."""
    module, seen = nn.Identity(), list[Any]()
    original = original_of(nn.Module, "__call__")

    def call(called: nn.Module, *args: Any) -> Any:
        seen.append(called)
        return original(called, *args)

    with replaced_here(nn.Module, "__call__", call):
        module(1)
    return seen == [module]
