"""Values in host memory: no bytes of the device, nothing that moves, and a figure of their own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import ACTIVATIONS
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.merging import merge
from megatrain.scheduler.parking import host_value_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import ValueWork, Workload
from tests.scheduler.workloads import LAYER, chain, step_schedules

LENGTHS = ValueWork("lengths", 40, 4, 0, (1, 2), False, False, False, on_host=True)


def with_host_value(*, has_gradient: bool = False) -> Workload:
    """Three layers, the first of which makes a tensor of the CPU that the others read."""
    work = chain([LAYER] * 3)
    return replace(
        work, values=(*work.values, replace(LENGTHS, has_gradient=has_gradient)), storages=(*work.storages, 48)
    )


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_device_holds_nothing_of_them(activations: str):
    plain, found = (schedule(w, activations=activations) for w in (chain([LAYER] * 3), with_host_value()))
    assert str(found).replace(f"host: {found.host_bytes} B", f"host: {plain.host_bytes} B") == str(plain)
    assert (found.host_value_bytes, found.host_bytes) == (48, plain.host_bytes + 48)
    assert found.park_bytes + found.landing_bytes == plain.host_bytes
    assert find_peak(found) == find_peak(plain)
    found.check()


def test_their_gradients_are_on_the_host_too():
    work = with_host_value(has_gradient=True)
    assert schedule(work).host_value_bytes == 48 + 40
    assert schedule(work, mode="forward").host_value_bytes == 48
    assert schedule(work, micro_batches=3, updates="overlap").host_value_bytes == 3 * (48 + 40)
    assert schedule(work).device_bytes == schedule(chain([LAYER] * 3)).device_bytes


def test_aliases_count_once():
    work = with_host_value()
    aliases = replace(work, values=(*work.values, replace(LENGTHS, name="view", nbytes=8, readers=(2,))))
    assert schedule(aliases).host_value_bytes == 48


def test_a_storage_is_in_one_place():
    work = with_host_value()
    value = replace(LENGTHS, name="x", on_host=False)
    with pytest.raises(ScheduleError, match=r"^value x shares storage 4 with a value on the host"):
        schedule(replace(work, values=(*work.values, value)))


def test_a_wrong_place_is_noticed():
    """A table for values on the device isn't one for values on the host, nor the other way round."""
    work = with_host_value()
    there = replace(work, values=tuple(replace(v, on_host=False) for v in work.values))
    for built, other in ((work, there), (there, work)):
        with pytest.raises(ScheduleError, match="live bytes, but"):
            schedule(built).check(other)
    assert len(merge([work, there]).workload.values) == len(work.values) + 1  # micro-batches of both kinds share none


def test_a_figure_without_them_is_refused():
    found = schedule(with_host_value())
    with pytest.raises(ScheduleError, match=f"host_bytes is stated as {found.host_bytes - 48}"):
        replace(found, host_bytes=found.host_bytes - 48).check()


def test_they_are_written_and_read_back():
    found = schedule(with_host_value())
    workload = found.known_workload()
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


@given(step_schedules())
def test_a_step_takes_them_for_each_micro_batch(found: Schedule):
    work, kind = found.known_workload(), found.kind
    assert host_value_bytes(work, kind) == kind.micro_batches * host_value_bytes(work, replace(kind, micro_batches=1))
    assert found.host_bytes == found.park_bytes + found.landing_bytes + found.host_value_bytes
