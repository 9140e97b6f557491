"""Programs whose blocks are dealt to devices: who has which, and what crosses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import LowerError
from megatrain.passes.program import Program
from megatrain.passes.split.dealt_blocks import device_of_each
from megatrain.passes.split.dealt_program import deal
from megatrain.passes.split.strides import span_bytes
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.from_program import step_schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.spec import TensorSpec


class Skipping(nn.Module):
    """Each layer reads a mask that the first one makes, and every third one what the first made."""

    def __init__(self, num: int, *, is_tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num))
        self.head = nn.Linear(8, 16, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(ids)
        mask = (ids > 3).unsqueeze(-1)
        for number, layer in enumerate(self.layers):
            x = layer(x).masked_fill(mask, 0.0)
            x = x + first if number % 3 == 2 else x.tanh()
        return self.head(x)


def program(model: nn.Module, *args: Any) -> Program:
    return megatrain.lower(megatrain.trace(model, args))


IDS = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("num", "size", "is_tied", "expected"),
    [
        (6, 2, False, (0, 1, 0, 1, 0, 1, 0, 1)),
        (6, 2, True, (0, 1, 1, 0, 1, 0, 1, 0)),
        (6, 3, False, (0, 1, 2, 0, 1, 2, 0, 1)),
        (6, 3, True, (0, 1, 1, 2, 0, 1, 2, 0)),
    ],
)
def test_blocks_are_dealt_in_turns_and_tied_ones_together(
    num: int, size: int, is_tied: bool, expected: tuple[int, ...]
):
    found = device_of_each(program(Skipping(num, is_tied=is_tied), IDS), size)
    assert len(found) == num + 2
    assert set(found) == set(range(size))
    assert not is_tied or found[0] == found[-1]
    assert found == expected


def test_too_few_blocks_are_refused():
    with pytest.raises(LowerError, match="1 block can't be dealt to 4 devices"):
        device_of_each(program(Skipping(1), IDS), 4)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_value_has_a_way_and_all_tables_are_one_step(size: int, is_tied: bool):
    whole = program(Skipping(7, is_tied=is_tied), IDS)
    devices = device_of_each(whole, size)
    parts = [deal(whole, devices, device) for device in range(size)]
    assert sorted(number for part in parts for number in part.numbers) == list(range(len(whole.blocks)))
    assert sum(part.has_losses for part in parts) == 1
    for part in parts:
        for block in part.blocks:
            assert set(block.inputs) <= set(part.values)
    tables = [
        step_schedule([part] * 3, StepKind(**KIND, devices=size, losses="here" if part.has_losses else "elsewhere"))
        for part in parts
    ]
    for table in tables:
        table.check()
        assert table.instructions.all
    check_devices(tables)


KIND: dict[str, Any] = {"micro_batches": 3, "updates": "overlap", "outputs": "release"}


def test_a_dealt_program_says_what_it_has():
    whole = program(Skipping(4), IDS)
    part = deal(whole, (0, 1, 0, 1, 0, 1), 1)
    assert str(part).startswith("blocks 1, 3, 5 on device 1\nprogram Skipping: 3 blocks")
    assert part.taken(["ids"]) == []
    assert deal(whole, (0, 1, 0, 1, 0, 1), 0).taken(["ids"]) == ["ids"]
    assert {name: crossing.device for name, crossing in part.comes.items()} == dict.fromkeys(part.comes, 0)


def test_a_model_that_writes_buffers_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    whole = program(model, torch.randn(3, 4))
    with pytest.raises(LowerError, match=r"uses the buffer `1\.running_mean`"):
        deal(whole, [0] * (len(whole.blocks) - 1) + [1], 0)


class Returning(nn.Module):
    """Returns what its first layer computes as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return first, x


def test_results_that_other_devices_read_are_refused():
    whole = program(Returning(), torch.randn(2, 4))
    devices = device_of_each(whole, 2)
    assert devices[0] == devices[-1]
    with pytest.raises(LowerError, match="the model returns `linear` of block 0, which other devices use"):
        deal(whole, (0, 1, 1, 0), 0)


@pytest.mark.parametrize(
    ("shape", "stride", "nbytes"),
    [((2, 3), None, 24), ((2, 3), (8, 1), 44), ((2, 3), (0, 1), 12), ((4, 3), (1, 1), None), ((0, 3), (8, 1), 0)],
)
def test_a_value_keeps_its_strides(shape: tuple[int, ...], stride: tuple[int, ...] | None, nbytes: int | None):
    assert span_bytes(TensorSpec(shape, torch.float32, stride)) == nbytes
