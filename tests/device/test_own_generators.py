"""Only the compute device's generator is read and moved, and none is read where nothing was drawn yet."""

from __future__ import annotations

import pytest
import torch

from megatrain.device import Accelerator
from megatrain.tracer.recording.random_numbers import kept_rng


class Module:
    """The module of an accelerator with two devices; device 0 is the current one."""

    def __init__(self, *, is_used: bool) -> None:
        self.is_used = is_used
        self.generators = [torch.Generator().manual_seed(i) for i in range(2)]
        self.asked: list[int] = []

    def is_initialized(self) -> bool:
        return self.is_used

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        self.asked.append(device.index)
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.asked.append(device.index)
        self.generators[device.index].set_state(state)


def put_in(patch: pytest.MonkeyPatch, *, is_used: bool) -> Module:
    module = Module(is_used=is_used)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "device_count", lambda: 2)
    patch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


def test_the_generator_of_the_compute_device_is_put_back_not_that_of_the_current_one(monkeypatch: pytest.MonkeyPatch):
    module = put_in(monkeypatch, is_used=True)
    before = [generator.get_state() for generator in module.generators]
    with kept_rng(Accelerator("xpu", 1)):
        for generator in module.generators:
            torch.rand(1, generator=generator)
    same = [torch.equal(now.get_state(), then) for now, then in zip(module.generators, before, strict=True)]
    assert same == [False, True]
