"""Situations of training, drawn at random, against eager PyTorch: the law of tests/training/test_user_code.py."""

from __future__ import annotations

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine

from tests.faults.tally import Tally
from tests.simulated_device.loading import is_loaded
from tests.training.situations import Training, judged, trainings

PIECE = 50
SHRINKING_S = 60


def configurations(tally: Tally, *, seed: int, first: int, count: int) -> None:
    """Tries `count` situations in pieces that each have a seed; on the simulated device where it is loaded."""
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S
    for number, begun in enumerate(range(0, count, PIECE)):
        _piece(tally, seed + first + number, min(PIECE, count - begun))


def _piece(tally: Tally, seed: int, size: int) -> None:
    """Tries until one fails, which hypothesis then makes smaller."""
    held: list[str] = []
    failed: list[str] = []

    def tried(it: Training) -> None:
        outcome, text = judged(it)
        if outcome == "silent":
            failed.append(f'{text}; python -m tests.training.situations "{it}"')
        elif not failed:
            held.append(outcome)
        assert outcome != "silent"

    options = settings(
        max_examples=size,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        phases=[Phase.generate, Phase.shrink],
    )
    repeat, device = f"--only configurations --seed {seed}", "sim" if is_loaded() else "cpu"
    try:
        hypothesis.seed(seed)(options(hypothesis.given(trainings(device))(tried)))()
    except Exception as error:
        tally.add("user code: silent", failed[-1] if failed else f"{type(error).__name__}: {error}", repeat)
    for outcome in held:
        tally.add(f"user code: {outcome}", None, repeat)
