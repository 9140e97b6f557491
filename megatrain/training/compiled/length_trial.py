"""The trial of `lengths=`: does what a model makes of its real tokens depend on the padding after them?

The model's own code runs on a few tokens, without padding and with two different ones. If outputs, losses and buffers
are the same functions of the weights, so are their gradients, so none is computed. A branch that is multiplied by
zeros (a gate, an adapter's second matrix) would hide what it does: the trial is repeated with other numbers in place of
parameters of zeros. Only repeated, because large biases would hide what differs between tokens. Dropout draws a number
for each token, padding included, so it's left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.base.torch_private import pytree
from megatrain.tracer.arguments import Structure
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.user_dicts import opened
from megatrain.training.compiled.padding import Axes, Sizes, cut

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative to the largest value: kernels round otherwise for another number of rows. The second padding is as long as
the rows themselves, so that what counts tokens changes by half."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """What a run of the model's own code left.

    Args:
        result: As returned.
        tensors: In the result, in the order in which a capture has them.
        written: Buffers that it wrote, by name.
        precision: The coarsest dtype that it computed in.
    """

    result: Any
    tensors: Sequence[torch.Tensor]
    written: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    precision: torch.dtype = torch.float32

    def name(self, index: int) -> str:
        """Names an output: by its key, if the result has some."""
        found = opened(self.result)
        for path, leaf in pytree.tree_flatten_with_path(found)[0]:
            if leaf is self.tensors[index] and path:
                return f"its output `{'.'.join(str(getattr(k, 'key', getattr(k, 'idx', k))) for k in path)}`"
        return "its output" if len(self.tensors) == 1 else f"its output {index}"

    @property
    def plain(self) -> list[Any]:
        """Numbers and texts of Python in the result."""
        return [leaf for leaf in pytree.tree_leaves(opened(self.result)) if isinstance(leaf, int | float | str)]


def run_own_code(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    walk: AbstractContextManager[object],
    *,
    replaces: bool,
) -> OwnRun:
    """Runs a model's own code for a trial. Attributes and buffers are put back; generators are the caller's matter.

    Args:
        model: The user's; its state is there.
        args: Positional arguments.
        kwargs: Keyword arguments.
        device: Where it computes.
        walk: Has the model's code find the state there.
        replaces: Whether parameters of zeros are replaced.
    """
    trial = _Trial(zeros(model) if replaces else (), device)
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    saved, written = Snapshot(model), dict[str, torch.Tensor]()
    try:
        with walk, torch.no_grad(), trial:
            result = model(*args, **kwargs)
        tensors = Structure.of(result).placeholders
        now = dict(model.named_buffers())
        for name, (_, value) in before.items():
            if name in now and not _is_same_bits(now[name], value):
                written[name] = now[name].detach().clone()
    finally:
        saved.restore()
        with torch.no_grad():
            for buffer, value in before.values():
                if not _is_same_bits(buffer, value):
                    buffer.copy_(value)
    dtypes = {p.dtype for p in model.parameters() if p.dtype in _TOLERANCES}
    return OwnRun(result, tensors, written, max(dtypes, key=lambda dtype: _TOLERANCES[dtype], default=torch.float32))


def _is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


class _Trial(TorchFunctionMode):
    """Leaves out dropout, and has random numbers in place of some parameters.

    Args:
        replaced: These.
        device: Where others are expected.
    """

    def __init__(self, replaced: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self._others = {
            id(p): torch.randn(p.shape, generator=generator).mul_(_scale(p)).to(device, p.dtype) for p in replaced
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if self._others:
            args, kwargs = pytree.tree_map(lambda value: self._others.get(id(value), value), (args, kwargs))
        return func(*args, **kwargs)


def zeros(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of which all elements are zero."""
    return [p for p in model.parameters() if type(p) is nn.Parameter and p.is_floating_point() and _is_zero(p)]


def _scale(parameter: torch.Tensor) -> float:
    """So that a product with it is neither large nor small."""
    return parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5


def _is_zero(parameter: torch.Tensor) -> bool:
    with torch.no_grad():
        values = parameter.detach()
        # Of most parameters a few values tell.
        return values.numel() > 0 and not values.reshape(-1)[:64].any().item() and not values.any().item()


