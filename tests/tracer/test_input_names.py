"""Inputs have the names that the forward's own signature gives them, in every text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.tracer.arguments import Arguments
from megatrain.tracer.trace import trace

X = torch.ones(2, 3)


def _module(forward: Callable[..., Any]) -> nn.Module:
    return type("Model", (nn.Module,), {"forward": forward})()


def _names(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """The names of a call's inputs, which those of its graph must equal."""
    arguments = Arguments.of(model, args, kwargs)
    assert tuple(node.name for node in trace(model, args, kwargs).inputs) == arguments.names
    return arguments.names


def _plain(self: Any, ids: Any, labels: Any = None) -> Any:
    return ids + labels


def _only(self: Any, hiddenStates: Any, /, *, mask: Any) -> Any:
    return hiddenStates + mask


def _rest(self: Any, first: Any, *args: Any) -> Any:
    return first + sum(args)


def _any(self: Any, *inputs: Any, **options: Any) -> Any:
    return sum(inputs) + sum(options.values())


def _nested(self: Any, batch: Any, scale: Any) -> Any:
    return (batch["ids"] + batch["pair"][1]) * scale


def _taken(self: Any, input: Any, id: Any, λ: Any) -> Any:
    return input + id + λ


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "names"),
    [
        (_plain, (X, X), {}, ("ids", "labels")),
        (_plain, (), {"labels": X, "ids": X}, ("labels", "ids")),
        (_only, (X,), {"mask": X}, ("hiddenStates", "mask")),
        (_rest, (X, X, X), {}, ("first", "args_0", "args_1")),
        (_any, (X, X), {"inputs_0_1": X, "inputs_0": X}, ("inputs_0", "inputs_1", "inputs_0_1", "inputs_0_2")),
        (_any, (), {"class": X, "two words": X}, ("class_", "arg_two_words")),
        (_nested, (), {"batch": {"ids": X, "pair": (X, X)}, "scale": 2}, ("batch_ids", "batch_pair_0", "batch_pair_1")),
        (_taken, (X, X, X), {}, ("input_", "id_", "arg__")),
    ],
)
def test_inputs_have_the_words_of_the_signature(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
):
    assert _names(_module(forward), *args, **kwargs) == names
