"""An accelerator that lacks what a run needs is refused in words, and is no default."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Accelerator, find, register, unregister
from megatrain.errors import OptionError
from megatrain.files import generators_now


def put_in(patch: pytest.MonkeyPatch, kind: str, module: Any) -> None:
    """Makes `module` what torch has for the accelerator of this machine."""
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "device_count", lambda: 1)
    patch.setattr(torch, "get_device_module", lambda device=None: module)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac: one generator, whose functions take no device; no streams, no events, no figure for free memory."""
    state = torch.Generator().get_state()
    module = SimpleNamespace(is_available=lambda: True, get_rng_state=lambda: state, set_rng_state=lambda state: None)
    put_in(monkeypatch, "mps", module)


@pytest.mark.usefixtures("mps")
def test_mps_is_refused_in_words_and_the_cpu_is_the_default():
    for device in ("mps", torch.device("mps")):
        with pytest.raises(OptionError) as caught:
            megatrain.compile(nn.Linear(2, 2), device=device)
        what, rule, way = str(caught.value).splitlines()
        assert what == (
            "device mps:0 lacks streams, events, copies that don't block the host, the size of its free memory, "
            "the state of its random generator."
        )
        assert rule.startswith("  A run copies weights while it computes")
        assert way.startswith('  Use device="cpu"')
    assert str(find(None)) == "cpu"
    compiled = megatrain.compile(nn.Linear(2, 2))
    assert str(compiled.megatrain.options.device) == "cpu"
    compiled(torch.ones(1, 2)).sum().backward()
    assert generators_now()["device"] is None


class Event:
    def synchronize(self) -> None: ...


class Queue:
    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Whole(Accelerator):
    """An accelerator of another maker that has everything; its memory is the host's."""

    def new_stream(self) -> Any:
        return Queue()

    def current_stream(self) -> Any:
        return Queue()

    def enter(self, stream: Any) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    module = SimpleNamespace(
        mem_get_info=lambda device: (1 << 30, 1 << 31),
        get_rng_state=lambda device: torch.Generator().get_state(),
        set_rng_state=lambda state, device: None,
    )
    put_in(monkeypatch, "xpu", module)
    for held in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.accelerator, held, lambda device: 0)
    register("xpu", lambda index: Whole("xpu", index))
    yield module
    unregister("xpu")


def fail(*args: Any) -> Any:
    raise RuntimeError("not supported by this backend")


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (Whole, "new_stream", "streams, events"),
        (Queue, "record_event", "events"),
        (Queue, "wait_event", "events"),
        (Whole, "copy", "copies that don't block the host"),
        (None, "mem_get_info", "the size of its free memory"),
        (None, "get_rng_state", "the state of its random generator"),
        (None, "set_rng_state", "the state of its random generator"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, whole: SimpleNamespace, owner: Any, name: str, what: str
):
    monkeypatch.setattr(whole if owner is None else owner, name, fail)
    with pytest.raises(OptionError, match=rf"^device xpu:0 lacks {what}\."):
        megatrain.compile(nn.Linear(2, 2), device="xpu")
    with pytest.raises(OptionError, match=rf"^device xpu:0 lacks {what}\."):
        megatrain.Engine(nn.Linear(2, 2), torch.device("xpu"))
    assert str(find(None)) == "cpu"
