"""The models of `megatrain plan`, at any sizes: of a configuration, or of somebody's function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.errors import OptionError
from megatrain.planning.equal_layers import Layers
from megatrain.planning.model_sizes import (
    DEPTH,
    LORA,
    MICRO_BATCH,
    SEQUENCE,
    ExampleSizes,
    ModelSizes,
    model_and_inputs,
)
from megatrain.tools.command_targets import importable, target_function, users_failures
from megatrain.tools.finetune.pretrained import (
    Adapters,
    longest,
    model_on_paper,
    need_libraries,
    positions_of,
    read_config,
)
from megatrain.tools.sizing.known_models import known
from megatrain.tools.sizing.sizing_options import LENGTH, SizingOptions
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.source_line import original

# Lists of a configuration with an entry for each layer that can be cut, or repeated from their beginning.
_PER_LAYER = ("layer_types",)


def sized_model(options: SizingOptions) -> ModelSizes:
    """The model that a command names, on meta.

    Raises:
        OptionError: If there is none, or it can't be made.
    """
    if ":" in options.config and not Path(options.config).exists():
        return _of_function(options)
    need_libraries("plan", "transformers", "accelerate", *(["peft"] if options.lora else []))
    return ConfigModel(options)


class ConfigModel:
    """A language model of a configuration: its micro-batch, sequence, depth and adapters can change.

    Raises:
        OptionError: If the configuration can't be read.
    """

    def __init__(self, options: SizingOptions) -> None:
        self._path = options.config
        self._precision = options.precision
        known_model = None if Path(options.config).exists() else known(options.config)
        self._config: Any = read_config(options.config) if known_model is None else known_model.config()
        self._models: dict[tuple[int, int], Any] = {}
        text = self._config.get_text_config()
        depth = getattr(text, "num_hidden_layers", None)
        self._positions = positions_of(self._config)
        self.sizes: Mapping[str, int] = {
            MICRO_BATCH: options.micro_batch or 1,
            SEQUENCE: longest(self._config, options.sequence, LENGTH, "--sequence"),
            LORA: options.lora,
        }
        self.fixed: Mapping[str, str] = {}
        reason = _fixed_depth(text, depth)
        if reason is None:
            assert isinstance(depth, int)
            self.sizes = {**self.sizes, DEPTH: depth}
        else:
            self.fixed = {DEPTH: reason}

    def check(self) -> None:
        """Nobody else has the model, so it can't have changed."""

    def made(self, sizes: Mapping[str, int]) -> tuple[nn.Module, Arguments]:
        """As `ModelSizes.made`.

        Raises:
            OptionError: If it isn't a language model that transformers knows, or has less positions.
        """
        if self._positions is not None and sizes[SEQUENCE] > self._positions:
            raise OptionError(
                f"a sequence of {sizes[SEQUENCE]} tokens is longer than what the model takes: {self._positions}.\n"
                "  A model has `max_position_embeddings` positions, by its configuration.\n"
                f"  Take {self._positions} tokens, or less."
            )
        model = self._model(sizes.get(DEPTH, 0), sizes[LORA])
        ids = torch.zeros(sizes[MICRO_BATCH], sizes[SEQUENCE], dtype=torch.long, device="meta")
        return model, Arguments.of(model, (), {"input_ids": ids, "labels": ids})

    def few(self, sizes: Mapping[str, int]) -> tuple[nn.Module, Arguments, Layers] | None:
        """As `ModelSizes.few`."""
        if DEPTH not in self.sizes:
            return None
        layers = Layers.of(self._model(sizes[DEPTH], sizes[LORA]))
        if layers is None or layers.count != sizes[DEPTH] or layers.fewest >= layers.count:
            return None
        model, arguments = self.made({**sizes, DEPTH: layers.fewest})
        return (model, arguments, layers) if layers.begins_like(Layers.of(model)) else None

    def _model(self, depth: int, rank: int) -> Any:
        if (depth, rank) not in self._models:
            config = copy.deepcopy(self._config)
            text = config.get_text_config()
            if depth and depth != text.num_hidden_layers:
                for name in _PER_LAYER:
                    types = getattr(text, name, None)
                    if types:
                        setattr(text, name, [types[i % len(types)] for i in range(depth)])
                text.num_hidden_layers = depth
            adapters = Adapters(rank, 2.0 * rank) if rank else None
            model: Any = model_on_paper(self._path, config, self._precision, adapters)
            model.train()
            model.config.use_cache = False  # as trainers do: otherwise keys and values would be results
            self._models[depth, rank] = model
        return self._models[depth, rank]


def _fixed_depth(text: Any, depth: object) -> str | None:
    """Why a configuration can't have another number of layers; None if it can."""
    if not isinstance(depth, int) or depth < 1:
        return "the configuration has no num_hidden_layers"
    lists = [
        name
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == depth and name not in _PER_LAYER
    ]
    return (
        f"the configuration says something of each layer: {', '.join(sorted(lists))}" if lists and depth > 1 else None
    )


def _of_function(options: SizingOptions) -> ModelSizes:
    """The model of a function, made on meta: with the inputs that it returns, or with token ids and labels."""
    if options.lora:
        raise OptionError(
            f"--lora and the function `{options.config}` are both given.\n"
            "  Adapters are put into models of configurations. What a function returns is planned as it is.\n"
            "  Put the adapters in within the function, and leave --lora out."
        )
    with importable(options.config):
        made = _called(options.config, target_function(options.config))
    length = options.sequence or LENGTH
    if isinstance(made, nn.Module):
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        made = made, {"input_ids": ids, "labels": ids}
    model, args, kwargs = model_and_inputs(made, f"`{options.config}`")
    model = original(model)
    source = ExampleSizes(model, Arguments.of(model, args, kwargs))
    wanted = {SEQUENCE: options.sequence, MICRO_BATCH: options.micro_batch}
    for name, number in wanted.items():
        if number is not None and name not in source.sizes:
            raise OptionError(
                f"--{name.replace('_', '-')} {number} can't be: {source.fixed[name]}.\n"
                f"  The inputs are those that `{options.config}` returns.\n"
                f"  Leave the option out, or return inputs that have such a size."
            )
    source.sizes = {**source.sizes, **{name: number for name, number in wanted.items() if number is not None}}
    return source


def _called(target: str, function: Callable[[], Any]) -> Any:
    with users_failures(f"`{target}`"), torch.device("meta"):
        return function()
