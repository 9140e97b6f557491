"""Every model, compiled, trains as eager PyTorch does: outputs, gradients, buffers, updates, random state."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from tests.models import MODELS
from tests.runtime.parity import assert_parity

# The order of a sum differs from eager's where a parameter has several uses inside one block and more in another:
# eager adds term by term, a block adds its own terms first. Two ways to add n fp32 terms differ by less than
# n * 2**-23 of the sum of their sizes; AdamW's first steps (sign-like) can magnify that in a parameter by 1/eps-scale
# only where a gradient is rounding noise itself, which these models don't have.
REASSOCIATED: dict[str, float] = {}

MODES: dict[str, dict[str, Any]] = {
    "bind": {"transfer": "bind", "activations": "recompute"},
    "copy": {"transfer": "copy", "activations": "recompute"},
    "offload": {"transfer": "copy", "activations": "offload"},
    "keep": {"transfer": "copy", "activations": "keep"},
}
"""Without options each model takes one of the paths above."""


@pytest.mark.parametrize(("name", "mode"), list(zip(MODELS, cycle(MODES), strict=False)))
def test_training_equals_eager(name: str, mode: str) -> None:
    """Each model takes one of the paths; `test_random_backwards.py` draws both."""
    model, args, kwargs = MODELS[name]()
    assert_parity(model, args, kwargs, tolerance=REASSOCIATED.get(name, 0.0), **MODES[mode])
