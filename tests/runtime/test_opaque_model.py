"""A model that is one opaque block is heard of, and may be refused."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OpaqueModelWarning, OptionError, TraceError


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * random.random()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Skipping()

    def forward(self, x):
        return self.inner(x) + 1


def test_a_model_of_one_opaque_block_is_heard_of_once_with_the_reason():
    compiled = megatrain.compile(Skipping(), device="cpu")
    with pytest.warns(OpaqueModelWarning, match=r"it draws from or seeds `random or numpy.random`") as caught:
        assert [compiled(torch.ones(n, 4)).shape[0] for n in (2, 3)] == [2, 3]
    assert len(caught) == 1
    assert "all weights must fit on the device" in str(caught[0].message)


def test_the_reason_names_the_users_line():
    class Asking(nn.Linear):
        def forward(self, x):
            return torch.func.vmap(super().forward)(x)

    with pytest.warns(OpaqueModelWarning, match=r"transform of torch.func at test_opaque_model.py:\d+"):
        megatrain.compile(Asking(4, 4), device="cpu", example_args=(torch.ones(2, 4),))


def test_it_can_be_refused():
    model = Skipping()
    compiled = megatrain.compile(model, device="cpu", opaque="refuse")
    with pytest.raises(TraceError, match=r"the whole model is one opaque block: it draws from"):
        compiled(torch.ones(2, 4))
    with pytest.raises(TraceError, match="the whole model is one opaque block"):
        compiled(torch.ones(2, 4))


def test_it_can_be_allowed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megatrain.compile(Skipping(), device="cpu", opaque="allow")(torch.ones(2, 4))


@pytest.mark.parametrize("opaque", ["warn", "refuse"])
def test_an_opaque_module_inside_is_nothing_to_warn_of(opaque: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megatrain.compile(Around(), device="cpu", opaque=opaque)(torch.ones(2, 4))


def test_a_plan_says_so_too():
    with pytest.warns(OpaqueModelWarning):
        megatrain.plan(Skipping(), torch.ones(2, 4))


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(OptionError, match=r'opaque="?\'?always'):
        megatrain.compile(Skipping(), opaque="always")
