"""Case: a model with tiny random weights, and the inputs of each training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Build = Callable[[], nn.Module]
Inputs = Callable[[int], Sample]


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Args:
        name: Unique in the zoo.
        family: The file it is in.
        build: Makes the model in train mode, dropout on where it has one. Called once for each run with equal seeds.
        inputs: Arguments of the call in a training step (from 0); seeded by the step, so that values differ.
        needs: Packages beyond transformers; without them the case is skipped.
        refused: Part of the reason with which megatrain refuses the model, where that is right.
        optimizer: Name of a class in torch.optim.
    """

    name: str
    family: str
    build: Build
    inputs: Inputs
    needs: tuple[str, ...] = ()
    refused: str | None = None
    optimizer: str = "AdamW"


class Family:
    """The cases of one file, in order; calling it adds one."""

    def __init__(self, name: str, needs: tuple[str, ...] = ()):
        self.name = name
        self.needs = needs
        self.cases: list[Case] = []

    def add(self, name: str, build: Build, inputs: Inputs, **options: Any) -> None:
        """Adds a case."""
        options = {"needs": self.needs} | options
        self.cases.append(Case(name, self.name, build, inputs, **options))

    def transformers(
        self, name: str, model: str, config: Mapping[str, Any] | Callable[[Any], Any], inputs: Inputs, **options: Any
    ) -> None:
        """Adds a model of transformers by its class name; `config` is its settings, or makes it from the package."""
        self.add(name, lambda: from_config(model, config), inputs, **options)


def from_config(model: str, config: Mapping[str, Any] | Callable[[Any], Any]) -> nn.Module:
    """Builds a model of transformers with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, model)
    made = config(transformers) if callable(config) else cls.config_class(**config)
    return cls(made).train()


def varied(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that models have in common, with the changes of one; None drops a setting."""
    return {key: value for key, value in {**settings, **changes}.items() if value is not None}


def tokens(
    vocab: int = 64,
    length: int = 7,
    *,
    batch: int = 2,
    labels: bool = True,
    mask: str = "none",
    **fixed: Any,
) -> Inputs:
    """Inputs of a language model; `mask` is `"none"`, `"ones"` or `"padded"` (on the right, by step)."""

    def inputs(step: int) -> Sample:
        ids = torch.randint(3, vocab, (batch, length))
        given: dict[str, Any] = {"input_ids": ids}
        if mask != "none":
            keep = torch.ones(batch, length, dtype=torch.int64)
            if mask == "padded":
                keep[-1, length - 2 - step :] = 0
            given["attention_mask"] = keep
        if labels:
            given["labels"] = ids.masked_fill(given["attention_mask"] == 0, -100) if mask == "padded" else ids.clone()
        return (), given | fixed

    return inputs


def seq2seq(vocab: int = 64, length: int = 7, target: int = 5, **fixed: Any) -> Inputs:
    """Inputs of an encoder-decoder language model."""

    def inputs(_: int) -> Sample:
        ids, labels = torch.randint(3, vocab, (2, length)), torch.randint(3, vocab, (2, target))
        return (), {"input_ids": ids, "labels": labels} | fixed

    return inputs


def pictures(size: int = 8, *, channels: int = 3, classes: int = 0, **fixed: Any) -> Inputs:
    """Inputs of an image model, with labels if `classes` is given."""

    def inputs(_: int) -> Sample:
        given: dict[str, Any] = {"pixel_values": torch.randn(2, channels, size, size)}
        if classes:
            given["labels"] = torch.randint(0, classes, (2,))
        return (), given | fixed

    return inputs


def normal(*shapes: tuple[int, ...]) -> Inputs:
    """Positional inputs drawn from the normal distribution."""
    return lambda _: (tuple(torch.randn(shape) for shape in shapes), {})
