"""Checkpoints of a training step: everything that the next step depends on, to a folder and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from megatrain import saving
from megatrain.checks import Rule, named, shown
from megatrain.checks.several_optimizers import parameters_of
from megatrain.compiled.inside import Compiled
from megatrain.errors import CheckpointError
from megatrain.files import json_rules
from megatrain.files.json_rules import anything, integer, mapping, optional, problems, record, text
from megatrain.files.room import room_to_read
from megatrain.optim.impostor import Optimizer
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.rehearsal import give_new_state
from megatrain.saving.fitting import misfits
from megatrain.saving.packed import packed_parameters
from megatrain.training.boundary import Progress
from megatrain.training.config import with_config
from megatrain.training.model_state import HIDDEN, State


class Scheduler(Protocol):
    """An LR scheduler, or another object with a state of this kind."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads a state."""
        ...


def _has_no_state(value: Any) -> str | None:
    methods = [getattr(value, method, None) for method in ("state_dict", "load_state_dict")]
    return None if not isinstance(value, type) and all(map(callable, methods)) else f"is {named(value)}"


SCHEDULER = Rule(
    "an LR scheduler, or another object with state_dict() and load_state_dict()", "{name} such an object", _has_no_state
)


def save(
    folder: str | os.PathLike[str],
    compiled: Compiled,
    optimizers: Sequence[Optimizer],
    progress: Progress,
    *,
    scheduler: Scheduler | None,
    user: Mapping[str, Any] | None,
    shard_bytes: int | str,
    more: Callable[[Path], object] | None,
    weights: bool,
) -> None:
    """Writes a checkpoint; see `TrainStep.save`."""
    schedule = None if scheduler is None else _state_of(scheduler)
    if compiled.has_unread_weights:
        compiled.load_weights()
    state = State.of(compiled)
    saving.save(
        folder,
        state.weights if weights else {},
        optimizer=optimizers,
        names=_parameters(compiled, optimizers),
        tensors={**compiled.masters.sources(), **state.hidden},
        extra={
            "progress": asdict(progress),
            "generators": saving.generators_now(compiled.options.device),
            "scheduler": schedule,
            "scheduler_class": None if scheduler is None else _class_of(scheduler),
            "modules": dict(state.others),
            "user": dict(user or {}),
            **({} if weights else {_LACKS_WEIGHTS: True}),
            **({_PACKED: packed} if (packed := State.packed(compiled)) else {}),
        },
        shard_bytes=shard_bytes,
        more=with_config(compiled.model, more) if weights else more,
    )


@room_to_read()
def restore(
    folder: str | os.PathLike[str], compiled: Compiled, optimizers: Sequence[Optimizer], scheduler: Scheduler | None
) -> tuple[Progress, dict[str, Any]]:
    """Reads a checkpoint into a model, its optimizers, a scheduler and the generators.

    Returns:
        The progress of training, and the user's values.

    Raises:
        CheckpointError: If it is damaged or doesn't fit. Before anything is changed, if the headers show the fault.
    """
    checkpoint = saving.load(folder)
    extra = _extra(checkpoint)
    _check_scheduler(checkpoint, extra, scheduler)
    saving.check_generators(extra["generators"], compiled.options.device)
    names = _parameters(compiled, optimizers)
    checkpoint.check_optimizer(optimizers, names)
    hidden = {name: saved for name, saved in checkpoint.tensors.items() if name.startswith(HIDDEN)}
    masters = {name: saved for name, saved in checkpoint.tensors.items() if name not in hidden}
    compiled.masters.check(masters)
    State.check_packed(checkpoint, extra.get(_PACKED, {}), compiled)
    state = State.of(compiled)
    state.check_others(checkpoint, extra["modules"])
    state.places(checkpoint, hidden, compiled)
    if compiled.has_unread_weights:
        compiled.load_weights()
        state = State.of(compiled)
    has_weights = _LACKS_WEIGHTS not in extra
    if has_weights:
        checkpoint.check_weights(state.weights)

    if state.others:
        # First: hooks get the state dict that they know, and what they do to weights is overwritten.
        with compiled.loading():
            compiled.model.load_state_dict({**state.weights, **extra["modules"]}, strict=False)
    if has_weights:
        checkpoint.read_weights(state.weights)
    for name, tensor in state.places(checkpoint, hidden, compiled).items():
        hidden[name].read(tensor)
    compiled.written_buffers.update(name.removeprefix(HIDDEN) for name in hidden)
    compiled.masters.restore(masters)  # after the parameters, because a write into parameters sets the masters
    for parameter in (names[name] for name in packed_parameters(checkpoint.manifest)):
        is_whole = isinstance(compiled.masters.get(parameter), WholeMaster | None)
        give_new_state(optimizers, parameter, parameter.dtype if is_whole else torch.float32)
    checkpoint.read_optimizer(optimizers, names)
    if scheduler is not None:
        _restore_scheduler(checkpoint, scheduler, extra["scheduler"])
    saving.restore_generators(extra["generators"], compiled.options.device)
    return Progress(**extra["progress"]), extra["user"]


def _grad_norm(value: Any, place: str) -> Iterator[str]:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim:
        yield f"{place} is {shown(value)}, not one floating-point number in a tensor"


