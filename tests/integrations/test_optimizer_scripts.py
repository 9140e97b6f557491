"""Optimizers by the names of training arguments, of packages that few have, and of users: the stock run's bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock
from tests.integrations.test_trainer import ACCUMULATED
from tests.integrations.test_trainer_options import SAVED

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
ALL = "the optimizer can't update in a training step"
LINEAR = {"optim_target_modules": "all-linear"}


SCENARIOS: dict[str, tuple[str | None, Scenario]] = {
    "galore": (
        "galore_torch",
        Scenario({"optim": "galore_adamw", **LINEAR, "optim_args": "rank=4, update_proj_gap=2"}),
    ),
    "galore, accumulation": (
        "galore_torch",
        Scenario({"optim": "galore_adamw", **LINEAR, **ACCUMULATED, "optim_args": "rank=4"}),
    ),
    "galore, adafactor": ("galore_torch", Scenario({"optim": "galore_adafactor", **LINEAR, "optim_args": "rank=4"})),
    "galore, layer by layer": (
        "galore_torch",
        Scenario({"optim": "galore_adamw_layerwise", **LINEAR, "optim_args": "rank=4"}, reason=ALL),
    ),
    "apollo": ("apollo_torch", Scenario({"optim": "apollo_adamw", **LINEAR, "optim_args": "rank=4"})),
    "apollo, layer by layer": (
        "apollo_torch",
        Scenario({"optim": "apollo_adamw_layerwise", **LINEAR, "optim_args": "rank=4"}, reason=ALL),
    ),
    "lomo": ("lomo_optim", Scenario({"optim": "lomo", "max_grad_norm": 0.0}, reason=ALL)),
    "lomo, clipped": ("lomo_optim", Scenario({"optim": "lomo"}, reason=ALL)),
    "grokadamw": ("grokadamw", Scenario({"optim": "grokadamw", **ACCUMULATED})),
    "schedule-free adamw": (
        "schedulefree",
        Scenario({"optim": "schedule_free_adamw", **ACCUMULATED, "lr_scheduler_type": "constant"}),
    ),
    "schedule-free sgd": (
        "schedulefree",
        Scenario(
            {
                "optim": "schedule_free_sgd",
                **SAVED,
                "lr_scheduler_type": "constant",
                "eval_strategy": "steps",
                "eval_steps": 1,
            }
        ),
    ),
    "schedule-free radam": (
        "schedulefree",
        Scenario({"optim": "schedule_free_radam", "lr_scheduler_type": "constant"}),
    ),
    "stable adamw": ("optimi", Scenario({"optim": "stable_adamw", **ACCUMULATED})),
    "ademamix": ("bitsandbytes", Scenario({"optim": "ademamix"})),
    "adamw of torchao": ("torchao", Scenario({"optim": "adamw_torch_8bit"})),
    "adafactor, saved": (None, Scenario({"optim": "adafactor", **SAVED, **ACCUMULATED}, rows=RAGGED)),
    "rprop": (None, Scenario(more=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Rprop, {"lr": 0.01})})),
    "asgd": (None, Scenario(more=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.ASGD, {"lr": 0.01})})),
    "radam": (
        None,
        Scenario(
            more=lambda model: {
                "optimizer_cls_and_kwargs": (
                    torch.optim.RAdam,
                    {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
                )
            }
        ),
    ),
    "adadelta": (None, Scenario(more=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adadelta, {"lr": 0.1})})),
    "torch adafactor": (
        None,
        Scenario(more=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 0.01})}),
    ),
    "maximize": (
        None,
        Scenario(
            more=lambda model: {
                "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "maximize": True, "foreach": True})
            }
        ),
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_optimizer_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    package, scenario = SCENARIOS[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    assert_streams_as_stock(scenario, tmp_path)
