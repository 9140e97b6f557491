"""Config: the files next to the weights that `from_pretrained` needs to build the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.errors import CheckpointError

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
