"""Training with expert groups: parts on the device, whole parameters and gradients on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import HOST
from megatrain.memory.block_image import state_image
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.sink import GradientSink
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec
from tests.comparing import assert_same
from tests.experts import IDLE, Bmm, Grouped, Layers, Routed
from tests.gradients import grad_of
from tests.runtime.parity import assert_parity, train
from tests.tiers import diagonal, one_in, wide

NUM, WIDTH, INNER = 32, 8, 16
STACK = NUM * WIDTH * INNER * 4
LIMIT = STACK // 4
CHAOS = Chaos(seed=3, max_delay_s=0.0003)


def layers(kind: type[nn.Module], depth: int = 2, **kwargs: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Layers(kind, depth, NUM, WIDTH, INNER, **kwargs)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()


def largest(compiled) -> int:
    return max(compiled.program.state_bytes(block) for block in compiled.program.blocks)


# -- parity --------------------------------------------------------------------------------------------------

MODES = {
    "recompute": {"transfer": "copy", "activations": "recompute", "chaos": CHAOS},
    "offload": {"transfer": "copy", "activations": "offload", "chaos": CHAOS},
    "keep": {"transfer": "copy", "activations": "keep", "chaos": CHAOS},
    "bind": {"transfer": "bind", "chaos": CHAOS},
}


@pytest.mark.parametrize(("kind", "mode"), diagonal(["bmm", "gathered", "selected", "einsum"], MODES))
def test_training_with_expert_groups_equals_eager(kind: str, mode: str):
    compiled = assert_parity(layers(Layers.KINDS[kind]), (tokens(),), {}, block_bytes=LIMIT, **MODES[mode])
    assert largest(compiled) <= LIMIT


@pytest.mark.parametrize("mode", one_in(len(MODES), MODES, first=1))
def test_training_with_grouped_products_equals_eager(mode: str):
    model = layers(Grouped).bfloat16()
    compiled = assert_parity(model, (tokens(torch.bfloat16),), {}, block_bytes=LIMIT // 2, **MODES[mode])
    assert largest(compiled) <= LIMIT // 2


@pytest.mark.parametrize("kind", [wide("bmm"), "gathered"])
def test_one_stack_used_by_two_layers_gets_the_sum(kind: str):
    model = layers(Layers.KINDS[kind], is_shared=True)
    compiled = assert_parity(model, (tokens(),), {}, block_bytes=LIMIT, transfer="copy", chaos=CHAOS)
    assert largest(compiled) <= LIMIT


def test_rows_read_one_by_one_train_as_in_eager():
    """A few experts: each row is a call of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Layers(Layers.KINDS["looped"], 1, NUM // 4, WIDTH, INNER)
    assert_parity(model, (tokens(),), {}, block_bytes=LIMIT // 4, transfer="copy")


@pytest.mark.parametrize("kind", [wide("bmm"), "gathered"])
def test_expert_groups_under_autocast_train_as_in_eager(kind: str):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layers(Layers.KINDS[kind])

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    compiled = assert_parity(Cast(), (tokens(),), {}, block_bytes=LIMIT, transfer="copy", chaos=CHAOS)
    assert largest(compiled) <= LIMIT


def test_a_large_embedding_is_streamed_in_parts():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(1000, 16, padding_idx=3)
            self.head = nn.Linear(16, 4)

        def forward(self, ids):
            return self.head(self.embed(ids))

    ids = torch.tensor([[3, 999, 0, 250, 249, 999]])
    compiled = assert_parity(Embedded(), (ids,), {}, block_bytes=16000, transfer="copy", chaos=CHAOS)
    assert largest(compiled) <= 16000
    assert compiled.megatrain.model.embed.weight.grad[3].abs().sum() == 0


# -- gradients -----------------------------------------------------------------------------------------------


def trained_once(model: nn.Module, **options):
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy", **options)
    out, loss = compiled(tokens())
    (out.sum() + loss).backward()
    return compiled


def test_an_expert_without_tokens_gets_zeros_and_a_frozen_stack_nothing():
    model = layers(Layers.KINDS["gathered"])
    model.layers[1].up.requires_grad_(False)
    eager = copy.deepcopy(model)
    trained_once(model)
    out, loss = eager(tokens())
    (out.sum() + loss).backward()
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        assert found.grad is None or torch.equal(found.grad, grad_of(expected)), name
    assert model.layers[0].up.grad[IDLE].abs().max() == 0
    assert model.layers[1].up.grad is None


def test_a_stack_that_no_gradient_reaches_keeps_none():
    class Detached(Bmm):
        def experts(self, tokens, scores, weights, ids):
            return super().experts(tokens, scores, weights, ids).detach()

    assert_parity(layers(Detached), (tokens(),), {}, block_bytes=LIMIT, transfer="copy")
    model = layers(Detached)
    assert trained_once(model).program.state["layers.0.up[0:8]"].base == "layers.0.up"
    assert model.layers[0].up.grad is None


def test_hooks_on_a_stack_run_once_and_see_its_whole_gradient():
    model = layers(Layers.KINDS["bmm"])
    eager = copy.deepcopy(model)
    seen: list[tuple[Any, ...]] = []
    for each in (model, eager):
        each.layers[0].up.register_hook(lambda g: seen.append(("hook", g.shape)) or g * 2)
        each.layers[0].up.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.clone())))
    trained_once(model)
    out, loss = eager(tokens())
    (out.sum() + loss).backward()
    assert [kind for kind, _ in seen] == ["hook", "post", "hook", "post"]
    assert seen[0] == seen[2] == ("hook", (NUM, WIDTH, INNER))
    assert torch.equal(seen[1][1], seen[3][1])


