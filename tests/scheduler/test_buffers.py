"""Buffers that a forward writes, in a step of several micro-batches: each begins with what the one before leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ScheduleError
from megatrain.passes.program import Program
from megatrain.scheduler.from_program import check_buffers, schedule, workload
from megatrain.scheduler.items import Stream


def program_of(model: nn.Module, block_bytes: int | None = None) -> Program:
    return megatrain.lower(megatrain.trace(model, (torch.ones(4, 8),)), block_bytes=block_bytes)


class Norm(nn.Module):
    """A batch norm without a count of batches."""

    def __init__(self):
        super().__init__()
        self.mean: torch.Tensor
        self.variance: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


class Stack(nn.Module):
    """Layers with a norm behind each, or one norm for all."""

    def __init__(self, depth: int, *, is_shared: bool, norm: Callable[[], nn.Module] = Norm):
        super().__init__()
        norms = [norm() for _ in range(1 if is_shared else depth)]
        self.norms = nn.ModuleList(norms * depth if is_shared else norms)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(depth))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return x * self.scale

    def learn(self, x):
        with torch.no_grad():
            self.scale.copy_(x.detach().mean(0))


class Level(nn.Module):
    def __init__(self, memory: Memory, *, reads: bool, writes: bool):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.memory, self.reads, self.writes = memory, reads, writes

    def forward(self, x):
        x = self.linear(self.memory(x) if self.reads else x)
        if self.writes:
            self.memory.learn(x)
        return x


class Scaled(nn.Module):
    """Blocks that share a buffer: some read it, and one writes into it."""

    def __init__(self, reads: Sequence[int], writes: int):
        super().__init__()
        memory = Memory()
        self.layers = nn.ModuleList(Level(memory, reads=i in reads, writes=i == writes) for i in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def refusal(program: Program) -> str:
    try:
        check_buffers(program)
    except ScheduleError as error:
        with pytest.raises(ScheduleError, match="can't go from one micro-batch to the next"):
            schedule(program, micro_batches=2)
        return str(error)
    schedule(program, micro_batches=2)
    return ""


def test_a_norm_that_blocks_share_does_not_unless_one_block_has_all_its_uses():
    own = program_of(Stack(3, is_shared=False))
    assert (len(own.blocks), len(own.commits)) == (6, 6)
    schedule(own, micro_batches=3).check()  # a norm in each block is right
    program = program_of(Stack(3, is_shared=True))
    with pytest.raises(ScheduleError) as caught:
        schedule(program, micro_batches=2)
    assert str(caught.value) == (
        "buffer norms.0.mean can't go from one micro-batch to the next: block 1 (norms.0) reads the old "
        "value, but block 5 (norms.0) computes the new one.\n"
        "  All micro-batches of a block run before the next block, so the old value would be read too early.\n"
        "  Use one micro-batch a step, a larger block_bytes that puts both in one block, or don't update the buffer "
        "(`.eval()` of its module)."
    )
    schedule(program_of(Stack(3, is_shared=True).eval()), micro_batches=2).check()
    together = program_of(Stack(3, is_shared=True), block_bytes=4096)
    assert len(together.blocks) == 1
    schedule(together, micro_batches=2).check()
    # A count of batches joins the uses anyway: whoever writes into it hands on the same memory.
    counting = program_of(Stack(3, is_shared=True, norm=lambda: nn.BatchNorm1d(8)))
    assert len(counting.blocks) == 2
    schedule(counting, micro_batches=2).check()


def with_readers(program: Program, readers: Sequence[int], producer: int) -> Program:
    """The program with its one buffer read by other blocks, and its new value from another one."""
    ((old, key),) = program.buffers
    blocks = [
        replace(b, inputs=(*(n for n in b.inputs if n != old), *([old] if b.index in readers else [])))
        for b in program.blocks
    ]
    return replace(program, blocks=tuple(blocks), commits=((key, program.blocks[producer].outputs[0]),))


def test_refused_is_exactly_what_the_table_would_get_wrong():
    """For each set of readers: does F of the producer stand before all reads of the next micro-batch?"""
    base = program_of(Scaled([0], 0))
    for producer, *flags in product(range(4), *[[False, True]] * 4):
        readers = [b for b, flag in enumerate(flags) if flag]
        program = with_readers(base, readers, producer)
        plan = schedule(workload(program), micro_batches=3)
        order = [str(op) for op in plan.ops if op.stream == Stream.COMPUTE]
        is_early = any(
            order.index(f"F{reader}.{number + 1}") < order.index(f"F{producer}.{number}")
            for reader in readers
            for number in (0, 1)
        )
        assert bool(refusal(program)) == is_early, (readers, producer)


def test_readers_and_the_writer_of_a_buffer_are_named_by_their_layers():
    assert not refusal(program_of(Scaled([2, 3], 2)))
    found = refusal(program_of(Scaled([1, 2, 3], 3)))
    assert "block 1 (layers.1) reads the old value" in found
    assert "block 3 (layers.3) computes the new one" in found
