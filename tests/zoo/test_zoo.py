"""Every case of the zoo trains as in eager PyTorch, or is refused where it says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tiers import wide
from tests.zoo.case import Case
from tests.zoo.collect import cases
from tests.zoo.run import CLOSE, Trained, judge, run

CASES = cases()
ALIKE = {"mamba", "marian", "dinov2", "clip", "mixtral_batched", "whisper", "llava", "llama", "t5", "peft_lora"}
"""Much like mamba2, t5, swin, llava, the experts of tests/runtime/test_expert_models.py, t5 with convolutions before
it, a vit before a llama, and from `llama` on like those of tests/models.py and tests/integrations/test_peft.py."""
# What models say about themselves isn't ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few cases across the families; all of them where the marker is asked for."""
    if "case" in metafunc.fixturenames:
        wants_all = "zoo" in str(metafunc.config.getoption("-m"))
        chosen = [c for c in CASES.values() if wants_all or c.fast]
        chosen = [wide(c) if c.name in ALIKE and not wants_all else c for c in chosen]
        metafunc.parametrize("case", chosen, ids=lambda c: c.name)


@pytest.mark.zoo
def test_trains_as_eager_or_is_refused(case: Case) -> None:
    row = run(case)
    if row.result == "skipped":
        pytest.skip(row.detail)
    if row.result == "refused":
        assert case.refused is not None, f"refused: {row.detail}"
        assert case.refused in row.detail
    else:
        assert row.result in ("exact", "close"), row.detail


def _trained() -> Trained:
    tensors = {
        (0, "output", "0"): torch.tensor([1.0, 2.0]),
        (0, "gradient", "a"): torch.tensor([4.0]),
        (0, "gradient", "b"): None,
        (1, "output", "0"): torch.tensor([3.0]),
        (1, "output", "1"): torch.tensor([3]),
    }
    return Trained(tensors, [tuple], ("rng",))


@pytest.mark.parametrize(
    ("key", "value", "verdict"),
    [
        ((0, "output", "0"), torch.tensor([1.0, 2.0]), "exact"),
        ((0, "output", "0"), torch.tensor([1.0, 2.0000002]), "WRONG"),
        ((0, "gradient", "a"), torch.tensor([4.0 + 2 * CLOSE]), "close"),
        ((0, "gradient", "a"), torch.tensor([4.0 + 8 * CLOSE]), "WRONG"),
        ((0, "gradient", "a"), torch.tensor([float("nan")]), "WRONG"),
        ((0, "gradient", "a"), None, "WRONG"),
        ((0, "gradient", "b"), torch.tensor([0.0]), "WRONG"),
        ((0, "gradient", "a"), torch.tensor([4.0], dtype=torch.float64), "WRONG"),
        ((1, "output", "0"), torch.tensor([3.0001]), "close"),
        ((1, "output", "1"), torch.tensor([4]), "WRONG"),
    ],
)
def test_verdict_of_one_changed_tensor(key: tuple[int, str, str], value: torch.Tensor | None, verdict: str) -> None:
    found = _trained()
    found.tensors[key] = value
    assert judge(_trained(), found)[0] == verdict


def test_verdict_sees_generators_types_and_missing_tensors() -> None:
    assert judge(_trained(), dataclasses.replace(_trained(), rng=("other",)))[0] == "WRONG"
    assert judge(_trained(), dataclasses.replace(_trained(), kinds=[list]))[0] == "WRONG"
    found = _trained()
    del found.tensors[0, "gradient", "b"]
    assert judge(_trained(), found)[0] == "WRONG"


def test_a_model_that_fails_in_eager_says_so() -> None:
    case = Case("broken", "none", torch.nn.Identity, lambda _: ((torch.ones(2),), {}))
    row = run(case)
    assert row.result == "skipped"
    assert row.detail.startswith("eager fails: ValueError")
