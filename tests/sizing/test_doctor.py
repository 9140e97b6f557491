"""`megatrain doctor`: a line for each thing that a step uses, with what a flaw costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatrain import Hardware
from megatrain.base.native.native_kernel import NativeKernel
from megatrain.device import HOST
from megatrain.errors import ExecuteError
from megatrain.tools import cli
from megatrain.tools.sizing import doctor


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "measure", lambda *_, **__: Hardware.preset("rtx-4090"))


class Card:
    """A card in a slot with half of its lanes, for which the system locks no memory."""

    is_host, lock_bytes, kind = False, 1 << 30, "cuda"

    def card(self) -> str:
        return "NVIDIA GeForce RTX 4090"

    def link_share(self) -> float:
        return 0.5

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        raise ExecuteError(f"the system can't lock {nbytes} B at {address}.\n  Rule.\n  Raise the limit.")


def test_a_whole_machine_has_nothing_that_could_be_better(capsys: pytest.CaptureFixture[str]):
    status = cli.main(["doctor", "--device=cpu"])
    said = capsys.readouterr().out
    for what in ("torch", "device", "compiler", "libraries", "host memory", "compute", "copies", "host rate"):
        assert f" {what} " in said
    assert "cross in 80.0 ms" in said  # 2 GB at 25 GB/s
    flaws = sum(line.startswith("!") for line in said.splitlines())
    assert (status, said.splitlines()[-1].split(" could")[0]) == (int(flaws > 0), str(flaws or "nothing"))


def test_each_flaw_says_what_it_costs(monkeypatch: pytest.MonkeyPatch):
    card: Any = Card()
    slot = next(doctor._slot(card))
    assert (slot.is_flawed, "2.0 times as long" in slot.cost) == (True, True)
    locking = next(doctor._locking(card))
    assert (locking.is_flawed, locking.cost.endswith("Raise the limit.")) == (True, True)
    assert list(doctor._slot(HOST)) == list(doctor._locking(HOST)) == []
    monkeypatch.setattr(NativeKernel, "fault", lambda _: "no C compiler")
    assert str(doctor._compiler()).startswith("! compiler      no C compiler\n")
    monkeypatch.setattr(doctor.torch, "__version__", "9.0")
    assert "newer than the tested ones" in doctor._torch().cost
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "trl" else True)
    assert "pip install trl" in doctor._libraries().cost
