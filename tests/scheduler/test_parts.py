"""Parameters cut into parts: blocks hold rows, but an optimizer updates a parameter as a whole, once."""

from __future__ import annotations

import functools
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.program import Program
from megatrain.runtime.loaded import Facts
from megatrain.scheduler.from_program import workload
from tests.experts import Layers

NUM, WIDTH, INNER = 16, 8, 16
LIMIT = NUM * WIDTH * INNER * 4 // 4


class Cut(nn.Module):
    """An embedding in parts, then mixtures; `frozen` names what isn't trained."""

    def __init__(self, kind: str, *, frozen: str = "", is_shared: bool = False):
        super().__init__()
        self.embed = nn.Embedding(4 * LIMIT // (WIDTH * 4), WIDTH)
        self.mixtures = Layers(Layers.KINDS[kind], 2, NUM, WIDTH, INNER, is_shared=is_shared)
        self.head = nn.Linear(WIDTH, 5)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, ids):
        x, loss = self.mixtures(self.embed(ids))
        return F.relu(self.head(x)), loss


@functools.cache  # nobody changes them
def cut(kind: str, **options: Any) -> tuple[nn.Module, Program]:
    model = Cut(kind, **options)
    return model, megatrain.lower(megatrain.trace(model, (torch.arange(6),)), block_bytes=LIMIT)


def holders(program: Program) -> dict[str, list[int]]:
    """The blocks with rows of each trained parameter, by what their bindings print."""
    found: dict[str, list[int]] = {}
    for block in program.blocks:
        for name in {key.split("[")[0] for key in block.binding if program.state[key].requires_grad}:
            found.setdefault(name, []).append(block.index)
    return found


@pytest.mark.parametrize(
    ("kind", "is_shared"), list(zip(["bmm", "gathered", "looped"], cycle([False, True]), strict=False))
)
def test_each_parameter_in_parts_is_updated_once_by_the_first_of_its_blocks(kind: str, is_shared: bool):
    model, program = cut(kind, is_shared=is_shared)
    found, held = workload(program), holders(program)
    in_parts = {entry.base for entry in program.state.values() if entry.base}
    assert in_parts >= {"embed.weight", "mixtures.layers.0.up", "mixtures.layers.0.down"}
    assert all(len(held[name]) >= 4 for name in in_parts)
    updated: dict[int, int] = {}
    shares: dict[int, set[int]] = {}
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    for name, blocks in held.items():
        owner = next(b for b in blocks if found.blocks[b].has_backward)
        updated[owner] = updated.get(owner, 0) + 7 * sizes[name]
        shares.setdefault(owner, set()).update(set(blocks) - {owner})
    assert {b: work.update_bytes for b, work in enumerate(found.blocks) if work.update_bytes} == updated
    assert {b: set(work.shares) for b, work in enumerate(found.blocks) if work.shares} == {
        owner: others for owner, others in shares.items() if others
    }
    assert sum(work.update_bytes for work in found.blocks) == 7 * sum(sizes.values())
    assert sum(len(blocks) for blocks in held.values()) > len(held)


@pytest.mark.parametrize("frozen", ["", "embed", "mixtures.layers.0.up", "mixtures", "head"])
def test_the_updating_block_is_where_the_runtime_completes_the_gradient(frozen: str):
    _, program = cut("bmm", frozen=frozen)
    found, facts = workload(program), Facts.of(program, is_training=True)
    sizes = {key: entry.spec.nbytes for key, entry in program.state.items() if entry.base is None}
    for entry in facts.parts:
        sizes[entry.owner] = sizes.get(entry.owner, 0) + entry.spec.nbytes
    parts = {entry.key for entry in facts.parts}
    completed = [7 * sum(sizes[key] for key in keys if key not in parts) for keys in facts.completes]
    assert [work.update_bytes for work in found.blocks] == completed
