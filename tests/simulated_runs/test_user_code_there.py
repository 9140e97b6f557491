"""The law of user code on the simulated device, with recorded kernels and without: tests/training/test_user_code.py."""

from __future__ import annotations

from hypothesis import event, example, given, reject

from tests.draws import draws
from tests.simulated_device.loading import load
from tests.simulated_runs.on_device import DEVICE
from tests.training.situations import Training, check, trainings

GRAPHS = {"device": DEVICE, "kernels": "graphs"}
HOOKED = Training(
    layers=("linear",), is_loop=True, compile={"device": DEVICE}, edits=((0, "start", "logging hooks", 0),)
)
EMPTY = Training(layers=("odd",), compile={"device": DEVICE, "block_bytes": 1}, edits=HOOKED.edits)
CHANGED = ((3, "steps", "tables", 3),)


@draws(100, usual=5)
@given(it=trainings(device=DEVICE))
@example(it=HOOKED)
@example(it=EMPTY)
@example(it=Training(layers=("of table",) * 3, compile=GRAPHS, edits=CHANGED))
@example(it=Training(layers=("operator",) * 3, compile=GRAPHS, edits=CHANGED))
def test_user_code_has_eagers_results_or_is_refused_by_name(it: Training) -> None:
    load().reset()
    outcome = check(it)
    event(outcome)
    if outcome == "refused by eager":
        reject()
