"""Plans in which frozen weights stay in their files: what counts, what the disk reads, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError
from megatrain.planning.from_files import FileReads
from tests.runtime.in_files import net

WIDTH, DEPTH = 256, 8
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
MACHINE = megatrain.Hardware(1e9, 1e9, 1e12, staged_bytes_per_s=5e8, disk_bytes_per_s=1e8, name="slow")


def planned(host_memory: int | None, *, device: str = "meta", **options: Any) -> megatrain.Plan:
    """A plan of layers with frozen weights, which have no values yet, two of them on the device at a time."""
    with torch.device(device):
        model = net(WIDTH, DEPTH)
    given: dict[str, Any] = {"optimizer": "AdamW", "loss": lambda out, _: out.square().mean(), **options}
    sizes: dict[str, Any] = {"device_memory": 4 * LAYER, "host_memory": host_memory}
    return megatrain.plan(model, torch.zeros(2, WIDTH), **sizes, **given)


# Less than the weights alone, so that they must stay in their files.
LITTLE = DEPTH * LAYER - 1


def test_they_stay_where_the_host_lacks_memory_and_nowhere_else():
    usual = planned(None)
    total = usual.host.total_bytes
    assert total > LITTLE
    assert (usual.reads, usual.host.file_bytes) == (None, 0)
    enough, less = planned(total), planned(LITTLE)
    assert str(enough.host) == str(usual.host)
    assert enough.reads is None
    assert less.fits
    assert less.reads is not None
    assert less.host.file_bytes == DEPTH * LAYER
    # Each tensor of the store begins at a multiple of 64 bytes, which these do anyway.
    assert less.host.bytes_of("parameters") == usual.host.bytes_of("parameters") - DEPTH * LAYER
    assert less.host.bytes_of("cache of files") == 2 * LAYER
    assert less.host.held_bytes == 0
    assert "in files: 2.01 MiB of frozen weights, in no row" in str(less)
    # Values that are there already are in memory.
    with pytest.raises(ExecuteError, match="are missing"):
        planned(LITTLE, device="cpu").check()
    assert planned(LITTLE, device="cpu").reads is None


def test_the_disk_is_read_for_what_the_memory_does_not_hold():
    taken = planned(LITTLE).host.total_bytes - 2 * LAYER
    for cached in (2 * LAYER, 4 * LAYER, LITTLE - taken):
        plan = planned(taken + cached, hardware=MACHINE)
        assert plan.reads is not None
        # Each layer is a block with its frozen weights, and one with its adapters.
        assert [block.name for block in plan.program.blocks[::2]] == [f"{layer}.base" for layer in range(DEPTH)]
        stays = plan.schedule.persistent
        crossing = [op.block for op in plan.schedule.ops if op.what == "W" and op.block not in stays]
        crossing = [block for block in crossing if block % 2 == 0]
        assert plan.reads == FileReads(len(crossing) * LAYER, len(set(crossing)) * LAYER, cached)
        least = plan.reads.crossing - len(crossing) / max(1, len(set(crossing))) * cached
        assert plan.reads.disk_bytes == max(0, round(least))
        # As long as the disk reads, whatever else is done meanwhile.
        assert plan.step_s is not None
        assert plan.step_s >= plan.reads.disk_bytes / MACHINE.disk_bytes_per_s
        assert plan.step_s >= plan.reads.crossing / 5e8
        said = "a step reads" if plan.reads.disk_bytes else "later steps read nothing from the disk"
        assert said in str(plan)
    assert "at 0.1 GB/s" in str(planned(taken + 2 * LAYER, hardware=MACHINE))
    assumed = replace(MACHINE, disk_bytes_per_s=3.5e9)
    assert "at 3.5 GB/s, assumed" in str(planned(taken + 2 * LAYER, hardware=assumed))
    assert "GB/s" not in str(planned(taken + 2 * LAYER))


def test_a_slower_disk_makes_a_longer_step_and_more_memory_a_shorter_one():
    taken = planned(LITTLE).host.total_bytes - 2 * LAYER

    def step_s(cached: int, rate: float) -> float:
        found = planned(taken + cached, hardware=replace(MACHINE, disk_bytes_per_s=rate)).step_s
        assert found is not None
        return found

    assert step_s(2 * LAYER, 1e7) > 2 * step_s(2 * LAYER, 1e8) > 2 * step_s(4 * LAYER, 1e8)
    assert step_s(2 * LAYER, 1e12) < step_s(2 * LAYER, 1e8)


def test_a_host_that_would_only_read_again_and_again_is_refused_with_a_figure():
    least = planned(1000).host.total_bytes
    assert planned(least).fits
    lacking = planned(least - 1000)
    assert not lacking.fits
    assert lacking.missing_host_bytes == 1000
    with pytest.raises(ExecuteError, match=r"cache of files(.|\n)*1000 B are missing"):
        lacking.check()


def test_reads_of_nothing():
    assert FileReads(0, 0, 0).disk_bytes == 0
    assert FileReads(0, 0, 0).on(MACHINE).h2d_bytes_per_s == 5e8
    assert FileReads(200, 100, 100).disk_bytes == 0
    assert FileReads(200, 100, 25).disk_bytes == 150
    assert FileReads(100, 100, 0).on(MACHINE).h2d_bytes_per_s == 1e8
