"""A script that torchrun starts in several processes: a trainer, of which one process may die in the middle."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.integrations.runs import run
from tests.integrations.several import SCENARIOS


class Dies(TrainerCallback):
    """Ends the process of the last rank behind an update, without a word."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends it."""
        if state.global_step == 4 and args.process_index == args.world_size - 1:
            os._exit(7)


def main(folder: Path, how: str) -> None:
    """Trains; the first process leaves what it has."""
    scenario = SCENARIOS["saved"]
    if how == "dies":
        scenario = type(scenario)(**{**vars(scenario), "more": lambda model: {"callbacks": [Dies()]}})
    found = run(scenario, folder, streams=True, resume_from_checkpoint=how == "resumed")
    if found.trainer.args.process_index == 0:
        torch.save((found.values, found.log), folder / "end.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
