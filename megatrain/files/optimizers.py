"""The state of optimizers by the names of their parameters, and whether a saved state fits."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from megatrain.base.checks import shown
from megatrain.base.checks.several_optimizers import Optimizers, check_apart, optimizers_of
from megatrain.base.counts import counted
from megatrain.errors import CheckpointError, ResumeWarning
from megatrain.files.manifest import Encoder, Manifest
from megatrain.tracer.packing import inner_tensors, is_wrapper, packing_text
from megatrain.tracer.spec import TensorSpec, dtype_name

_ALIGNED = ("params", "param_names")
"""What a group holds per parameter; all else are options."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The contents of `optimizer.state_dict()`, with names instead of positions; of several optimizers in their order.

    Args:
        kind: The optimizer's class; of several each class with its number of groups.
        parameters: Its parameters by name, each as `f32[2, 3]`, in the order of the groups.
        groups: Each group's options; `params` lists names.
        state: Each parameter's state by name. Values are what `Encoder.encode` takes; a `Source` may stand for a
            tensor.
        rest: All other entries of the state dict; of several optimizers those of each, by its number as text.
    """

    kind: str
    parameters: Mapping[str, str]
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[str, Mapping[str, Any]]
    rest: Mapping[str, Any]

    @staticmethod
    def of(optimizers: Optimizers, names: Mapping[str, torch.Tensor]) -> OptimizerState:
        """Reads an optimizer, or several; tensors are not copied.

        Args:
            optimizers: Any of torch, or with the same `state_dict`.
            names: The parameters by name; those that no optimizer has don't matter.

        Raises:
            CheckpointError: If parameters of an optimizer have no name, or its state belongs to no parameter.
            OptimizerError: If two optimizers hold the same parameter.
        """
        several = optimizers_of(optimizers)
        check_apart(several, names.items())
        parts = [OptimizerState._of_one(each, names) for each in several]
        if len(parts) == 1:
            return parts[0]
        return OptimizerState(
            _kind(several),
            {name: spec for part in parts for name, spec in part.parameters.items()},
            [group for part in parts for group in part.groups],
            {name: state for part in parts for name, state in part.state.items()},
            {str(i): part.rest for i, part in enumerate(parts)},
        )

    @staticmethod
    def _of_one(optimizer: Optimizer, names: Mapping[str, torch.Tensor]) -> OptimizerState:
        named = _named(optimizer, names)
        content = optimizer.state_dict()
        by_id: dict[Any, str] = {}
        groups: list[dict[str, Any]] = []
        for group, members in zip(content["param_groups"], named, strict=True):
            by_id.update(zip(group["params"], members, strict=True))
            groups.append({**group, "params": list(members)})
        loose = [key for key in content["state"] if key not in by_id]
        if loose:
            raise CheckpointError(
                f"the state of {_class_of(optimizer)} has entries that belong to no parameter: {loose}.\n"
                "  State is stored by parameter.\n"
                "  Keep such values in the optimizer's param_groups."
            )
        return OptimizerState(
            _class_of(optimizer),
            {name: _spec(tensor) for members in named for name, tensor in members.items()},
            groups,
            # In the order of the groups: that of the first updates differs from rank to rank.
            {name: content["state"][key] for key, name in by_id.items() if key in content["state"]},
            {key: value for key, value in content.items() if key not in ("state", "param_groups")},
        )

    def encode(self, encoder: Encoder) -> dict[str, Any]:
        """Returns JSON; tensors are stored as `<parameter>.<state>`."""
        state = {
            name: {key: encoder.encode(apart(value), f"{name}.{key}") for key, value in values.items()}
            for name, values in self.state.items()
        }
        odd = [(name, key) for name, values in state.items() for key in values if type(key) is not str]
        encoder.problems += [f"`{name}` has state under {key!r}, which isn't text" for name, key in odd]
        return {
            "class": self.kind,
            "parameters": dict(self.parameters),
            "param_groups": encoder.encode([dict(group) for group in self.groups], "param_groups"),
            "state": state,
            "rest": encoder.encode(dict(self.rest), "rest"),
        }


def differences(
    kind: str,
    parameters: Mapping[str, str],
    groups: Sequence[Sequence[str]],
    optimizers: Sequence[Optimizer],
    names: Mapping[str, torch.Tensor],
) -> list[str]:
    """Yields the differences between stored optimizers and these: classes, groups, parameters."""
    named = [members for optimizer in optimizers for members in _named(optimizer, names)]
    is_alike = _in_one_form(kind) == _in_one_form(_kind(optimizers))
    found = [] if is_alike else [f"class: {kind} in the checkpoint, but {_kind(optimizers)} here"]
    own = {name: i for i, members in enumerate(named) for name in members}
    specs = {name: _spec(tensor) for members in named for name, tensor in members.items()}
    stored = {name: i for i, members in enumerate(groups) for name in members}
    found += [f"missing: `{name}` {specs[name]} is not in the checkpoint's optimizer" for name in own.keys() - stored]
    found += [f"unexpected: `{name}` {parameters[name]} is not in this optimizer" for name in stored.keys() - own]
    for name in (name for name in own if name in stored):
        if specs[name] != parameters[name]:
            found.append(f"parameter: `{name}` {parameters[name]} in the checkpoint, but {specs[name]} here")
        if own[name] != stored[name]:
            found.append(f"group: `{name}` in group {stored[name]} of the checkpoint, but in group {own[name]} here")
    if len(groups) != len(named):
        found.append(f"groups: {len(groups)} in the checkpoint, but {len(named)} here")
    return sorted(found)


def misfitting_options(
    groups: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], *, is_whole: bool
) -> list[str]:
    """Yields the stored options of groups that have another kind than these optimizers', or are missing."""
    found: list[str] = []
    groups_here = [(group, optimizer.defaults) for optimizer in optimizers for group in optimizer.param_groups]
    for i, (stored, (own, defaults)) in enumerate(zip(groups, groups_here, strict=True)):
        for key, value in own.items():
            if key in stored and key not in _ALIGNED:
                found += misfits(value, stored[key], f"{key} of group {i}")
            elif key not in stored and key in defaults and is_whole:
                found.append(f"`{key} of group {i}` is not in the checkpoint")
    return found