def grown_axes(
    plain: OwnRun, padded: Sequence[OwnRun], sizes: Sizes, added: Sequence[Mapping[str, int]]
) -> list[Axes] | str:
    """Finds the dimensions of outputs that are longer by the padding.

    Args:
        plain: Without padding.
        padded: With paddings of different lengths.
        sizes: Without padding.
        added: The lengths, by prefix.

    Returns:
        For each output; or why that can't be said.
    """
    found: list[Axes] = []
    for index, tensor in enumerate(plain.tensors):
        others = [each.tensors[index : index + 1] for each in padded if len(each.tensors) == len(plain.tensors)]
        if len(others) < len(padded) or any(each.dim() != tensor.dim() for (each,) in others):
            return "it returns other tensors for a padded batch"
        axes = list[tuple[int, str, bool]]()
        for dim, size in enumerate(tensor.shape):
            more = [each.shape[dim] - size for (each,) in others]
            if not any(more):
                continue
            prefixes = [p for p in sizes if more == [counts[p] for counts in added]]
            if len(prefixes) > 1:
                prefixes = [p for p in prefixes if sizes[p][1] == size]
            is_flat = not prefixes
            for each, (rows, length) in sizes.items() if is_flat else ():
                if size == rows * length and more == [rows * counts[each] for counts in added]:
                    prefixes.append(each)
            if len(prefixes) != 1:
                shapes = f"{list(tensor.shape)}, and {list(others[-1][0].shape)} with {max(added[-1].values())} tokens"
                return f"{plain.name(index)} has the shape {shapes} of padding"
            axes.append((dim, prefixes[0], is_flat))
        found.append(tuple(axes))
    return found


def difference(
    plain: OwnRun, padded: OwnRun, axes: Sequence[Axes], sizes: Sizes, added: Mapping[str, int]
) -> str | None:
    """Says what is different with padding; None if nothing is."""
    if padded.plain != plain.plain:
        return "a number of Python in its result is another one"
    if padded.written.keys() != plain.written.keys():
        return f"it writes other buffers ({', '.join(padded.written.keys() ^ plain.written.keys())})"
    for index, (tensor, other) in enumerate(zip(plain.tensors, padded.tensors, strict=True)):
        if not _is_near(tensor, cut(other, axes[index], sizes, added), padded.precision):
            return f"{plain.name(index)} is another one for the same real tokens"
    for name, value in plain.written.items():
        if not _is_near(value, padded.written[name], padded.precision):
            return f"it writes its buffer `{name}` with other values"
    return None


def _first(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tensor[tuple(slice(0, size) for size in shape)]


def _is_near(one: torch.Tensor, other: torch.Tensor, precision: torch.dtype) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = max(_TOLERANCES[precision], _TOLERANCES.get(one.dtype, 0.0))
    left, right = one.double(), other.double()
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()) or not torch.equal(left.isnan(), right.isnan()):
        return False
    if not finite.any():
        return True
    left, right = left[finite], right[finite]
    return bool((left - right).abs().max() <= tolerance * left.abs().max())


def first_module(model: nn.Module, plain: Callable[[], OwnRun], padded: Callable[[], OwnRun]) -> str:
    """Names the first module whose output differs, to end a sentence; empty if none does, or a run fails."""
    try:
        with _outputs(model) as one:
            precision = plain().precision
        with _outputs(model) as other:
            padded()
    except Exception:  # the reason is known already: this only says where
        return ""
    for (name, kind, tensor), (_, _, longer) in zip(one, other, strict=False):
        is_longer = all(long >= short for long, short in zip(longer.shape, tensor.shape, strict=False))
        if tensor.dim() != longer.dim() or not is_longer:
            return ""
        if not _is_near(tensor, _first(longer, tensor.shape), precision):
            return f"; the first module to differ is `{name}` ({kind})"
    return ""


@contextmanager
def _outputs(model: nn.Module) -> Generator[list[tuple[str, str, torch.Tensor]]]:
    """Collects what modules without modules of their own return, in the order of the calls."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[str, str, torch.Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and id(module) in names and not any(module.children()):
            found.append((names[id(module)], type(module).__name__, output.detach()))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()
