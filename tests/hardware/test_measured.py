"""What was measured: read where it fits, measured anew where it doesn't; and how it is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatrain.device.kinds import HOST
from megatrain.errors import OptionError
from megatrain.hardware import kernels_alone, measured
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.kernels_alone import Product, product_rates
from megatrain.hardware.measured import Link, cached, elements_beyond, rates_together
from megatrain.native.native_kernel import LANES

FIGURES = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 2e9, "flops_per_s": {"fp32": 1e12}, "memory_bytes": 2**30}

WRONG = {
    "h2d_bytes_per_s": -1.0,
    "flops_per_s": {"fp32": float("nan")},
    "d2h_bytes_per_s": "fast",
    "no_such_figure": 1.0,
}


class Measured:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, object]:
        self.times += 1
        return dict(FIGURES)


def kept(folder: Path, facts: str, measure: Measured, *, fresh: bool = False):
    return cached(folder, facts, measure, accept=Hardware, fresh=fresh)


def test_what_was_measured_is_read(tmp_path: Path):
    measure = Measured()
    folder = tmp_path / "new" / "cache"
    assert kept(folder, "a machine", measure) == kept(folder, "a machine", measure) == FIGURES
    assert measure.times == 1
    kept(folder, "another machine", measure)
    assert measure.times == 2
    kept(folder, "a machine", measure, fresh=True)
    assert measure.times == 3
    assert [path.suffix for path in folder.iterdir()] == [".json", ".json"]


KEPT = {"format": 6, "facts": "a machine", "figures": FIGURES}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 100_000),
        json.dumps(KEPT | {"format": 1}),
        json.dumps(KEPT | {"facts": "an older driver"}),
        *(json.dumps(KEPT | {"figures": {**FIGURES, name: value}}) for name, value in WRONG.items()),
        json.dumps(KEPT | {"figures": {}}),
    ],
)
def test_a_file_that_is_broken_or_of_other_facts_is_measured_anew(tmp_path: Path, text: str):
    measure = Measured()
    kept(tmp_path, "a machine", measure)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert kept(tmp_path, "a machine", measure) == FIGURES
    assert measure.times == 2
    assert json.loads(file.read_text())["figures"] == FIGURES


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    measure = Measured()
    assert kept(tmp_path / "file", "a machine", measure) == FIGURES
    assert kept(tmp_path / "file", "a machine", measure) == FIGURES
    assert measure.times == 2


def test_a_write_that_fails_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fdopen", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    assert kept(tmp_path, "a machine", Measured()) == FIGURES
    assert list(tmp_path.iterdir()) == []


def test_the_figures_say_that_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "_measured", lambda device, products: {**FIGURES, "name": "cpu"})
    machine = Hardware.measure("cpu", cache=tmp_path)
    assert machine.h2d_bytes_per_s == 1e9
    assert all(line.endswith("measured") for line in str(machine).splitlines()[1:])
    monkeypatch.setattr(measured, "_measured", lambda device, products: pytest.fail("measured again"))
    assert Hardware.measure("cpu", cache=tmp_path) == machine
    with pytest.raises(pytest.fail.Exception):
        Hardware.measure("cpu", cache=tmp_path, products=[(8, 8, 8, "fp32")])


@pytest.mark.parametrize(("option", "wrong"), [("device", "toaster"), ("device", 1.5), ("cache", 3), ("fresh", "yes")])
def test_a_wrong_option_is_refused_before_anything_is_measured(option: str, wrong):
    with pytest.raises(OptionError, match=f"^{option}="):
        Hardware.measure(**{option: wrong})


@pytest.mark.parametrize("products", [[(1, 2)], [(0, 1, 1)], ["mm"], [(1, 1, 1, "fp4")], "x", 3])
def test_products_that_are_none_are_refused(tmp_path: Path, products):
    with pytest.raises(OptionError, match="products="):
        Hardware.measure("cpu", cache=tmp_path, products=products)


def test_products_that_one_thread_computes_wake_nobody(monkeypatch: pytest.MonkeyPatch):
    """Waking takes longer than a small product: no rate is negative."""
    monkeypatch.setattr(kernels_alone, "_product_s", lambda device, product: 1e-4)
    small, shared = Product(8, 8, 8), Product(512, 512, 512, "bf16")
    rates = product_rates(HOST, [small, shared], woken_s=4e-5)
    assert rates["fp32"] == pytest.approx(small.flops / 1e-4)
    assert rates["bf16"] == pytest.approx(shared.flops / 6e-5)
    assert product_rates(HOST, [small, shared], woken_s=1.0)["bf16"] == pytest.approx(shared.flops / 5e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("products", [[], [(64, 32, 48, "fp64")], [(8, 8, 8, "fp32")]])
def test_this_machine_has_figures(tmp_path: Path, products):
    machine = Hardware.measure("cpu", cache=tmp_path, products=products)
    assert machine.issue_s == 0  # a kernel is done when its call returns
    assert 0 < machine.compute_beside <= 1
    assert machine.host_bytes_per_s < 1e13
    assert machine.memory_bytes is not None
    assert ("fp64" in str(machine)) == bool(products)


def test_copies_of_threads_have_rates_alone_and_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "_HOST_BYTES", 1 << 18)
    link = Link(HOST)
    assert min(*link.alone(), *link.both()) > 0
    link.close()


def test_rates_together_are_those_while_all_work():
    """One has copied 10 bytes a second from the start, the other 5 from the third second on, until the fifth."""
    one, other = [float(n) for n in range(8)], [3.0, 4.0, 5.0]
    assert rates_together([one, other], 10) == (10, 10)
    assert rates_together([one, [3.0, 5.0]], 10) == (10, 5)
    assert rates_together([[0.0, 4.0, 8.0], [2.0, 6.0]], 8) == (2, 2)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("caches", "available", "nbytes"),
    [
        (0, 64 * GIB, 256 << 20),
        (32 << 20, 64 * GIB, 256 << 20),
        (300 << 20, 64 * GIB, 1200 << 20),
        (300 << 20, 4 * GIB, 512 << 20),
        (300 << 20, GIB, 256 << 20),
        (2 * GIB, 900 * GIB, 4 * GIB),
    ],
)
def test_updates_are_measured_on_memory_that_no_cache_holds(caches: int, available: int, nbytes: int):
    number = elements_beyond(caches, available)
    assert number * 16 == nbytes
    assert number % LANES == 0
