"""Checkpoints of a training step: everything that the next step depends on, to a folder and back."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from megatrain import files as saving
from megatrain.base.checks import shown
from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.base.counts import counted
from megatrain.base.host_limits import available_bytes
from megatrain.errors import CheckpointError, RanksError
from megatrain.files import Checkpoint, Saved, Source
from megatrain.files.disk import room_to_read
from megatrain.files.json_file import Count, of_kind
from megatrain.files.load import read_optimizer, read_weights
from megatrain.files.optimizers import OptimizerState, packed_parameters
from megatrain.files.save import CheckpointDraft
from megatrain.files.weight_files import Maps
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.moments import Moments
from megatrain.optim.proxy import Optimizer, give_new_state
from megatrain.ranks.processes import words_of
from megatrain.runtime.exchange import Exchange
from megatrain.tracer.inventory import inventory
from megatrain.tracer.packing import packing_text, registered, unpacked_state
from megatrain.tracer.spec import TensorSpec
from megatrain.training import saved_schedulers
from megatrain.training.compiled.inside import Compiled
from megatrain.training.saved_schedulers import Schedulers
from megatrain.training.step_run import Progress

HIDDEN = ".state/"
"""In front of the names of hidden tensors; no name of a module begins with a dot."""
_FILES = {"config": "config.json", "generation_config": "generation_config.json"}


def with_config(model: nn.Module, more: Callable[[Path], object] | None) -> Callable[[Path], object] | None:
    """Returns a function that writes the files of `more`, and then the model's configuration if `more` didn't.

    Args:
        model: Has a configuration to write if its class has a `config_class`, which is what `from_pretrained` reads one
            with, and its `config` is one.
        more: As of `saving.save`.
    """
    configs = dict(_configs(model))
    if not configs:
        return more

    def write(folder: Path) -> None:
        if more is not None:
            more(folder)
        for file, config in configs.items():
            if not (folder / file).exists():
                _write(folder / file, config, model)

    return write


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kind: Any = getattr(type(model), "config_class", None)
    if isinstance(kind, type) and isinstance(getattr(model, "config", None), kind):
        for attribute, file in _FILES.items():
            config: Any = getattr(model, attribute, None)
            if callable(getattr(config, "to_json_file", None)):
                yield file, config


def _write(path: Path, config: Any, model: nn.Module) -> None:
    try:
        config.to_json_file(path)
        if path.name == "config.json":
            written = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**written, **_facts(model, config)}, indent=2) + "\n", encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the model's {path.stem} can't be written to `{path.name}`: {error}.\n"
            "  Without this file from_pretrained would build another model.\n"
            "  Correct the configuration, or write the file yourself: more=lambda folder: ..."
        ) from error


def _facts(model: nn.Module, config: Any) -> dict[str, Any]:
    """The contents of the configuration as the model's own `save_pretrained` writes it."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    return {"architectures": [type(model).__name__], name: str(dtype).removeprefix("torch.")}


def _save_first(
    exchange: Exchange, draft: Callable[[], CheckpointDraft], folder: Any, more: Callable[[Path], object] | None
) -> None:
    """Writes a checkpoint on the first rank, for which all others wait.

    Raises:
        CheckpointError: As `saving.save`; of the first rank.
        RanksError: If that or another rank fails.
    """
    if exchange.rank > 0:
        said = exchange.tell(_AT, {})[0]["said"]
        if said:
            raise RanksError(f"rank 0 failed in {_AT}: {said}")
        return
    said = ""
    try:
        draft().save(folder, more)
    except Exception as error:
        said = words_of(error)
        raise
    finally:
        exchange.tell(_AT, {"said": said})


_AT = "save()"


