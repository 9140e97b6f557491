"""Random models on two or three ranks under chaos, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from megatrain.errors import MegatrainError
from tests.comparing import assert_same
from tests.draws import draws
from tests.ranks.processes import Processes
from tests.ranks.sides import EDITS, MODES, Case, eager_drawn, train_drawn
from tests.strategies import (
    WIDTH,
    Branch,
    Frozen,
    Halves,
    NoGrad,
    Odd,
    Skip,
    WritesInput,
    WritesView,
    module_trees,
)

# Without buffers that a forward writes and parts that can't be captured: several ranks refuse these.
LEAVES = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
    lambda: nn.ReLU(inplace=True),
    nn.Tanh,
    WritesInput,
    Frozen,
    Odd,
)
# Nor `Dead`, which draws: each rank draws from its own generators.
WRAPPERS = (Skip, Halves, WritesView, NoGrad, Branch)
# What ranks can't do, and say so: micro-batches that run other layers, on one rank or on several.
REFUSED = "differs from micro-batch 0", "the ranks differ: what block"


@st.composite
def trainings(draw: st.DrawFn) -> tuple[nn.Module, Case]:
    """A model, and how it is trained for two steps: with a micro-batch on each rank, or with several."""
    parts = st.lists(module_trees(leaves=LEAVES, wrappers=WRAPPERS), min_size=1, max_size=2)
    model = nn.Sequential(*draw(parts))
    size, is_eager = draw(st.integers(2, 3)), draw(st.booleans())
    counts = st.tuples(*[st.integers(1, 2) if is_eager else st.just(1)] * size)
    compile: dict[str, Any] = {
        "transfer": draw(st.sampled_from(["auto", "copy"])),
        "precision": "fp32" if is_eager else draw(st.sampled_from(["fp32", "bf16"])),
        "activations": draw(st.sampled_from(["auto", "recompute", "offload"])),
    }
    return model, Case(
        "drawn",
        draw(st.sampled_from(sorted(MODES))),
        [draw(counts), draw(counts)],
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        compile=compile,
        is_weighted=draw(st.booleans()),
        looks=draw(st.booleans()),
        chaos=draw(st.none() | st.integers(0, 999)),
        edits="" if is_eager else draw(st.sampled_from(["", *EDITS])),
        hooks=not is_eager and draw(st.booleans()),
    )


def outcome(model: nn.Module, case: Case) -> Any:
    """What the ranks have to find: by one process, or by eager PyTorch where a rank has several micro-batches."""
    try:
        is_each = all(count == 1 for counts in case.deal for count in counts)
        return train_drawn(None, case, model) if is_each else eager_drawn(case, model)
    except (MegatrainError, RuntimeError) as error:
        return error


@pytest.mark.nightly
@given(training=trainings())
@draws(120, usual=8)
def test_ranks_train_random_models_with_the_bits_of_one_process(training: tuple[nn.Module, Case], three: Processes):
    model, case = training
    expected = outcome(model, case)
    found = three.run(train_drawn, case, model)[: len(case.deal[0])]
    if isinstance(expected, BaseException) or any(isinstance(each, BaseException) for each in found):
        event("refused")
        said = [f"{type(each).__name__}: {each}" if isinstance(each, BaseException) else "" for each in found]
        assert all(isinstance(each, MegatrainError | RuntimeError) for each in found), said
        if not isinstance(expected, BaseException):
            assert any(text in each for text in REFUSED for each in said), said
        return
    event("the same bits")
    for rank, each in enumerate(found):
        names = expected.keys() & each.keys()
        assert {"losses", "parameters", "optimizers"} <= names
        assert_same({name: expected[name] for name in names}, {name: each[name] for name in names}, f"rank {rank}")
