"""Checkpoints of a training step: everything that the next step depends on, to a folder and back."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from megatrain import saving
from megatrain.checks import shown
from megatrain.checks.several_optimizers import parameters_of
from megatrain.compiled.inside import Compiled
from megatrain.counts import counted
from megatrain.errors import CheckpointError, RanksError
from megatrain.files import disk
from megatrain.files.disk import room_to_read
from megatrain.files.json_file import Count, of_kind
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.proxy import Optimizer, give_new_state
from megatrain.ranks.ranks import words_of
from megatrain.saving.manifest import FileRecord
from megatrain.saving.optimizers import packed_parameters
from megatrain.saving.save import CheckpointDraft, Shard
from megatrain.training import saved_schedulers
from megatrain.training.attempts.together import Together
from megatrain.training.boundary import Progress
from megatrain.training.model_state import HIDDEN, State
from megatrain.training.saved_schedulers import Schedulers

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
            path.write_text(json.dumps({**json.loads(path.read_text()), **_facts(model, config)}, indent=2) + "\n")
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


# save_together(): the ranks of a process group write one checkpoint, each some of its files; rank 0 leads.
#
# Rank 0 writes as a process alone does, but files with weights and training state are divided among the ranks that see
# the folder. There are three meetings: rank 0 tells who writes which file where, all tell what they have written, and
# rank 0 tells how it ended. If it fails it makes the meetings that are left, for which the others wait.

_AT = "save()"


def save_together(
    together: Together, draft: Callable[[bool], CheckpointDraft], folder: Any, more: Callable[[Path], object] | None
) -> None:
    """Writes a checkpoint; all ranks call it.

    Args:
        together: The ranks.
        draft: Makes what is written: with the caller's values, or without them, as the other ranks need it.
        folder: As in `saving.save`; that of rank 0 counts.
        more: See there; runs on rank 0.

    Raises:
        CheckpointError: As `saving.save`; of rank 0.
        RanksError: If another rank fails, or was changed by code that ran on it alone.
    """
    if not together.is_shared:
        draft(True).save(folder, more)
    elif together.place[0] == 0:
        _Leader(together).save(draft, folder, more)
    else:
        _follow(together, draft)


class _Leader:
    """Rank 0."""

    def __init__(self, together: Together):
        self._together = together
        self._num_met = 0

    def save(
        self, draft: Callable[[bool], CheckpointDraft], folder: Any, more: Callable[[Path], object] | None
    ) -> None:
        said, error = "", None
        try:
            draft(True).save(folder, more, self._write)
        except RanksError:
            raise  # so does every rank
        except Exception as caught:
            said, error = words_of(caught), caught
        while self._num_met < 2:
            self._tell({"folder": None, "records": {}, "said": said})
        self._tell({"said": said})
        if error is not None:
            raise error

    def _tell(self, word: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._num_met += 1
        return _tell(self._together, word)

    def _write(self, shards: Sequence[Shard], folder: Path) -> Mapping[str, FileRecord]:
        files = {
            shard.file: [owner, _mark(shard)]
            for shard, owner in zip(shards, _owners(shards, self._together.place[1]), strict=True)
        }
        told = self._tell({"folder": str(folder), "files": files, **_state(self._together)})
        mine = _of_rank(files, 0) if _agree(self._together, told) else files
        found = {shard.file: shard.write(folder) for shard in shards if shard.file in mine}
        for rank, word in enumerate(self._tell({"records": {}, "said": ""})):
            if word["said"]:
                raise CheckpointError(
                    f"rank {rank} failed to write its files of the checkpoint: {word['said']}\n"
                    "  Each rank writes some of the files, and a checkpoint is complete or not there.\n"
                    "  The previous checkpoint is still complete. Mend what failed there, then save again."
                )
            found |= {file: FileRecord.of_json(record) for file, record in word["records"].items()}
        # What no other rank could write.
        return {shard.file: found.get(shard.file) or shard.write(folder) for shard in shards}


def _follow(together: Together, draft: Callable[[bool], CheckpointDraft]) -> None:
    """Writes what rank 0 says."""
    try:
        state = _state(together)
    except Exception as error:
        with suppress(RanksError):
            _tell(together, {"failed": words_of(error)})
        raise
    told = _tell(together, state)
    records, said = {}, ""
    if told[0]["folder"] is not None and _agree(together, told):
        try:
            records = _written(draft, Path(told[0]["folder"]), _of_rank(told[0]["files"], together.place[0]))
        except Exception as error:
            said = words_of(error)
    _tell(together, {"records": records, "said": said})
    said = _tell(together, {"said": ""})[0]["said"]
    if said:
        raise RanksError(f"rank 0 failed in {_AT}: {said}")


def _written(draft: Callable[[bool], CheckpointDraft], folder: Path, marks: Mapping[str, str]) -> dict[str, Any]:
    """Writes files that this rank would lay out as rank 0 does, if it sees the folder; returns their records."""
    if not marks or not folder.is_dir():
        return {}
    same = [shard for shard in draft(False).shared if marks.get(shard.file) == _mark(shard)]
    found = {shard.file: shard.write(folder).to_json() for shard in same}
    for inner in {(folder / shard.file).parent for shard in same}:
        disk.sync_folder(inner)
    return found


def _tell(together: Together, word: Mapping[str, Any]) -> list[dict[str, Any]]:
    told = together.tell_all(_AT, word)
    assert told is not None
    return told


def _state(together: Together) -> dict[str, Any]:
    return {"compared": together.is_compared, "changed": together.changed()}


def _agree(together: Together, told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks have the same values, as far as anybody knows.

    Raises:
        RanksError: If code that ran on one rank alone has changed some, on all ranks.
    """
    together.check_changed([word["changed"] for word in told])
    return all(word["compared"] for word in told)


