"""The law of user code: what users' own code does, and sees, is eager PyTorch's, or megatrain says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import event, example, given, reject

from tests.draws import draws
from tests.training.situations import Training, check, judged, trainings

ROOT = Path(__file__).parents[2]
RUNS_WITHOUT_EFFECT = (
    "exact_fakes(",
    "FakeTensorMode(",
    "unnoticed(",
    "proxy_of(",
    "over_stand_ins(",
    "graphs.record(",
)
"""Calls by which code of users runs on what it isn't for, or is recorded; each file that has one is in the table."""
TOOLS = ("base/torch_features.py", "optim/moments.py", "passes/interpret.py")  # run no code of users


TELLING = (
    Training(layers=("counter",), edits=((2, "steps", "hold", 0),)),
    # Hooks: their order, what they see, and what they make of it.
    Training(
        ("dropout", "partly frozen"), True, edits=((0, "start", "logging hooks", 0), (1, "steps", "post hook", 1))
    ),
    Training(
        ("skip", "layer norm"), is_loop=True, edits=((0, "start", "drawing hooks", 1),), compile={"block_bytes": 1}
    ),
    Training(("counts", "running mean"), edits=((0, "start", "hook and buffers", 1),), step={"spread": True}),
    Training(
        ("batch norm",), optimizer="adam", edits=((1, "steps", "weights in hook", 0),), max_norm=0.05, looks=False
    ),
    Training(("activation hook", "module hook"), loss="logging", step={"overlap": False}),
    # Losses with state, or that write buffers; draws of Python and of torch, of the model and of the loss.
    Training(("running mean", "tanh"), loss="writing", max_norm=1.0),
    Training(("counts",), loss="behind object", sizes=(2, 3), step={"spread": True}, looks=False),
    Training(("python draws", "draws", "restarts"), loss="drawing", compile={"activations": "recompute"}),
    # Optimizers that couple parameters, and what is frozen between steps.
    Training(("tanh", "batch norm"), optimizer="coupled", number=1, num_groups=2, max_norm=0.05, sizes=(2, 3)),
    Training(
        ("linear",), optimizer="neighbours", edits=((2, "steps", "turn", 3), (4, "steps", "turn", 3)), looks=False
    ),
    Training(("frozen", "linear"), optimizer="noisy", number=1, edits=((1, "steps", "moments", 2),), max_norm=1.0),
)


def of_telling(test: Any) -> Any:
    for it in TELLING:
        test = example(it=it)(test)
    return test


@draws(200, usual=25)
@given(it=trainings())
@of_telling
def test_user_code_has_eagers_results_or_is_refused_by_name(it: Training) -> None:
    outcome = check(it)
    event(outcome)
    if outcome == "refused by eager":
        reject()


def test_the_law_sees_what_differs_and_what_is_named() -> None:
    """Stands for all draws: one run that is equal, one that is refused, and what an error without a name counts as."""
    assert judged(Training(layers=("dropout", "counts"), loss="counting"))[0] == "equal"
    assert judged(Training(optimizer="sharing"))[0] == "equal"  # it updates all parameters at once
    outcome, text = judged(Training(loss="of weights"))
    assert outcome == "named"
    assert "the loss reads the parameter" in text


def test_the_table_of_mechanisms_is_whole() -> None:
    table = (ROOT / "docs" / "user-code.md").read_text()
    named = set(re.findall(r"`([a-z_/]+\.py)`", table)) - {"tests/training/test_user_code.py"}
    assert [name for name in named if not (ROOT / "megatrain" / name).exists()] == []
    files = {str(path.relative_to(ROOT / "megatrain")): path.read_text() for path in (ROOT / "megatrain").rglob("*.py")}
    using = {name for name, text in files.items() if any(call in text for call in RUNS_WITHOUT_EFFECT)}
    assert using - named - set(TOOLS) == set()
    classes = set(re.findall(r"`(\w+(?:Error|Warning))`", table))
    assert [name for name in classes if f"class {name}(" not in files["errors.py"]] == []