_PROGRESS = {"count": integer(), "skipped": integer(), "nonfinite": optional(text()), "grad_norm": optional(_grad_norm)}
_FIELDS = {
    "progress": record(_PROGRESS),
    "generators": anything,  # check_generators says more
    "scheduler": optional(mapping(anything, anything)),
    "modules": mapping(json_rules.name, anything),
    "user": mapping(anything, anything),
}
_LACKS_WEIGHTS = "lacks_weights"
_PACKED = "packed"
_SCHEMAS = {1: _FIELDS, 2: {**_FIELDS, "scheduler_class": optional(text())}}
"""What `save` has stored as values, by the schema of the manifest."""


def _extra(checkpoint: saving.Checkpoint) -> dict[str, Any]:
    fields = _SCHEMAS[checkpoint.manifest.schema]
    missing = fields.keys() - checkpoint.extra.keys()
    if missing:
        raise CheckpointError(
            f"`{checkpoint.folder}` was not written by TrainStep.save: it lacks {', '.join(sorted(missing))}.\n"
            "  A step can continue only with everything that the next step depends on.\n"
            "  Read it with megatrain.saving.load, or its weights with megatrain.compile(weights=...)."
        )
    wrong = problems(record(fields, others=anything), checkpoint.extra, "extra")
    if checkpoint.extra.get(_LACKS_WEIGHTS, True) is not True:
        wrong.append(f"extra.{_LACKS_WEIGHTS} is {shown(checkpoint.extra[_LACKS_WEIGHTS])}, not True")
    wrong += problems(mapping(text(), text()), checkpoint.extra.get(_PACKED, {}), f"extra.{_PACKED}")
    _refuse(f"`{checkpoint.folder}` has {len(wrong)} values that no step can have saved.", wrong)
    return checkpoint.extra


def _check_scheduler(checkpoint: saving.Checkpoint, extra: Mapping[str, Any], scheduler: Scheduler | None) -> None:
    if (scheduler is None) != (extra["scheduler"] is None):
        name = f"the checkpoint `{checkpoint.folder}`"
        has, lacks = (name, "load()") if scheduler is None else ("load()", name)
        raise CheckpointError(
            f"{has} has a scheduler, {lacks} has none.\n  Learning rates would continue wrongly.\n"
            "  Give the same scheduler to save and load, or none to both."
        )
    if scheduler is not None:
        wrong = list(_differences(checkpoint, extra, scheduler))
        _refuse(f"the scheduler of `{checkpoint.folder}` doesn't fit this scheduler: {len(wrong)} differences.", wrong)


def _differences(checkpoint: saving.Checkpoint, extra: Mapping[str, Any], scheduler: Scheduler) -> Iterator[str]:
    own, saved = scheduler.state_dict(), extra["scheduler"]
    # The first schema has no class, so the names of the state must tell; other versions of torch have more or fewer.
    is_named = checkpoint.manifest.schema > 1
    if is_named and extra["scheduler_class"] != _class_of(scheduler):
        yield f"class: {extra['scheduler_class']} in the checkpoint, but {_class_of(scheduler)} here"
        return
    if not is_named and not (own.keys() <= saved.keys() or saved.keys() <= own.keys()):
        names = [", ".join(sorted(map(str, state))) for state in (saved, own)]
        yield f"state: {names[0]} in the checkpoint, but {names[1]} here"
        return
    yield from misfits(own, saved, "scheduler", is_whole=checkpoint.is_of_this_torch)
    for key in saved.keys() - own.keys():
        if not isinstance(key, str) or hasattr(scheduler, key):
            yield f"`scheduler.{key}` is state in the checkpoint, but not here"


def _state_of(scheduler: Scheduler) -> dict[str, Any]:
    state = scheduler.state_dict()
    if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"the state of {_class_of(scheduler)} is {shown(state)}, not a dict.\n"
            "  Its values are stored by their names.\n  Let its state_dict() return a dict."
        )
    return state


def _restore_scheduler(checkpoint: saving.Checkpoint, scheduler: Scheduler, state: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(state)
    except Exception as error:  # the scheduler's own code, which may raise anything
        raise CheckpointError(
            f"{_class_of(scheduler)} refuses its state in `{checkpoint.folder}`: {error!r}.\n"
            "  The model and its optimizer already have the values of the checkpoint.\n"
            "  Load an older checkpoint, or build the scheduler as it was."
        ) from error


def _class_of(scheduler: Scheduler) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _refuse(first: str, problems: list[str]) -> None:
    if problems:
        rule = "State can only continue in an object like the one that was saved."
        way = "Build the scheduler as it was; or load an older checkpoint, or single values with megatrain.saving.load."
        raise CheckpointError("\n  ".join([first, *problems, rule, way]))


def _parameters(compiled: Compiled, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """The model's parameters by name: all that the optimizers may hold."""
    named: dict[str, torch.Tensor] = dict(nn.Module.named_parameters(compiled.model, remove_duplicate=False))
    known = set(map(id, named.values()))
    others = sum(id(parameter) not in known for parameter in parameters_of(*optimizers))
    if others:
        raise CheckpointError(
            f"{others} parameters of the optimizer don't belong to the model.\n"
            "  A checkpoint holds the model's state, by its names.\n"
            "  Register them in a module of the model, or use another optimizer for them."
        )
    return named
