"""A device's own error comes late: the words say so, and name the op at which it came."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Device
from megatrain.errors import ExecuteError
from tests.extending.test_device import Toy

ASSERT = "CUDA error: device-side assert triggered"


class Asserting(Toy):
    """Fails in its n-th copy on a thread, as a device would after an index beyond a table."""

    def __init__(self, thread: str, error: Exception) -> None:
        super().__init__()
        self.failing, self.error = thread, error

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == self.failing:
            raise self.error
        return super().copy(out, source)


def run(device: Device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    megatrain.compile(model, device=device)(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("thread", ["megatrain-h2d", "megatrain-d2h"])
def test_the_words_on_an_error_of_a_transfer(thread: str):
    with pytest.raises(ExecuteError) as caught:
        run(Asserting(thread, torch.AcceleratorError(ASSERT)))
    first, *more = str(caught.value).splitlines()
    label = first.split(" failed: ")[0]
    assert label.startswith(thread.removeprefix("megatrain-"))
    assert first == f"{label} failed: AcceleratorError: {ASSERT}"
    assert more[0] == f"  A device reports its errors later: what failed is {label}, or an op issued before."
    assert more[-1].startswith('  Start again with device="cpu", or with CUDA_LAUNCH_BLOCKING=1')
