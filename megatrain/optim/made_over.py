"""An optimizer that is given by its class, made over parameters that have no memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from megatrain.checks import Rule
from megatrain.checks.several_optimizers import several_fault
from megatrain.errors import OptionError
from megatrain.optim.impostor import Optimizer
from megatrain.optim.rehearsal import empty
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.spec import TensorSpec


def made_over(
    kind: type[Optimizer] | str, specs: Mapping[str, TensorSpec]
) -> tuple[Optimizer, Mapping[str, torch.Tensor]]:
    """Makes an optimizer with its default options over parameters that have no memory.

    Args:
        kind: A class, or the name of one in `torch.optim`.
        specs: The parameters by key.

    Returns:
        The optimizer, and its parameters by key.

    Raises:
        OptionError: If it can't be made so.
    """
    make: Any = _class_of(kind)
    name = make.__name__
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = {key: torch.nn.Parameter(empty(spec)) for key, spec in specs.items()}
        try:
            return make(list(parameters.values())), parameters
        except Exception as error:  # the constructor of a user's class may raise anything
            raise OptionError(
                f"optimizer={name} can't be made over all trained parameters of the model: {error}\n"
                "  plan calls the class with all trained parameters, in one group with default options.\n"
                "  Give an optimizer over the parameters that you want to train; on meta it takes no memory."
            ) from error


def _class_of(kind: object) -> object:
    return getattr(torch.optim, kind, None) if isinstance(kind, str) else kind


def _fault(value: object) -> str | None:
    if isinstance(value, list | tuple):
        return several_fault(value)
    kind = _class_of(value)
    is_known = isinstance(kind, Optimizer) or (isinstance(kind, type) and issubclass(kind, Optimizer))
    return None if is_known else "is not known"


OPTIMIZER = Rule(
    "an optimizer over the model's parameters, a list of several, a class, or the name of a class in torch.optim",
    '{name}="AdamW"',
    _fault,
)
"""What `made_over` takes, and optimizers themselves."""