def test_gradients_of_parts_add_to_what_grad_holds():
    model = layers(Layers.KINDS["bmm"])
    compiled = trained_once(model)
    once = model.layers[0].down.grad.clone()
    held = model.layers[0].down.grad
    out, loss = compiled(tokens())
    (out.sum() + loss).backward()
    assert model.layers[0].down.grad is held
    assert torch.equal(held, once + once)


def test_the_sink_completes_a_parameter_with_its_last_part():
    parameter = nn.Parameter(torch.zeros(6, 2))
    whole = StateEntry("w", "parameter", TensorSpec((6, 2), torch.float32), True)
    parts = [whole.part(0, 2), whole.part(2, 6)]
    sink = GradientSink(lambda _: parameter, HOST, parts)
    landing = Bytes(0, 64)
    sink.begin()
    sink.receive(0, ["w[2:6]"], [(None, False)], ["w[2:6]"], landing)
    sink.receive(1, ["w[0:2]"], [(torch.ones(2, 2), False)], [], landing)
    assert parameter.grad is None
    sink.receive(2, ["w[0:2]"], [(torch.ones(2, 2), False)], ["w[0:2]", "w"], landing)
    assert torch.equal(grad_of(parameter), torch.tensor([2.0, 2, 0, 0, 0, 0])[:, None].expand(6, 2))
    parameter.grad = None
    sink.begin()
    sink.receive(0, ["w[2:6]", "w[0:2]"], [(None, False)] * 2, ["w[2:6]", "w[0:2]", "w"], landing)
    assert parameter.grad is None


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [wide("bmm"), "gathered"])
def test_expert_groups_take_less_device_memory(kind: str):
    """Ten times fewer bytes in slots; what the groups pass on to one another is small beside that."""
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(9))
    stack = 64 * 16 * 32 * 4
    peaks, slots = [], []
    for block_bytes in (None, stack // 16):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Layers(Layers.KINDS[kind], 1, 64, 16, 32)
        compiled = megatrain.compile(
            model, device="cpu", transfer="copy", activations="recompute", block_bytes=block_bytes
        )
        for _ in range(2):
            compiled(x)[0].sum().backward()
        assert compiled.peak_bytes <= compiled.schedule.device_bytes
        peaks.append(compiled.peak_bytes)
        slots.append(compiled.schedule.arena_bytes)
    assert slots[1] < slots[0] / 10
    assert peaks[1] < peaks[0] / 4, peaks


def test_parts_lie_in_their_whole_and_a_prefetch_is_one_copy_per_tensor():
    model = layers(Layers.KINDS["bmm"], 1)
    compiled = trained_once(model)
    store = compiled.megatrain.engine.store
    image = state_image([compiled.program.state["layers.0.up[8:16]"]])
    store.extend([image])
    assert store.num_copies(image) == 1
    (view,) = store.bound(image)
    assert view.data_ptr() == model.layers[0].up[8:16].data_ptr()
    slot = torch.zeros(image.nbytes, dtype=torch.uint8)
    store.prefetch(image, slot)
    assert torch.equal(store.views(image, slot)[0], model.layers[0].up[8:16])
    joined = state_image([compiled.program.state[f"layers.0.up[{a}:{a + 8}]"] for a in (0, 8)])
    store.extend([joined])
    assert store.num_copies(joined) == 1
    total = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in compiled.megatrain.engine.tensors.values())
    assert store.nbytes <= total


# -- the model stays the user's ------------------------------------------------------------------------------


def test_new_memory_and_new_values_of_a_whole_reach_its_parts():
    model = layers(Layers.KINDS["bmm"])
    compiled = trained_once(model)
    with torch.no_grad():
        model.layers[0].up.mul_(1.5)
    model.layers[0].down.data = model.layers[0].down.data * -0.5
    state = {k: v.clone() * 1.01 for k, v in model.layers[1].state_dict().items()}
    model.layers[1].load_state_dict(state, assign=True)
    eager = copy.deepcopy(model)
    assert_same(train(eager, eager, (tokens(),), {}), train(compiled, model, (tokens(),), {}))


def test_a_stack_changed_between_forward_and_backward_is_refused():
    model = layers(Layers.KINDS["bmm"])
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy")
    out, _ = compiled(tokens())
    with torch.no_grad():
        model.layers[0].up.add_(1)
    with pytest.raises(megatrain.ExecuteError, match=r"parameter `layers\.0\.up` was modified"):
        out.sum().backward()


def test_two_cuts_of_one_model_share_one_host_store():
    model = layers(Layers.KINDS["bmm"], 1)
    engine = Engine(model, torch.device("cpu"))
    traced = megatrain.trace(model, (tokens(),))
    for limit in (LIMIT, None, 3 * LIMIT):
        engine.adopt(megatrain.lower(traced, block_bytes=limit))
    total = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in engine.tensors.values())
    assert engine.store.nbytes <= total


def test_a_stack_on_meta_is_planned_and_refused_by_name_at_the_first_step():
    with torch.device("meta"):
        model = Layers(Layers.KINDS["bmm"], 1, NUM, WIDTH, INNER)
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy")
    compiled.prepare(tokens())
    assert largest(compiled) <= LIMIT
    with pytest.raises(megatrain.ExecuteError, match=r"`layers\.0\.(up|never)` is on the meta device"):
        compiled(tokens())


def test_a_router_is_part_of_what_is_trained():
    model = layers(Layers.KINDS["gathered"])
    trained_once(model)
    assert isinstance(model.layers[0], Routed)
    assert model.layers[0].router.weight.grad.abs().sum() > 0