def save(
    folder: str | os.PathLike[str],
    exchange: Exchange,
    compiled: Compiled,
    optimizers: Sequence[Optimizer],
    progress: Progress,
    *,
    device_tensors: Callable[[], Mapping[int, torch.Tensor]],
    unmarked: Callable[[], AbstractContextManager[None]],
    scheduler: Schedulers | None,
    user: Mapping[str, Any] | None,
    shard_bytes: int | str,
    more: Callable[[Path], object] | None,
    weights: bool,
) -> None:
    """Writes a checkpoint; see `TrainStep.save`.

    The user's own code on the states finds the tensors marked whose values only the device has; `unmarked` is for what
    follows, which takes these values from there.
    """
    generators = saving.generators_now(compiled.options.device)
    of_ranks: list[Any] = []
    if not exchange.is_alone:
        exchange.check_written(_AT)
        told = exchange.tell(_AT, {"generators": base64.b64encode(pickle.dumps(generators)).decode()})
        of_ranks = [pickle.loads(base64.b64decode(word["generators"])) for word in told]

    def draft() -> CheckpointDraft:
        if compiled.has_unread_weights:
            compiled.load_weights()
        if weights:
            compiled.check_files()
        state, names = State.of(compiled, unmarked), _parameters(compiled, optimizers)
        moments = OptimizerState.of(optimizers, names)
        values = {
            "progress": asdict(progress),
            "generators": generators,
            **({_OF_RANKS: of_ranks} if of_ranks else {}),
            **saved_schedulers.stored(scheduler),
            "modules": dict(state.others),
            "user": dict(user or {}),
            **({} if weights else {_LACKS_WEIGHTS: True}),
            **({_PACKED: packed} if (packed := State.packed(compiled)) else {}),
        }
        with unmarked():
            there = device_tensors()
            return CheckpointDraft.of(
                _from_device(state.weights, there) if weights else {},
                replace(moments, state={name: _from_device(each, there) for name, each in moments.state.items()}),
                names,
                values,
                {**compiled.masters.sources(there), **_from_device(state.hidden, there)},
                shard_bytes,
            )

    _save_first(exchange, draft, folder, with_config(compiled.model, more) if weights else more)


