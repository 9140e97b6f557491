"""Hardware: the table of machines, what is printed, and what is refused."""

from __future__ import annotations

import copy
import pickle

import expecttest
import pytest

import megatrain
from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import GIB


@pytest.mark.parametrize("name", Hardware.presets())
def test_each_figure_of_a_preset_says_where_it_is_from(name: str):
    machine = Hardware.preset(name)
    assert machine == Hardware.preset(name)
    assert machine.name == name
    lines = str(machine).splitlines()[1:]
    assert len(lines) == 15
    assert all("preset: " in line for line in lines)
    assert not any("given" in line or "measured on your" in line for line in lines)
    assert machine.is_shared
    assert pickle.loads(pickle.dumps(machine)) == copy.deepcopy(machine) == machine
    assert hash(machine) == hash(Hardware.preset(name))


def test_presets_are_as_published():
    a100, h200 = Hardware.preset("a100"), Hardware.preset("h200")
    assert a100.h2d_bytes_per_s * a100.h2d_beside == pytest.approx(11e9)
    assert a100.d2h_bytes_per_s * a100.d2h_beside == pytest.approx(24e9)
    assert h200.memory_bytes == 141 * GIB
    assert 0.8 < h200.product_rate("bf16") / 787e12 < 0.9
    assert h200.product_rate("fp64") == h200.product_rate("fp32") / 2
    assert h200.product_rate("fp8") == h200.product_rate("bf16")


def test_an_unknown_machine_is_refused_with_all_names():
    with pytest.raises(OptionError) as caught:
        Hardware.preset("rtx-2080")
    assert str(caught.value).startswith("name='rtx-2080' is not known.\n")
    assert all(f'"{name}"' in str(caught.value) for name in Hardware.presets())
    assert {
        "rtx-3080",
        "rtx-5060-ti",
        "mi300x",
        "mi355x",
        "h100-sxm",
        "h200",
        "gh200",
        "b200",
        "gb10",
        "m4-max",
    } <= set(Hardware.presets())


def test_a_rate_of_no_known_name_is_refused():
    with pytest.raises(OptionError, match="flops_per_s="):
        megatrain.Hardware(1e9, 1e9, {"b16": 1e12})
    with pytest.raises(OptionError, match="is empty"):
        megatrain.Hardware(1e9, 1e9, {})


class TestPrinted(expecttest.TestCase):
    maxDiff = None

    def test_figures_that_were_given_and_only_these(self):
        machine = Hardware(
            25e9, 24e9, {"bf16": 1e14, "fp32": 2e13}, 2e-6, further_rates={"disk": 3e9}, memory_bytes=GIB
        )
        self.assertExpectedInline(
            str(machine),
            """\
hardware
  products bf16                100  TFLOP/s  given
  products fp32                 20  TFLOP/s  given
  device memory, size         1.00  GiB      given
  copies to the device          25  GB/s     given
  copies to the host            24  GB/s     given
  launch of a kernel, device     2  us       given
  stream disk                    3  GB/s     given""",
        )