def _owners(shards: Sequence[Shard], size: int) -> list[int]:
    """The rank that writes each file: the largest first, each to the rank with the least bytes so far."""
    left, found = [0] * size, [0] * len(shards)
    for index in sorted(range(len(shards)), key=lambda index: -shards[index].nbytes):
        found[index] = left.index(min(left))
        left[found[index]] += shards[index].nbytes
    return found


def _of_rank(files: Mapping[str, Sequence[Any]], rank: int) -> dict[str, str]:
    return {file: mark for file, (owner, mark) in files.items() if owner == rank}


def _mark(shard: Shard) -> str:
    """Equal for files with the same layout."""
    return shard.record({}).digest


def save(
    folder: str | os.PathLike[str],
    together: Together,
    compiled: Compiled,
    optimizers: Sequence[Optimizer],
    progress: Progress,
    *,
    scheduler: Schedulers | None,
    user: Mapping[str, Any] | None,
    shard_bytes: int | str,
    more: Callable[[Path], object] | None,
    weights: bool,
) -> None:
    """Writes a checkpoint; see `TrainStep.save`."""
    generators = saving.generators_now(compiled.options.device)
    told = together.tell_all("save()", {"generators": base64.b64encode(pickle.dumps(generators)).decode()})
    of_ranks = [] if told is None else [pickle.loads(base64.b64decode(word["generators"])) for word in told]

    def draft(has_values: bool) -> CheckpointDraft:
        if compiled.has_unread_weights:
            compiled.load_weights()
        state = State.of(compiled)
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
        return CheckpointDraft.of(
            state.weights if weights else {},
            optimizers,
            _parameters(compiled, optimizers),
            values if has_values else {},
            {**compiled.masters.sources(), **state.hidden},
            shard_bytes,
        )

    save_together(together, draft, folder, with_config(compiled.model, more) if weights else more)


@room_to_read()
def restore(
    folder: str | os.PathLike[str], compiled: Compiled, optimizers: Sequence[Optimizer], scheduler: Schedulers | None
) -> tuple[Progress, dict[str, Any]]:
    """Reads a checkpoint into a model, its optimizers, its schedulers and the generators.

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
        checkpoint.read_weights(state.weights)
    for name, tensor in state.places(checkpoint, hidden, compiled).items():
        hidden[name].read(tensor)
    compiled.written_buffers.update(name.removeprefix(HIDDEN) for name in hidden)
    compiled.masters.restore(masters)  # after the parameters, because a write into parameters sets the masters
    for parameter in (names[name] for name in packed_parameters(checkpoint.manifest)):
        is_whole = isinstance(compiled.masters.get(parameter), WholeMaster | None)
        give_new_state(optimizers, parameter, parameter.dtype if is_whole else torch.float32)
    checkpoint.read_optimizer(optimizers, names)
    saved_schedulers.restore(checkpoint, extra, scheduler)
    saving.restore_generators(generators, compiled.options.device)
    return Progress(**extra["progress"]), extra["user"]


class _Progress(TypedDict):
    count: Count
    skipped: Count
    nonfinite: str | None
    grad_norm: torch.Tensor | None


class _FirstExtra(TypedDict):
    """What `save` has stored as values under the first schema of the manifest."""

    progress: _Progress
    generators: Any  # check_generators says more
    modules: dict[str, Any]
    user: dict[Any, Any]
    scheduler: dict[Any, Any] | None


class _Newest(TypedDict):
    """The same under the newest schema; of several schedulers a list."""

    progress: _Progress
    generators: Any
    modules: dict[str, Any]
    user: dict[Any, Any]
    scheduler: dict[Any, Any] | list[dict[Any, Any]] | None
    scheduler_class: str | list[str] | None


class _Extra(_Newest, total=False):
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
    kind = _FirstExtra if checkpoint.manifest.schema == 1 else _Extra
    missing = kind.__required_keys__ - checkpoint.extra.keys()
    if missing:
        raise CheckpointError(
            f"`{checkpoint.folder}` was not written by TrainStep.save: it lacks {', '.join(sorted(missing))}.\n"
            "  A step can continue only with everything that the next step depends on.\n"
            "  Read it with megatrain.saving.load, or its weights with megatrain.compile(weights=...)."
        )
    try:
        of_kind(checkpoint.extra, kind, "extra")
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
            "  Load an older checkpoint, or single values with megatrain.saving.load."
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
