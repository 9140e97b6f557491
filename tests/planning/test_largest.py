"""plan.largest: the largest size of which megatrain.plan says that it fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptionError, ScheduleError
from tests.nightly import nightly
from tests.planning.steps import IDS, on_meta, planned


@pytest.mark.parametrize("hardware", ["rtx-4090", nightly(None)])  # the largest sequence has none
def test_the_largest_micro_batch_fits_and_the_next_does_not(hardware: str | None):
    found = planned(hardware=hardware).largest("micro_batch")
    assert found.size > 1
    largest, next_one = (
        planned(ids=torch.zeros(size, 8, dtype=torch.long), hardware=hardware) for size in (found.size, found.size + 1)
    )
    assert largest.fits
    assert not next_one.fits
    assert found.too_large == found.size + 1
    assert str(found.plan) == str(largest)
    assert str(found).startswith(f"largest micro_batch: {found.size}; at {found.size + 1}: ")


@pytest.mark.nightly
def test_the_largest_sequence_has_the_same_rows():
    found = planned(hardware=None).largest("sequence")
    assert found.too_large == found.size + 1 > IDS.shape[1]
    for size in (found.size, found.size + 1):
        assert planned(ids=torch.zeros(4, size, dtype=torch.long), hardware=None).fits == (size == found.size)


def test_multiples_and_a_bound_are_kept():
    found = planned(hardware=None).largest("micro_batch", multiple=2)
    assert found.size % 2 == 0
    assert found.too_large == found.size + 2
    bounded = planned(device_memory="1GiB", host_memory="1GiB", hardware=None).largest("micro_batch", most=7)
    assert (bounded.size, bounded.too_large) == (7, None)
    assert "no larger one was planned" in str(bounded)


def test_a_function_makes_the_model_of_each_size():
    asked: list[int] = []

    def deep(depth: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
        asked.append(depth)
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth))), (torch.ones(4, 64),)

    options = {"optimizer": "AdamW", "device_memory": "1MiB", "host_memory": "300KiB"}
    found = megatrain.plan(*deep(1)[:1], torch.ones(4, 64), **options).largest(deep)  # type: ignore[arg-type]
    assert found.too_large == found.size + 1
    for depth in (found.size, found.size + 1):
        model, args = deep(depth)
        assert megatrain.plan(model, *args, **options).fits == (depth == found.size)  # type: ignore[arg-type]
    assert set(range(1, 3)) <= set(asked)


def test_what_can_not_change_is_refused_with_the_way_out():
    plan = planned()
    with pytest.raises(
        OptionError, match=r"(?s)the depth of this plan can't change: a model .*plan\.largest\(lambda n"
    ):
        plan.largest("depth")
    flat = megatrain.plan(nn.Linear(8, 8), torch.ones(4, 8))
    with pytest.raises(OptionError, match="the sequence of this plan can't change: the example has neither token ids"):
        flat.largest("sequence")
    two = megatrain.plan(nn.Bilinear(8, 8, 8), torch.ones(4, 3, 8), torch.ones(4, 3, 8))
    assert two.asked is not None
    assert two.asked.sizes == {"micro_batch": 4, "sequence": 3}
    with pytest.raises(OptionError, match="what='width' is a str"):
        plan.largest("width")
    with pytest.raises(OptionError, match="the function returned a Linear"):
        plan.largest(lambda size: nn.Linear(size, size))
    own = on_meta()
    with pytest.raises(OptionError, match="the optimizer of this plan has the parameters of its own model"):
        planned(own, optimizer=torch.optim.SGD(own.parameters())).largest(lambda size: (on_meta(), (IDS,)))


def test_a_step_of_which_no_size_fits_is_refused():
    with pytest.raises(ScheduleError, match=r"no micro_batch fits: at 1 .* of the device are missing"):
        planned(device_memory="100KiB").largest("micro_batch")


def test_a_model_that_can_not_run_at_a_size_says_so():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.ones(4, 8)

    found = megatrain.plan(Fixed(), torch.ones(4, 8)).largest("micro_batch")
    assert (found.size, found.too_large) == (4, 5)
    assert found.refused.startswith("the model can't run at micro_batch 5: RuntimeError: ")
