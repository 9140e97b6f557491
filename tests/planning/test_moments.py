"""Plans with optimizer state in a file: what the host has of it, what the disk moves, and what that wears."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError, OptimizerError, OptionError, ScheduleError
from megatrain.optim.moments import moment_layout
from megatrain.optim.trained_model import TrainedModel
from megatrain.planning.host_plan import RING

WIDTH, DEPTH = 256, 6
LAYER = WIDTH * WIDTH + WIDTH
MACHINE = megatrain.Hardware(1e9, 1e9, 1e12, disk_bytes_per_s=1e7, disk_rating_bytes=10**12, name="slow")
FOLDER = Path(__file__).parent


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(DEPTH))
    )


def planned(optimizer: Any = "AdamW", *, rows: int = 2, **options: Any) -> megatrain.Plan:
    with torch.device("meta"):
        model = net()
    given: dict[str, Any] = {"precision": "bf16", "loss": lambda out, _: out.float().square().mean(), **options}
    return megatrain.plan(model, torch.zeros(rows, WIDTH), optimizer=optimizer, **given)


@pytest.mark.parametrize(("optimizer", "nbytes"), [("AdamW", 8 * LAYER), ("AdamW8bit", 2 * LAYER + 6 * LAYER // 32)])
def test_the_host_has_the_state_of_two_blocks_and_the_disk_moves_all(optimizer: str, nbytes: int):
    usual, plan = planned(optimizer, hardware=MACHINE), planned(optimizer, offload=True, hardware=MACHINE)
    assert plan.moments is not None
    count, padding = DEPTH, DEPTH * 2 * 4096  # of each weight and each bias
    assert count * nbytes <= plan.moments.moved == plan.moments.file_bytes <= count * nbytes + padding
    saved = usual.host.total_bytes - plan.host.total_bytes
    assert saved == count * nbytes - plan.host.bytes_of(RING)
    assert plan.host.bytes_of(RING) == 2 * plan.moments.moved // count
    # As many seconds as the bytes take, each way; other streams are faster, and the simulated step has them.
    assert plan.simulation is not None
    assert usual.step_s is not None
    assert plan.simulation.bound == "disk"
    disk_s = 2 * plan.moments.moved / 1e7 * (1 - 1e-9)
    assert plan.simulation.step_s >= disk_s > usual.step_s
    assert plan.lower_bound is not None
    assert plan.lower_bound.seconds >= disk_s
    assert (plan.why_host, plan.schedule.device_updates) == (
        "the optimizer's state is in a file between updates, which only the host reads",
        (),
    )


def test_the_plan_says_traffic_and_wear():
    plan = planned(offload=True, hardware=MACHINE)
    assert plan.moments is not None
    assert plan.moments.text(replace(MACHINE, disk_bytes_per_s=3.5e9)) == (
        "disk: 3.02 MiB of optimizer state; a step reads and writes 3.02 MiB, 1.81 ms at 3.5 GB/s, assumed; "
        "1,000 steps write 0.00317 TB, 0.32% of the 1 TB that the drive is rated for"
    )
    assert "1,000 steps write 0.00317 TB" in plan.moments.text(None)
    assert "in a file: 3.02 MiB of optimizer state, in no row (offload=...)" in str(plan)
    assert "disk: 3.02 MiB of optimizer state; a step reads and writes 3.02 MiB, 634 ms at 0.0 GB/s" in str(plan)


def test_a_layout_prints_where_what_is():
    model = torch.nn.Linear(3, 2, device="meta")
    layout = moment_layout(TrainedModel.of(model, optimizer="AdamW8bit"))
    assert str(layout).splitlines()[:2] == [
        "moments: 2 parameters, 8192 B",
        "  0+4096  weight: exp_avg_codes i8[2, 3] at 0, exp_avg_sq_codes u8[2, 3] at 64, exp_avg_scales bf16[1] at "
        "128, exp_avg_sq_scales f32[1] at 192",
    ]


def test_a_step_takes_a_plan_with_files_and_no_other():
    given: dict[str, Any] = {"loss": lambda out, _: out.float().square().mean(), "precision": "bf16"}
    saved = {
        offload: megatrain.SavedPlan.from_json(planned("AdamW", offload=offload, device="cpu").saved().to_json())
        for offload in (True, False)
    }
    model = net()
    compiled = megatrain.compile(model, device="cpu", precision="bf16", transfer="copy")
    step = megatrain.TrainStep(
        compiled, torch.optim.AdamW(model.parameters()), loss=given["loss"], offload=FOLDER, plan=saved[True]
    )
    step(torch.zeros(2, WIDTH))
    assert step.schedule == saved[True].schedule
    assert step.host_plan.bytes_of(RING) == planned("AdamW", offload=True).host.bytes_of(RING)
    parts: Any = compiled, torch.optim.AdamW(model.parameters())
    with pytest.raises(ScheduleError, match=r"the plan that was given isn't one of this step: block 0 .*moment"):
        megatrain.TrainStep(*parts, loss=given["loss"], plan=saved[True])(torch.zeros(2, WIDTH))


def test_a_step_takes_the_part_of_the_state_in_the_file_that_was_planned():
    room = planned(device="cpu").host.total_bytes - 2 * 8 * LAYER
    for offload, host_memory, number in ((True, room, 5), (False, None, 0)):  # buffers have two of them
        plan = planned(offload=offload, host_memory=host_memory, device="cpu")
        saved = megatrain.SavedPlan.from_json(plan.saved().to_json())
        model = net()
        compiled = megatrain.compile(model, device="cpu", precision="bf16", transfer="copy")
        parts: Any = compiled, torch.optim.AdamW(model.parameters())
        options: Any = {"loss": lambda out, _: out.float().square().mean(), "offload": FOLDER}
        step = megatrain.TrainStep(*parts, plan=saved, **options)
        step(torch.zeros(2, WIDTH))
        assert step.schedule == plan.schedule
        assert len([op for op in step.schedule.ops if op.what == "R"]) == number
        assert step.host_plan.rows == plan.host.rows


def test_only_state_that_the_host_has_no_room_for_is_in_the_file():
    usual, least = planned(hardware=MACHINE), planned(offload=True, hardware=MACHINE)
    assert usual.step_s is not None
    assert least.step_s is not None
    assert least.moments is not None
    before = least.step_s * (1 + 1e-9)
    for part in (0.0, 0.3, 0.6, 0.9):
        room = least.host.total_bytes + round(part * (usual.host.total_bytes - least.host.total_bytes))
        plan = planned(offload=True, host_memory=room, hardware=MACHINE)
        assert plan.fits
        assert plan.moments is not None
        assert plan.step_s is not None
        assert plan.step_s <= before
        before = plan.step_s
        in_memory = usual.host.total_bytes - plan.host.total_bytes
        assert 0 < plan.moments.moved - plan.host.bytes_of(RING) - in_memory <= DEPTH * 2 * 4096  # padding of pages
        assert room - plan.host.total_bytes < 2 * 8 * LAYER  # another block of the same would not fit
    assert not planned(offload=True, host_memory=least.host.total_bytes - 8 * LAYER, hardware=MACHINE).fits


def test_a_step_without_room_names_the_file_as_a_way_out_and_what_is_enough():
    usual, least = planned(), planned(offload=True)
    room = (usual.host.total_bytes + least.host.total_bytes) // 2
    enough = format_bytes(planned(offload=True, host_memory=room).host.total_bytes)
    with pytest.raises(ExecuteError, match=rf"\n    offload=True: .* of the device, {enough} of the host(\n|$)"):
        planned(host_memory=room).check()
    with pytest.raises(ExecuteError, match=r"offload= a folder on a fast disk: then .* are enough"):
        usual.host.check(room)
    said = next(help for help in usual.host.helps if help.startswith("offload="))
    assert said == f"offload= a folder on a fast disk: then {format_bytes(least.host.total_bytes)} are enough"
    assert not any(help.startswith("offload=") for help in planned(precision="fp32").host.helps)  # AdamW isn't fused


def test_what_is_enough_counts_whole_pages_and_blocks_that_the_device_no_longer_updates():
    small = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.GELU()) for _ in range(4)])
    example: Any = {"example_args": (torch.randn(8, 60),), "optimizer": "AdamW", "precision": "bf16"}
    for memory in (60_000, None):
        usual, least = (
            megatrain.plan(small, device_memory=memory, offload=filed, **example) for filed in (False, True)
        )
        said = [help for help in usual.host.helps if help.startswith("offload=")]
        enough = f"offload= a folder on a fast disk: then {format_bytes(least.host.total_bytes)} are enough"
        assert said == ([] if memory == 10_000_000 else [enough])
        assert bool(usual.schedule.device_updates) == (memory == 10_000_000)


def test_where_the_host_has_room_for_all_state_the_plan_is_that_without_a_file_and_says_so():
    usual = planned(hardware=MACHINE, max_grad_norm=1.0)
    room = usual.host.total_bytes
    plan = planned(offload=True, host_memory=room, hardware=MACHINE, max_grad_norm=1.0)
    assert (plan.schedule, plan.host.rows, plan.why_host) == (usual.schedule, usual.host.rows, usual.why_host)
    assert "disk: nothing needs the file: all of the optimizer's state stays in memory" in str(plan)
    assert "in a file:" not in str(plan)


ROWS = 256
CHUNK = ROWS * WIDTH * 2
"""Bytes of what a block reads, in bf16."""


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_activations_go_on_to_the_file_as_far_as_the_host_is_short(machine: Any):
    asked: dict[str, Any] = {"rows": ROWS, "micro_batches": 3, "hardware": machine, "offload": True}
    asked |= {"activations": "offload", "max_grad_norm": 1.0}
    enough = planned(**asked)
    assert enough.moments is not None
    assert (enough.schedule.evicted, enough.moments.activation_bytes) == ((), 0)
    short = planned(**asked, host_memory=enough.host.total_bytes - 2 * CHUNK)
    assert short.fits
    assert short.moments is not None
    assert short.schedule.evicted == (1, 2), "two buffers and six chunks less"
    assert short.host.bytes_of("parks") == short.schedule.park_bytes == enough.schedule.park_bytes - 4 * CHUNK
    assert short.moments.activation_bytes == short.schedule.evicted_bytes == 6 * CHUNK
    assert short.moments.moved == enough.moments.moved + 6 * CHUNK
    assert "disk: 3.02 MiB of optimizer state, and 768.00 KiB of activations; a step reads and writes 3.77 MiB" in str(
        short
    )
    assert "parks 12 activations, 6 of them in a file" in str(short)
    assert "and a file has 768.00 KiB of them between forward and backward" in short.why()
    if machine is not None:
        assert short.simulation is not None
        assert enough.step_s is not None
        assert short.simulation.step_s > enough.step_s
    least = planned(**asked, host_memory="1KiB")
    assert not least.fits
    assert least.schedule.park_bytes == 2 * CHUNK
    without = planned(**{**asked, "offload": False}, host_memory=enough.host.total_bytes - 2 * CHUNK)
    assert (without.schedule.evicted, without.fits) == ((), False)


def test_a_step_takes_a_plan_with_activations_in_a_file():
    asked: dict[str, Any] = {"rows": ROWS, "micro_batches": 2, "activations": "offload", "device": "cpu"}
    full = planned(**asked, offload=True)
    plan = planned(**asked, offload=True, host_memory=full.host.total_bytes - CHUNK)
    saved = megatrain.SavedPlan.from_json(plan.saved().to_json())
    model = net()
    compiled = megatrain.compile(model, device="cpu", precision="bf16", transfer="copy", activations="offload")
    parts: Any = compiled, torch.optim.AdamW(model.parameters())
    loss = lambda out, _: out.float().square().mean()  # noqa: E731
    step = megatrain.TrainStep(*parts, loss=loss, offload=FOLDER, plan=saved)
    step([torch.zeros(ROWS, WIDTH)] * 2)
    assert step.schedule == saved.schedule
    assert step.schedule.evicted


def test_plans_refuse_what_steps_refuse():
    with pytest.raises(OptimizerError, match="SGD updates it"):
        planned("SGD", offload=True)
    with pytest.raises(OptionError, match="offload without an optimizer says nothing"):
        planned(None, offload=True)
