"""Every case of the zoo trains as in eager PyTorch, or is refused where it says so: at night, and by `make zoo`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.zoo.case import Case
from tests.zoo.collect import cases
from tests.zoo.run import CLOSE, Trained, judge, run

CASES = cases()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # what models say about themselves isn't ours to mend
@pytest.mark.parametrize("name", CASES)
def test_trains_as_eager_or_is_refused(name: str) -> None:
    case, row = CASES[name], run(CASES[name])
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


def test_verdict_sees_generators_types_and_missing_tensors_and_a_model_that_fails_in_eager() -> None:
    assert judge(_trained(), dataclasses.replace(_trained(), rng=("other",)))[0] == "WRONG"
    assert judge(_trained(), dataclasses.replace(_trained(), kinds=[list]))[0] == "WRONG"
    found = _trained()
    del found.tensors[0, "gradient", "b"]
    assert judge(_trained(), found)[0] == "WRONG"
    row = run(Case("broken", "none", torch.nn.Identity, lambda _: ((torch.ones(2),), {})))
    assert (row.result, row.detail.startswith("eager fails: ValueError")) == ("skipped", True)
