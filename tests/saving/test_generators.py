"""Generators of any kind of device come back; a state that is none is refused before anything is set."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.saving import check_generators, generators_now, load, restore_generators, save
from tests.saving.training import refusal, same


class Device:
    """The module of an accelerator, as far as random generators go: each draws from torch's generator for CPUs."""

    def __init__(self, count: int):
        self.generators = [torch.Generator().manual_seed(i) for i in range(count)]

    def get_rng_state(self) -> torch.Tensor:
        return self.generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generators[0].set_state(state)

    def draw(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators]


class Devices(Device):
    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def put_in(patch: pytest.MonkeyPatch, kind: str | None, module: Any) -> Any:
    """Makes `module` what torch has for the accelerator."""
    accelerator = None if kind is None else torch.device(kind)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "device_count", lambda: len(getattr(module, "generators", [])))
    patch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


@pytest.mark.parametrize("module", [Devices(2), Device(1)], ids=["all at once", "one"])
@pytest.mark.parametrize("kind", ["xpu", "cuda", "mps"])
def test_the_generators_of_any_accelerator_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: Any
):
    put_in(monkeypatch, kind, module)
    save(tmp_path / "run", {}, extra={"generators": generators_now()})
    drawn = module.draw(), torch.rand(1).item(), random.random(), np.random.rand()
    assert module.draw() != drawn[0]
    restore_generators(load(tmp_path / "run").extra["generators"])
    assert (module.draw(), torch.rand(1).item(), random.random(), np.random.rand()) == drawn


def test_generators_of_another_kind_or_number_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch):
    put_in(monkeypatch, "xpu", Devices(2))
    state = generators_now()
    put_in(monkeypatch, "xpu", Devices(3))
    text = refusal(lambda: check_generators(state))
    assert text.startswith("the checkpoint has random states of 2 XPU devices, this machine has 3 XPU devices.")
    for kind in ("cuda", None):
        put_in(monkeypatch, kind, Devices(2))
        text = refusal(lambda: check_generators(state))
        assert text.startswith("the checkpoint has random states of 2 XPU devices, this machine has none of that kind.")
    put_in(monkeypatch, None, None)
    without = generators_now()
    put_in(monkeypatch, "xpu", Devices(2))
    check_generators(without)


def test_an_accelerator_that_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    put_in(monkeypatch, "xpu", object())
    assert "torch.xpu doesn't give the state of its random generators" in refusal(generators_now)
    put_in(monkeypatch, "xpu", Device(2))
    assert "torch.xpu doesn't give the state of its random generators" in refusal(generators_now)


def test_states_that_had_only_cuda_are_read(monkeypatch: pytest.MonkeyPatch):
    devices = put_in(monkeypatch, "cuda", Devices(2))
    state = generators_now()
    old = {**{key: value for key, value in state.items() if key != "devices"}, "cuda": state["devices"]["states"]}
    drawn = devices.draw()
    restore_generators(old)
    assert devices.draw() == drawn
    put_in(monkeypatch, "xpu", Devices(2))
    assert "random states of 2 CUDA devices, this machine has none of that kind" in refusal(
        lambda: restore_generators(old)
    )
    put_in(monkeypatch, None, None)
    restore_generators({**old, "cuda": []})


def with_value(*place: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        holder: Any = state
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value

    return change


def python_state(**items: Any) -> tuple[Any, ...]:
    version, words, gauss = random.getstate()
    words = list(words)
    words[0] = items.get("word", words[0])
    words[-1] = items.get("at", words[-1])
    return items.get("version", version), tuple(words), items.get("gauss", gauss)


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "torch text": with_value("torch", value="evil"),
    "torch floats": with_value("torch", value=torch.ones(5056)),
    "torch short": with_value("torch", value=torch.zeros(16, dtype=torch.uint8)),
    "torch zeros": with_value("torch", value=torch.zeros(5056, dtype=torch.uint8)),
    "devices list": with_value("devices", value=[]),
    "devices type": with_value("devices", value={"type": 7, "states": []}),
    "devices states": with_value("devices", value={"type": "xpu", "states": ["evil"]}),
    "devices short": with_value("devices", value={"type": "xpu", "states": [torch.zeros(3, dtype=torch.uint8)]}),
    "python None": with_value("python", value=None),
    "python version": with_value("python", value=python_state(version=9)),
    "python word": with_value("python", value=python_state(word=-1)),
    "python huge": with_value("python", value=python_state(word=2**32)),
    "python text": with_value("python", value=python_state(word="evil")),
    "python place": with_value("python", value=python_state(at=2**40)),
    "python gauss": with_value("python", value=python_state(gauss="evil")),
    "numpy list": with_value("numpy", value=[]),
    "numpy kind": with_value("numpy", "bit_generator", value="PCG64"),
    "numpy place": with_value("numpy", "state", "pos", value=10**6),
    "numpy key": with_value("numpy", "state", "key", value=np.zeros(3, np.uint32)),
    "numpy floats": with_value("numpy", "state", "key", value=np.zeros(624)),
    "numpy gauss": with_value("numpy", "gauss", value="evil"),
    "numpy flag": with_value("numpy", "has_gauss", value=5),
    "more": with_value("evil", value=1),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_state_that_is_none_is_refused_before_anything_is_set(monkeypatch: pytest.MonkeyPatch, change: str):
    put_in(monkeypatch, "xpu", Devices(1))
    before = generators_now()
    state = copy.deepcopy(before)
    WRONG[change](state)
    text = refusal(lambda: restore_generators(state))
    assert text.startswith("the checkpoint's random states are invalid, in ")
    assert f"generators.{change.split()[0]}" in text or change == "more"
    assert len(text.splitlines()) > 3
    assert same(generators_now(), before)


def test_another_generator_of_numpy_goes_on(monkeypatch: pytest.MonkeyPatch):
    before = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # pyright: ignore[reportAttributeAccessIssue]
        state = generators_now()
        drawn = np.random.rand()
        restore_generators(state)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)  # pyright: ignore[reportAttributeAccessIssue]
    assert "generators.numpy is refused" in refusal(lambda: restore_generators(state))
