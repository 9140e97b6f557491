"""The law of user code: what users' own code does, and sees, is eager PyTorch's, or megatrain says why not."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import event, example, given, reject

from tests.draws import draws
from tests.training.situations import Training, check, judged, trainings

ROOT = Path(__file__).parents[2]
RUNS_WITHOUT_EFFECT = (
    "exact_fakes(",
    "FakeTensorMode(",
    "unnoticed(",
    "impostor(",
    "over_stand_ins(",
    "graphs.record(",
)
"""Calls by which code of users runs on what it isn't for, or is recorded; each file that has one is in the table."""
TOOLS = ("torch_features.py", "torch_probes.py", "passes/exact_fakes.py")  # run no code of users


@draws(200, usual=25)
@given(it=trainings())
@example(it=Training(layers=("counter",), edits=((2, "steps", "hold", 0),)))
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
