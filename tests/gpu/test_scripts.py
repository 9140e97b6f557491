"""Scripts with transformers' Trainer on an accelerator, where the stock trainer moves its model there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations import test_peft, test_trainer
from tests.integrations.runs import assert_streams_as_stock
from tests.simulated_device import is_loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(is_loaded(), reason="the simulated device is none that accelerate knows"),
]
SCENARIOS = {**test_trainer.SCENARIOS, **test_peft.SCENARIOS}
OF_THE_CPU = ("a scaler of the loss",)  # makes one that a GPU's fp16 has anyway
# On a CPU accelerate makes no scaler for fp16.
SCALES = "fp16 scales the loss"
COARSE = {"a model in bf16": 1e-2}  # a model rounded to bf16 after each update
EXACT_AFTER = ("callbacks", "reads gradients")  # compare numbers as text, or one by one
NAMES = [name for name in SCENARIOS if name not in OF_THE_CPU]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_that_streams_is_the_stock_run(name: str, tmp_path: Path) -> None:
    """Updates run on the host here and on the device there, whose roundings differ: SGD's only a little."""
    scenario = SCENARIOS[name]
    options = {"optim": "sgd", **scenario.options, "use_cpu": False}
    tolerance = max(scenario.tolerance, COARSE.get(name, 1e-5))
    reason = SCALES if options.get("fp16") else scenario.reason
    after = (lambda trainer: None) if name in EXACT_AFTER else scenario.after
    there = replace(scenario, options=options, tolerance=tolerance, reason=reason, after=after)
    assert_streams_as_stock(there, tmp_path)
