"""Tensors in parts, as stacked experts are: training, backwards, files, and the model's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import HOST
from megatrain.device.bus import Bus
from megatrain.runtime.gradients import GradientBuffer
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec
from tests.comparing import assert_same
from tests.experts import Bmm, Gathered, Layers
from tests.gradients import grad_of
from tests.runtime.parity import assert_parity_of, seeded, train
from tests.runtime.saved import save, save_sharded, state_of

NUM, WIDTH, INNER = 16, 8, 16
LIMIT = NUM * WIDTH * INNER * 4 // 4
CHAOS = Chaos(seed=5, max_delay_s=0.0003)
STACK = "layers.0.up"


def layers(kind: Any = Bmm, depth: int = 2, **options: Any) -> Any:
    return seeded(lambda: Layers(kind, depth, NUM, WIDTH, INNER, **options))


def tokens(dtype: torch.dtype = torch.float32, count: int = 5) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)


def side_by_side(model: nn.Module, drive: Any, **options: Any) -> Any:
    compiled, _ = assert_parity_of(model, drive, **{"block_bytes": LIMIT, "chaos": CHAOS, **options})
    return compiled


def parts_of(compiled: Any, key: str = STACK) -> list[tuple[int, int]]:
    return [entry.rows for entry in compiled.program.state.values() if entry.base == key]


@pytest.mark.parametrize(("kind", "transfer", "is_sharded"), [(Bmm, "copy", True), (Gathered, "bind", False)])
def test_parts_of_tensors_that_come_from_files(tmp_path: Path, kind, transfer: str, is_sharded: bool):
    reference = layers(kind)
    state = state_of(reference, drop=())
    weights = save_sharded(tmp_path, state) if is_sharded else save(tmp_path / "model.safetensors", state)
    with torch.device("meta"):
        model = Layers(kind, 2, NUM, WIDTH, INNER)
    stack = model.layers[0].up
    compiled = megatrain.compile(
        model, device="cpu", block_bytes=LIMIT, transfer=transfer, weights=weights, chaos=CHAOS
    )
    expected, found = (train(call, m, (tokens(),), {}) for call, m in ((reference, reference), (compiled, model)))
    assert_same(expected, found)
    assert model.layers[0].up is stack
    assert len(parts_of(compiled)) == 4
    total = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in compiled.megatrain.engine.tensors.values())
    assert compiled.megatrain.engine.store.nbytes == total
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in model.parameters())


def test_a_stack_that_an_opaque_module_reads_stays_whole():
    class Counting(nn.Module):
        """Runs its own code at each step: it counts its calls."""

        def __init__(self, stack):
            super().__init__()
            self.stack = stack
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.bmm(x.expand(NUM, *x.shape), self.stack).sum(0) * self.calls

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Bmm(NUM, WIDTH, WIDTH)
            self.counting = Counting(self.experts.up)

        def forward(self, x):
            x, loss = self.experts(x)
            return self.counting(x), loss

    def drive(call, model):
        found = []
        for _ in range(2):
            out, loss = call(tokens())
            (out.sum() + loss).backward()
            found += [out.detach(), loss.detach()]
        return found

    compiled = side_by_side(seeded(Mixed), drive, block_bytes=NUM * WIDTH * WIDTH, transfer="copy")
    assert "opaque counting" in str(compiled.program)
    assert not parts_of(compiled, "experts.up")
    assert len(parts_of(compiled, "experts.down")) == 4


def test_the_buffer_completes_a_parameter_with_its_last_part():
    parameter = nn.Parameter(torch.zeros(6, 2))
    whole = StateEntry("w", "parameter", TensorSpec((6, 2), torch.float32), True)
    parts = [whole.part(0, 2), whole.part(2, 6)]
    buffer = GradientBuffer(lambda _: parameter, Bus(HOST), parts)
    where = Bytes(0, 64)
    buffer.begin()
    buffer.receive(0, ["w[2:6]"], [(None, False)], ["w[2:6]"], where)
    buffer.receive(1, ["w[0:2]"], [(torch.ones(2, 2), False)], [], where)
    assert parameter.grad is None
    buffer.receive(2, ["w[0:2]"], [(torch.ones(2, 2), False)], ["w[0:2]", "w"], where)
    assert torch.equal(grad_of(parameter), torch.tensor([2.0, 2, 0, 0, 0, 0])[:, None].expand(6, 2))
    parameter.grad = None
    buffer.begin()
    buffer.receive(0, ["w[2:6]", "w[0:2]"], [(None, False)] * 2, ["w[2:6]", "w[0:2]", "w"], where)
    assert parameter.grad is None