def _from_device(tensors: Mapping[str, Any], there: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """The same tensors; of those whose values the device has, sources that read them there."""
    return {name: Source.of(there[id(value)]) if id(value) in there else value for name, value in tensors.items()}


@room_to_read()
def restore(
    folder: str | os.PathLike[str],
    compiled: Compiled,
    optimizers: Sequence[Optimizer],
    scheduler: Schedulers | None,
    moments: Moments | None = None,
) -> tuple[Progress, dict[str, Any]]:
    """Reads a checkpoint into a model, its optimizers, its schedulers and the generators.

    State of optimizers that is in a file (`moments`) is read into the file, as far as it needs no conversion.

    Returns:
        The progress of training, and the user's values.

    Raises:
        CheckpointError: If it is damaged or doesn't fit. Before anything is changed, if the headers show the fault.
    """
    checkpoint = saving.load(folder)
    extra = _extra(checkpoint)
    saved_schedulers.check(checkpoint, extra, scheduler)
    generators = _generators(extra, compiled)
    saving.check_generators(generators, compiled.options.device)
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
        read_weights(checkpoint, state.weights, compiled.engine.in_files)
    for name, tensor in state.places(checkpoint, hidden, compiled).items():
        hidden[name].read(tensor)
    compiled.written_buffers.update(name.removeprefix(HIDDEN) for name in hidden)
    maps = _maps(checkpoint, masters, optimizers) if moments is None else None
    compiled.masters.restore(masters, maps)  # after the parameters, because a write into parameters sets the masters
    for parameter in (names[name] for name in packed_parameters(checkpoint.manifest)):
        is_whole = isinstance(compiled.masters.get(parameter), WholeMaster | None)
        give_new_state(optimizers, parameter, parameter.dtype if is_whole else torch.float32)
    saved = {} if moments is None or checkpoint.manifest.optimizer is None else checkpoint.manifest.optimizer["state"]
    for name, fields in saved.items():
        assert moments is not None
        moments.give_state(names[name], fields)
    read_optimizer(checkpoint, optimizers, names, maps)
    compiled.engine.maps = maps
    saved_schedulers.restore(checkpoint, extra, scheduler)
    saving.restore_generators(generators, compiled.options.device)
    return Progress(**extra["progress"]), extra["user"]


def _maps(checkpoint: Checkpoint, masters: Mapping[str, Saved], optimizers: Sequence[Optimizer]) -> Maps | None:
    """Where what is read stays in the files: if the host has no room for it besides what the optimizers have."""
    read = sum(saved.spec.nbytes for saved in (*masters.values(), *checkpoint.optimizer_tensors.values()))
    states = (dict(state).values() for each in optimizers for state in each.state.values())
    held = sum(value.nbytes for values in states for value in values if isinstance(value, torch.Tensor))
    return Maps() if read - held > available_bytes() else None


class _Progress(TypedDict):
    count: Count
    skipped: Count
    nonfinite: str | None
    grad_norm: torch.Tensor | None


class _Always(TypedDict):
    """What `save` stores as values; of several schedulers a list."""

    progress: _Progress
    generators: Any  # check_generators says more
    modules: dict[str, Any]
    user: dict[Any, Any]
    scheduler: dict[Any, Any] | list[dict[Any, Any]] | None
    scheduler_class: str | list[str] | None


class _Extra(_Always, total=False):
    lacks_weights: bool
    packed: dict[str, str]


_LACKS_WEIGHTS = "lacks_weights"
_OF_RANKS = "generators_of_ranks"
_PACKED = "packed"


def _generators(extra: Mapping[str, Any], compiled: Compiled) -> dict[str, Any]:
    """The generators of this rank; those of the first rank, or of the only process, if there were fewer ranks."""
    of_ranks, rank = extra.get(_OF_RANKS, []), 0 if compiled.ranks is None else compiled.ranks.rank
    return of_ranks[rank] if rank < len(of_ranks) else extra["generators"]


def _extra(checkpoint: saving.Checkpoint) -> dict[str, Any]:
    missing = _Extra.__required_keys__ - checkpoint.extra.keys()
    if missing:
        raise CheckpointError(
            f"`{checkpoint.folder}` was not written by TrainStep.save: it lacks {', '.join(sorted(missing))}.\n"
            "  A step can continue only with everything that the next step depends on.\n"
            "  Read it with megatrain.files.load, or its weights with megatrain.compile(weights=...)."
        )
    try:
        of_kind(checkpoint.extra, _Extra, "extra")
        norm = checkpoint.extra["progress"]["grad_norm"]
        if norm is not None and (norm.ndim or not norm.is_floating_point()):
            raise ValueError(f"`extra.progress.grad_norm` is {shown(norm)}, not one floating-point number in a tensor")
        fault = saved_schedulers.fault(checkpoint.extra)
        if fault is not None:
            raise ValueError(fault)
    except ValueError as error:
        raise CheckpointError(
            f"`{checkpoint.folder}` has a value that no step can have saved: {error}.\n"
            "  State can only continue in an object like the one that was saved.\n"
            "  Load an older checkpoint, or single values with megatrain.files.load."
        ) from error
    return checkpoint.extra


def _parameters(compiled: Compiled, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """The model's parameters by name: all that the optimizers may hold."""
    named: dict[str, torch.Tensor] = dict(nn.Module.named_parameters(compiled.model, remove_duplicate=False))
    known = set(map(id, named.values()))
    others = sum(id(parameter) not in known for parameter in parameters_of(*optimizers))
    if others:
        raise CheckpointError(
            f"the optimizer has {counted(others, 'parameter')} that the model doesn't have.\n"
            "  A checkpoint holds the model's state, by its names.\n"
            "  Register them in a module of the model, or use another optimizer for them."
        )
    return named


# -- the model's state ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """The state of a model, no tensor copied.

    Args:
        weights: Its own tensors under the names of its state dict.
        hidden: Other tensors that the next step depends on, as `.state/<key>`: buffers that forwards write but no state
            dict has, and tensors that a hook on the state dict left out.
        others: All other entries of the state dict, by name: extra states of modules, and values that hooks added.
    """

    weights: Mapping[str, torch.Tensor]
    hidden: Mapping[str, torch.Tensor]
    others: Mapping[str, Any]

    @staticmethod
    def of(compiled: Compiled, unmarked: Callable[[], AbstractContextManager[None]] = nullcontext) -> State:
        """Reads a model, after all due updates; see `save`."""
        listed = unpacked_state(compiled.model.state_dict(keep_vars=True))
        with unmarked():
            return State._listed(compiled, listed)

    @staticmethod
    def _listed(compiled: Compiled, listed: Mapping[str, Any]) -> State:
        entries, tensors = inventory(compiled.model)
        own = {_identity(tensor): tensor for tensor in tensors.values()}
        weights = {
            name: own[_identity(value)]
            for name, value in listed.items()
            if isinstance(value, torch.Tensor) and _identity(value) in own
        }
        shown = set(map(id, weights.values()))
        hidden = {
            HIDDEN + key: tensors[key]
            for key, entry in entries.items()
            if (entry.persistent or key in compiled.written_buffers) and id(tensors[key]) not in shown
        }
        return State(weights, hidden, {name: value for name, value in listed.items() if name not in weights})

    @staticmethod
    def packed(compiled: Compiled) -> dict[str, str]:
        """Says of each packed parameter how it is made of its inner tensors: a checkpoint has only these."""
        named = ((name, packing_text(tensor)) for name, tensor in registered(compiled.model))
        return {name: text for name, text in named if text is not None}

    @staticmethod
    def check_packed(checkpoint: Checkpoint, saved: Mapping[str, str], compiled: Compiled) -> None:
        """Compares how parameters are packed with a checkpoint's.

        Args:
            checkpoint: For the error.
            saved: What `packed` said when it was written.
            compiled: The model.

        Raises:
            CheckpointError: Listing all differences.
        """
        now = State.packed(compiled)
        names = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
        _refuse(
            checkpoint,
            "packed parameters",
            [f"differs: `{n}` is {saved.get(n, 'plain')}, but {now.get(n, 'plain')} here" for n in names],
        )

    def check_others(self, checkpoint: Checkpoint, saved: Mapping[str, Any]) -> None:
        """Compares the names of extra states with those of a checkpoint.

        Args:
            checkpoint: For the error.
            saved: Its extra states by name.

        Raises:
            CheckpointError: Listing all differences.
        """
        problems = [f"missing: `{name}` is not in the checkpoint" for name in self.others if name not in saved]
        problems += [f"unexpected: `{name}` is not in this model" for name in saved if name not in self.others]
        _refuse(checkpoint, "extra states", problems)

    def places(self, checkpoint: Checkpoint, saved: Mapping[str, Saved], compiled: Compiled) -> dict[str, torch.Tensor]:
        """Finds the places of a checkpoint's hidden tensors in a model.

        Args:
            checkpoint: For the error.
            saved: Its hidden tensors by name.
            compiled: The model.

        Raises:
            CheckpointError: If the model lacks a tensor, has another one in its place, or the checkpoint lacks a
                persistent one.
        """
        entries, tensors = inventory(compiled.model)
        persistent = {HIDDEN + key for key, entry in entries.items() if entry.persistent}
        _refuse(checkpoint, "state", list(self._mismatches(saved, tensors, persistent)))
        return {name: tensors[name.removeprefix(HIDDEN)] for name in saved}

    def _mismatches(
        self, saved: Mapping[str, Saved], tensors: Mapping[str, torch.Tensor], needed: set[str]
    ) -> Iterable[str]:
        # A written buffer may be missing: the run had made no step when it was saved, and the model has it as built.
        for name in (name for name in self.hidden if name in needed and name not in saved):
            yield f"missing: `{name.removeprefix(HIDDEN)}` is not in the checkpoint"
        for name, stored in saved.items():
            key = name.removeprefix(HIDDEN)
            if key not in tensors:
                yield f"unexpected: `{key}` {stored} is not in this model"
            elif (spec := TensorSpec(tuple(tensors[key].shape), tensors[key].dtype)) != stored.spec:
                yield f"differs: `{key}` {stored}, but {spec} here"


def _identity(tensor: torch.Tensor) -> object:
    """Equal for a tensor and any view of all its memory with the same layout, such as `tensor.data`."""
    place = None if tensor.is_meta else Source.of(tensor).place
    return id(tensor) if place is None else place


def _refuse(checkpoint: Checkpoint, what: str, problems: list[str]) -> None:
    if problems:
        lines = [
            f"the checkpoint doesn't fit the {what} of this model: {counted(len(problems), 'difference')}.",
            f"checkpoint: `{checkpoint.folder}`",
            *problems,
            "The next step depends on all saved values.",
            "Build the model as it was.",
        ]
        raise CheckpointError("\n  ".join(lines))