def destinations(
    optimizers: Sequence[Optimizer], names: Mapping[str, torch.Tensor]
) -> dict[tuple[str, str], torch.Tensor]:
    """Lists the tensors that the optimizers' state consists of now, by names of parameter and state."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for optimizer in optimizers:
        for name, tensor in (item for members in _named(optimizer, names) for item in members.items()):
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, torch.Tensor):
                    found[name, str(key)] = value
    return found


def misfitting_rest(rest: Any, optimizers: Sequence[Optimizer]) -> list[str]:
    """Yields what is wrong with the stored further entries of several optimizers, which are by their numbers."""
    numbers = [str(i) for i in range(len(optimizers))]
    if len(optimizers) == 1 or (list(rest) == numbers and all(isinstance(each, dict) for each in rest.values())):
        return []
    return [f"rest: {shown(rest)} in the checkpoint, not the further entries of {len(optimizers)} optimizers"]


def put_back(
    optimizers: Sequence[Optimizer],
    names: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
    rest: Mapping[str, Any],
) -> None:
    """Gives optimizers the state of ones that `differences` found alike, through their own `load_state_dict`."""
    left = iter(groups)
    for i, optimizer in enumerate(optimizers):
        own = [next(left) for _ in optimizer.param_groups]
        held = {name: state[name] for group in own for name in group["params"] if name in state}
        _put_back_one(optimizer, names, own, held, rest if len(optimizers) == 1 else rest[str(i)])


def _put_back_one(
    optimizer: Optimizer,
    names: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
    rest: Mapping[str, Any],
) -> None:
    named = _named(optimizer, names)
    state = _converted(optimizer, state)
    ids = {name: i for i, name in enumerate(name for members in named for name in members)}
    ordered: list[dict[str, Any]] = []
    for stored, members, own in zip(groups, named, optimizer.param_groups, strict=True):
        group = {**stored, "params": [ids[name] for name in members]}
        # Names that the user gave to the optimizer go with its own order of parameters.
        if "param_names" in own:
            group["param_names"] = own["param_names"]
        else:
            group.pop("param_names", None)
        ordered.append(group)
    with _Unconverted(state.values()):
        numbered = {ids[name]: dict(values) for name, values in state.items()}
        optimizer.load_state_dict({**rest, "param_groups": ordered, "state": numbered})
    for members in named:
        for name, tensor in members.items():
            _keep_dtypes(optimizer.state.get(tensor, {}), state.get(name, {}))


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the state of one class of optimizers becomes that of another, which computes the same apart from rounding.

    Args:
        stored: The class that was saved, as checkpoints name it.
        here: The class that goes on.
        name: A state that only the former has.
        says: What becomes of the state, for people.
        convert: Of a parameter's state.
    """

    stored: str
    here: str
    name: str
    says: str
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]


