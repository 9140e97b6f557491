"""Kernels put together take about as long as one by one, on any machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import MEMORY, Kernels, put_together, total_flops, total_kernels
from tests.draws import draws

RATES = st.sampled_from(["bf16", "fp32", "bf16 attention"])
COUNTS = st.integers(1, 10**12)
KERNELS = st.one_of(
    st.builds(Kernels, RATES, COUNTS, COUNTS, st.just(1)),
    st.builds(Kernels, st.just(MEMORY), st.just(0), COUNTS, st.just(1)),
)
MACHINES = st.builds(
    Hardware,
    st.just(1e9),
    st.just(1e9),
    st.fixed_dictionaries({"bf16": st.floats(1e11, 1e15), "fp32": st.floats(1e11, 1e14)}),
    st.sampled_from([0.0, 2e-6]),
    memory_bytes_per_s=st.floats(1e9, 1e13),
    issue_s=st.sampled_from([0.0, 6e-6]),
    wake_s=st.sampled_from([0.0, 5e-5]),
)


@given(st.lists(KERNELS, max_size=30), MACHINES)
@draws(200)
def test_kernels_put_together_take_as_long_as_one_by_one(kernels: list[Kernels], machine: Hardware):
    whole = put_together(kernels)
    one_by_one = machine.seconds(tuple(kernels))
    assert machine.seconds(whole) <= one_by_one * (1 + 1e-9)  # maxima of sums are no larger than sums of maxima
    assert machine.seconds(whole) >= 0.95 * one_by_one
    assert total_flops(whole) == total_flops(kernels)
    assert total_kernels(whole) == len(kernels)


def test_threads_wake_for_kernels_that_are_shared_only():
    machine = Hardware(1e9, 1e9, 1e12, launch_s=2e-6, wake_s=5e-5)
    large, small = Kernels(MEMORY, 0, 3 << 20, 6), Kernels(MEMORY, 0, (3 << 20) - 6, 6)
    assert machine.seconds((large,)) == pytest.approx(6 * (2e-6 + 5e-5))
    assert machine.seconds((small,)) == pytest.approx(6 * 2e-6)


def test_time_is_products_and_bytes_and_launches_done_by_hand():
    machine = Hardware(1, 1, {"bf16": 100.0, "fp32": 10.0}, 0.5, memory_bytes_per_s=4.0)
    assert machine.seconds(()) == 0
    assert machine.seconds((Kernels("bf16", 300, 8),)) == 3 + 0.5
    assert machine.seconds((Kernels("bf16", 300, 20),)) == 5 + 0.5  # bound by memory
    assert machine.seconds((Kernels("fp32", 300, 8, 2), Kernels(MEMORY, 0, 8, 3))) == 30 + 2 + 5 * 0.5
    assert machine.seconds((Kernels("bf16 attention", 300, 8),)) == 3 + 0.5
    assert machine.seconds((Kernels("fp64", 300, 8),)) == 60 + 0.5  # half of fp32's
    slow = Hardware(1, 1, 100.0, 0.5, issue_s=4.0)
    assert slow.seconds((Kernels("fp32", 100, 0, 2),)) == pytest.approx(8.0)  # Python launches no faster
