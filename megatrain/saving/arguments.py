"""Arguments: what callers give to saving and loading, looked at before anything is done."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from megatrain.errors import CheckpointError, OptionError
from megatrain.runtime.json_rules import shown


def read_folder(folder: object) -> Path:
    """Returns the absolute path of a folder, links followed.

    Raises:
        OptionError: If it isn't a path, or one that no system takes.
        CheckpointError: If the system can't follow it.
    """
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else folder
    if not isinstance(path, str) or not path or "\0" in path or not _is_encodable(path):
        raise OptionError(
            f"folder={shown(path)} is not a path.\n  A checkpoint is a folder.\n"
            '  Give its path, as a text or a pathlib.Path: "runs/first".'
        )
    try:
        place = Path(path).resolve()
        place.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another
        raise CheckpointError(
            f"`{path[:200]}` can't be a folder: {str(error)[:300]}.\n"
            "  The system refuses the path itself.\n  Give another one."
        ) from error
    return place


def check_tensors(value: object, option: str, kinds: type | tuple[type, ...] = torch.Tensor) -> None:
    """Refuses what isn't tensors by name.

    Raises:
        OptionError: Naming the option.
    """
    problem = next(_problems(value, kinds), None)
    if problem is not None:
        raise OptionError(
            f"{option}= {problem}.\n  It holds tensors by name, as a state dict does.\n"
            f"  Give {option} a dict such as model.state_dict(keep_vars=True)."
        )


def check_mapping(value: object, option: str) -> None:
    """Refuses what is neither None nor a mapping.

    Raises:
        OptionError: Naming the option.
    """
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={shown(value)} is not a dict.\n  Its values come back from load by their names.\n"
            f'  Give {option} a dict such as {{"epoch": 3}}, or leave it out.'
        )


def check_function(value: object, option: str) -> None:
    """Refuses what is neither None nor can be called.

    Raises:
        OptionError: Naming the option.
    """
    if value is not None and not callable(value):
        raise OptionError(
            f"{option}={shown(value)} is no function.\n  It is called with the folder that is being written.\n"
            f"  Give {option} a function such as tokenizer.save_pretrained, or leave it out."
        )


def check_optimizer(value: object, *others: type) -> None:
    """Refuses what isn't an optimizer of torch or one of `others`.

    Raises:
        OptionError: If it is something else.
    """
    if not isinstance(value, (Optimizer, *others)):
        raise OptionError(
            f"optimizer={shown(value)} is no optimizer.\n  Its state is stored by the names of its parameters.\n"
            "  Give an optimizer of torch.optim, or of a subclass."
        )


def check_scheduler(value: object) -> None:
    """Refuses what is neither None nor has the two methods of a state.

    Raises:
        OptionError: If it is something else.
    """
    methods = [getattr(value, method, None) for method in ("state_dict", "load_state_dict")]
    if value is not None and (isinstance(value, type) or not all(map(callable, methods))):
        raise OptionError(
            f"scheduler={shown(value)} has no state.\n  It is stored by state_dict() and read by load_state_dict().\n"
            "  Give an LR scheduler, another object with these two methods, or leave it out."
        )


def _problems(value: object, kinds: type | tuple[type, ...]) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"is {shown(value)}, not a dict"
        return
    for name, tensor in cast(Mapping[Any, Any], value).items():
        if not isinstance(name, str):
            yield f"has the name {shown(name)}, which is no text"
        if not isinstance(tensor, kinds):
            yield f"has {shown(tensor)} under {shown(name)}, which is no tensor"


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except ValueError:
        return False
    return True