conversions: list[Conversion] = []
"""Those that there are."""


def _converted(optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    for each in conversions:
        if each.here == _class_of(optimizer) and any(each.name in values for values in state.values()):
            warnings.warn(
                f"the checkpoint is of {each.stored}, and {each.says}: updates differ a little from here on. To go on "
                f"with the same bits, resume with {each.stored}.",
                ResumeWarning,
                stacklevel=2,
            )
            return {name: each.convert(values) for name, values in state.items()}
    return state


def _in_one_form(kind: str) -> str:
    """The text of `_kind`, the same for classes of which one's state becomes the other's."""
    for one, other in sorted((each.stored, each.here) for each in conversions):
        kind = kind.replace(max(one, other), min(one, other))
    return kind


class _Unconverted(TorchFunctionMode):
    """While it is active, `.to` leaves the tensors of a state as they are, if they are on the device asked for.

    `load_state_dict` would make copies of all moments in the dtypes of their parameters, which nobody keeps.
    """

    def __init__(self, state: Iterable[Mapping[str, Any]]):
        super().__init__()
        self._kept = {id(value) for values in state for value in values.values() if isinstance(value, torch.Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.Tensor.to and id(args[0]) in self._kept and options.get("device") == args[0].device:
            return args[0]
        return func(*args, **options)


def _keep_dtypes(loaded: dict[Any, Any], state: Mapping[str, Any]) -> None:
    """Undoes the conversion of state to the dtype of its parameter by `load_state_dict` (fp32 moments to bf16)."""
    for key, value in state.items():
        now = loaded.get(key)
        if type(value) is torch.Tensor and type(now) is torch.Tensor and now.dtype != value.dtype:
            loaded[key] = value.to(now.device)


def _named(optimizer: Optimizer, names: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The parameters of each group by the first name that they have."""
    by_id: dict[int, str] = {}
    for name, tensor in names.items():
        by_id.setdefault(id(tensor), name)
    groups: list[list[torch.Tensor]] = [group["params"] for group in optimizer.param_groups]
    nameless = [
        f"parameter {j} of group {i}, {_spec(tensor)}"
        for i, group in enumerate(groups)
        for j, tensor in enumerate(group)
        if id(tensor) not in by_id
    ]
    if nameless:
        raise CheckpointError(
            "\n  ".join(
                [
                    f"{_class_of(optimizer)} has {counted(len(nameless), 'parameter')} without a name.",
                    *_shortened(nameless),
                    "State is stored by the names of parameters.",
                    "Give names= a dict of all parameters of the optimizer, such as dict(model.named_parameters()).",
                ]
            )
        )
    return [{by_id[id(tensor)]: tensor for tensor in group} for group in groups]


def _shortened(lines: Sequence[str], limit: int = 20) -> Iterable[str]:
    yield from lines[:limit]
    if len(lines) > limit:
        yield f"... and {len(lines) - limit} more"


def _spec(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def _kind(optimizers: Sequence[Optimizer]) -> str:
    """Names the classes. Of several each with its groups, which are stored in one list."""
    if len(optimizers) == 1:
        return _class_of(optimizers[0])
    counts = [len(each.param_groups) for each in optimizers]
    pairs = zip(optimizers, counts, strict=True)
    return ", ".join(f"{_class_of(each)} with {count} group{'s' * (count != 1)}" for each, count in pairs)


def _class_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


PACKED = "packed tensor"
"""In a dict that stands for a tensor of several inner ones: how it is made of these; the other entries are these."""


def apart(value: Any) -> Any:
    """Returns what is stored for a state: for a tensor of several inner ones, a dict of these."""
    if not is_wrapper(value):
        return value
    return {PACKED: packing_text(value), **{".".join(path): tensor for path, tensor in inner_tensors(value)}}


def filled(value: Any, existing: torch.Tensor | None, place: str) -> Any:
    """Returns a state as it was before it was stored: what stands for a packed tensor fills the existing one.

    Raises:
        CheckpointError: If the optimizer has no tensor there that is packed alike.
    """
    if not isinstance(value, dict) or PACKED not in value:
        return value
    stored: dict[str, Any] = value
    found = {} if existing is None else {".".join(path): tensor for path, tensor in inner_tensors(existing)}
    is_alike = existing is not None and packing_text(existing) == stored[PACKED]
    if not is_alike or any(TensorSpec.of(found[n]) != TensorSpec.of(stored[n]) for n in found):
        now = "nothing" if existing is None else packing_text(existing) or type(existing).__qualname__
        raise CheckpointError(
            f"`{place}` in the state of the optimizer is {stored[PACKED]} in the checkpoint, and {now} here.\n"
            "  The inner tensors of such a state go into one that the optimizer has made.\n"
            "  Load with TrainStep.load, with the optimizer made as it was when saved."
        )
    with torch.no_grad():
        for name, tensor in found.items():
            tensor.copy_(stored[name])
    return existing


def packed_parameters(manifest: Manifest) -> list[str]:
    """Names the parameters whose saved state has such tensors, which only the optimizer makes."""
    saved = {} if manifest.optimizer is None else manifest.optimizer["state"]
    return [name for name, state in saved.items() if any(isinstance(v, dict) and PACKED in v for v in state.values())]


_HOLDERS = (dict, list, tuple)


def misfits(own: Any, saved: Any, place: str, *, is_whole: bool = False) -> Iterator[str]:
    """Yields the places where a saved value has another structure than the own value that it would replace.

    With `is_whole`, dicts within the saved value must have all names of the existing dicts.
    """
    here, there = (next((kind for kind in _HOLDERS if isinstance(value, kind)), None) for value in (own, saved))
    if here is not there or (here in (list, tuple) and not _is_as_long(own, saved)):
        yield f"`{place}` is {shown(own)} here, but {shown(saved)} in the checkpoint"
    elif isinstance(own, list | tuple):
        for i, (one, other) in enumerate(zip(cast(Sequence[Any], own), saved, strict=False)):
            yield from misfits(one, other, f"{place}.{i}", is_whole=is_whole)
    elif isinstance(own, dict):
        for key, value in cast(dict[Any, Any], own).items():
            if key in saved:
                yield from misfits(value, saved[key], f"{place}.{key}", is_whole=is_whole)
            elif is_whole and not isinstance(own, collections.Counter):
                yield f"`{place}.{key}` is not in the checkpoint"


def _is_as_long(own: Sequence[Any], saved: Sequence[Any]) -> bool:
    """Whether a saved list or tuple may replace one: a list may have grown since it was made."""
    return len(saved) >= len(own) if isinstance(own, list) else len(saved) == len(own)
