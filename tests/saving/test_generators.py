"""Generators of any kind of device go on; a state that is none is refused before anything is set."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.device import Accelerator
from megatrain.errors import ResumeWarning
from megatrain.files import generators_now, load, restore_generators, save
from tests.saving.training import refusal, same


class Devices:
    """The module of an accelerator, as far as random generators go: each draws from torch's generator for CPUs."""

    def __init__(self, count: int, current: int = 0):
        self.generators = [torch.Generator().manual_seed(i) for i in range(count)]
        self.current = current

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)

    def draw(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators]


def put_in(patch: pytest.MonkeyPatch, kind: str | None, module: Any) -> Any:
    """Makes `module` what torch has for the accelerator."""
    accelerator = None if kind is None else torch.device(kind)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    patch.setattr(torch.accelerator, "current_device_index", lambda: getattr(module, "current", 0))
    patch.setattr(torch.accelerator, "device_count", lambda: len(getattr(module, "generators", [])))
    patch.setattr(torch, "get_device_module", lambda device=None: module)
    # torch on the CPU has no generators of other kinds.
    patch.setattr(Accelerator, "seeded_state", lambda self, seed: torch.Generator().manual_seed(seed).get_state())
    return module


def test_the_compute_device_s_generator_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = put_in(monkeypatch, "xpu", Devices(2, current=1))
    save(tmp_path / "run", {}, extra={"generators": generators_now("xpu")})
    drawn = module.draw(), torch.rand(1).item(), random.random(), np.random.rand()
    other = module.generators[0].get_state()
    restore_generators(load(tmp_path / "run").extra["generators"], "xpu")
    assert torch.equal(module.generators[0].get_state(), other), "only that of the compute device is set"
    module.generators[0] = torch.Generator().manual_seed(0)
    assert (module.draw(), torch.rand(1).item(), random.random(), np.random.rand()) == drawn
    # The number of devices does not matter.
    elsewhere = put_in(monkeypatch, "xpu", Devices(3))
    restore_generators(load(tmp_path / "run").extra["generators"], "xpu:2")
    assert elsewhere.draw()[2] == drawn[0][1]


@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda:1", "cpu"), ("xpu", "cuda:1")])
def test_on_another_kind_of_device_a_run_says_that_its_numbers_differ_and_repeats_itself(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
):
    put_in(monkeypatch, before.split(":")[0], Devices(2))
    state = generators_now(before)
    cpu = torch.rand(1).item()
    drawn: list[list[float]] = []
    for seed in range(2):
        module = put_in(monkeypatch, after.split(":")[0], Devices(2))
        for generator in module.generators:
            generator.manual_seed(10 + seed)
        name = "the CPU" if before == "cpu" else before.split(":")[0]
        match = f"^the checkpoint's random numbers were drawn on {name}, and {after}.* draws others: dropout differs"
        with pytest.warns(ResumeWarning, match=match) as caught:
            restore_generators(state, after)
        assert re.fullmatch(rf".* resume on {name}\.", str(caught[0].message)), "one line"
        assert torch.rand(1).item() == cpu
        drawn.append(module.draw())
    if after != "cpu":
        number = int(after[-1]) if ":" in after else 0
        assert drawn[0][number] == drawn[1][number]
        assert drawn[0][1 - number] != drawn[1][1 - number], "those of other devices stay"


def with_value(*place: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        holder: Any = state
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value

    return change


def python_state(word: int) -> tuple[Any, ...]:
    version, words, gauss = random.getstate()
    return version, (word, *words[1:]), gauss


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "torch zeros": with_value("torch", value=torch.zeros(5056, dtype=torch.uint8)),
    "device state": with_value("device", value={"kind": "xpu", "state": "evil"}),
    "python word": with_value("python", value=python_state(word=-1)),
    "numpy kind": with_value("numpy", "bit_generator", value="PCG64"),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_state_that_is_none_is_refused_before_anything_is_set(monkeypatch: pytest.MonkeyPatch, change: str):
    put_in(monkeypatch, "xpu", Devices(1))
    before = generators_now("xpu")
    state = copy.deepcopy(before)
    WRONG[change](state)
    text = refusal(lambda: restore_generators(state, "xpu"))
    assert text.startswith("the checkpoint's random states are invalid: ")
    assert f"generators.{change.split()[0]}" in text
    assert len(text.splitlines()) == 3
    assert same(generators_now("xpu"), before)
