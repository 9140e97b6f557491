"""Tensors in parts under all that a caller may ask of backward, of files of weights, and of the model's own code."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.compiled import lowered
from megatrain.errors import ExecuteError
from megatrain.passes.split import part_calls
from megatrain.runtime.slots import Slots
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.instructions import Bytes
from tests import captures
from tests.comparing import assert_same
from tests.experts import IDLE, Bmm, Gathered, Grouped, Layers, Routed
from tests.runtime.parity import assert_parity_of, seeded, train
from tests.runtime.saved import save, save_sharded, state_of
from tests.tiers import diagonal, wide

NUM, WIDTH, INNER = 16, 8, 16
LIMIT = NUM * WIDTH * INNER * 4 // 4
CHAOS = Chaos(seed=5, max_delay_s=0.0003)
STACK = "layers.0.up"
kinds = pytest.mark.parametrize("kind", [wide(Bmm), Gathered])
MODES: list[dict[str, Any]] = [
    {"transfer": "bind"},
    {"transfer": "copy", "activations": "recompute"},
    {"transfer": "copy"},
]


def layers(kind: Any = Bmm, depth: int = 2) -> Any:
    return seeded(lambda: Layers(kind, depth, NUM, WIDTH, INNER))


def tokens(dtype: torch.dtype = torch.float32, count: int = 5) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)


def side_by_side(model: nn.Module, drive: Any, **options: Any) -> Any:
    compiled, _ = assert_parity_of(model, drive, **{"block_bytes": LIMIT, "chaos": CHAOS, **options})
    return compiled


def parts_of(compiled: Any, key: str = STACK) -> list[tuple[int, int]]:
    return [entry.rows for entry in compiled.program.state.values() if entry.base == key]


# -- backwards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), diagonal([Bmm, Gathered], MODES))
def test_two_losses_of_one_call_one_after_the_other(kind, options):
    def drive(call, model):
        x = tokens().requires_grad_()
        out, loss = call(x)
        loss.backward(retain_graph=True)
        first = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        out.square().mean().backward(retain_graph=True)
        held = model.layers[0].up.grad
        (out.sum() + loss).backward()
        assert model.layers[0].up.grad is held
        return out, loss, x.grad, [g for g in first.values() if g is not None]

    compiled = side_by_side(layers(kind), drive, **options)
    assert len(parts_of(compiled)) == 4


def test_two_backwards_through_grouped_products():
    def drive(call, model):
        out, loss = call(tokens(torch.bfloat16))
        out.float().square().mean().backward(retain_graph=True)
        loss.backward()

    model = layers(Grouped).bfloat16()
    compiled = side_by_side(model, drive, block_bytes=LIMIT // 2, transfer="copy")
    assert len(parts_of(compiled)) == 4


@kinds
def test_what_only_the_second_loss_reaches_has_no_gradient_after_the_first(kind):
    class TwoEnds(nn.Module):
        def __init__(self):
            super().__init__()
            self.early = kind(NUM, WIDTH, INNER)
            self.late = kind(NUM, WIDTH, INNER)

        def forward(self, x):
            x, _ = self.early(x)
            return x, self.late(x)[0]

    def drive(call, model):
        early, late = call(tokens())
        early.sum().backward(retain_graph=True)
        assert model.late.up.grad is None
        before = model.early.up.grad.clone()
        late.square().sum().backward()
        return before

    side_by_side(seeded(TwoEnds), drive, transfer="copy")


@pytest.mark.parametrize(("kind", "options"), diagonal([Bmm, Gathered], MODES[::-1]))
def test_autograd_grad_returns_the_whole_gradient_and_leaves_grad_alone(kind, options):
    def drive(call, model):
        stack, router = model.layers[0].up, model.layers[1].router.weight
        out, loss = call(tokens())
        found = torch.autograd.grad(out.sum() + loss, [stack, router, model.layers[1].down], retain_graph=True)
        assert all(p.grad is None for p in model.parameters())
        again = torch.autograd.grad(out.square().sum(), [stack])
        assert found[0].shape == stack.shape
        return found, again

    side_by_side(layers(kind), drive, **options)


@kinds
def test_backward_for_some_tensors_leaves_the_others_alone(kind):
    def drive(call, model):
        out, _ = call(tokens())
        out.sum().backward(inputs=[model.layers[0].up, model.layers[1].norm.weight])
        assert model.layers[0].down.grad is None
        assert model.layers[1].up.grad is None

    side_by_side(layers(kind), drive, transfer="copy")


@kinds
def test_hooks_see_the_whole_gradient_once_in_each_backward(kind):
    def drive(call, model):
        seen = []
        stack = model.layers[0].up
        stack.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        stack.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        out, loss = call(tokens())
        loss.backward(retain_graph=True)
        out.sum().backward()
        assert [t.shape for t in seen] == [stack.shape] * 4
        return seen

    side_by_side(layers(kind), drive, transfer="copy")


def test_a_hook_sees_one_gradient_for_two_calls():
    def drive(call, model):
        seen = []
        model.layers[0].up.register_hook(lambda g: seen.append(g.clone()))
        (call(tokens())[0].sum() + call(tokens(count=3))[0].square().sum()).backward()
        assert len(seen) == 1
        return seen

    side_by_side(layers(), drive, transfer="copy")


def test_a_stack_written_between_two_backwards_is_refused_by_its_own_name():
    model = layers()
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy")
    out, _ = compiled(tokens())
    out.sum().backward(retain_graph=True)
    with torch.no_grad():
        model.layers[0].up.add_(1)
    with pytest.raises(ExecuteError, match=r"parameter `layers\.0\.up` was modified"):
        out.sum().backward()


def test_gradients_of_parts_have_the_strides_of_their_parameter():
    """A tensor in another layout than its shape's own stays whole."""
    model = layers()
    model.layers[1].up = nn.Parameter(model.layers[1].up.detach().transpose(1, 2).contiguous().transpose(1, 2))

    def drive(call, model):
        call(tokens())[0].sum().backward()
        for parameter in (model.layers[0].up, model.layers[1].up):
            assert parameter.grad.stride() == parameter.stride()

    compiled = side_by_side(model, drive, transfer="copy")
    assert len(parts_of(compiled)) == 4
    assert not parts_of(compiled, "layers.1.up")


# -- weights from files --------------------------------------------------------------------------------------


FILES = [(Bmm, "copy", True), (Gathered, "bind", False)]


@pytest.mark.parametrize(
    ("kind", "transfer", "is_sharded"),
    [*FILES, *(wide(c) for c in product([Bmm, Gathered], ["copy", "bind"], [False, True]) if c not in FILES)],
)
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


def test_rows_that_no_call_names_come_from_files_too(tmp_path: Path):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(12, 16))
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            return self.head(x * self.table[1] + self.table[9])

    reference = seeded(Some)
    weights = save(tmp_path / "a.safetensors", state_of(reference, drop=()))
    with torch.device("meta"):
        model = Some()
    compiled = megatrain.compile(model, device="cpu", block_bytes=4 * 64, transfer="copy", weights=weights)
    x = torch.ones(2, 16)
    assert_same(train(reference, reference, (x,), {}), train(compiled, model, (x,), {}))
    assert parts_of(compiled, "table") == [(0, 4), (8, 12)]
    assert torch.equal(model.table[4:8], reference.table[4:8])


def test_files_in_another_precision_fill_the_whole_and_so_its_parts(tmp_path: Path):
    reference = layers()
    state = {name: t.bfloat16() for name, t in state_of(reference, drop=()).items()}
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            tensor.copy_(state[name])
    with torch.device("meta"):
        model: Any = Layers(Bmm, 2, NUM, WIDTH, INNER)
    weights = save(tmp_path / "a.safetensors", state)
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy", weights=weights)
    compiled.prepare(tokens())
    compiled.load_weights()
    assert torch.equal(model.layers[0].up, reference.layers[0].up)
    assert_same(train(reference, reference, (tokens(),), {}), train(compiled, model, (tokens(),), {}))


# -- the model's own code ------------------------------------------------------------------------------------


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


def test_a_check_in_mid_step_between_the_parts_selects_the_other_graph():
    class Checked(Routed):
        def experts(self, tokens, scores, weights, ids):
            rows = torch.einsum("te,th->eth", torch.zeros_like(scores).scatter(1, ids, weights), tokens)
            inner = torch.bmm(rows, self.up)
            inner = inner.relu() if inner.sum() > 0 else inner.tanh()
            return torch.bmm(inner, self.down).sum(0)

    def drive(call, model):
        found = []
        for sign in (1.0, -1.0, 1.0):
            with torch.no_grad():
                model.layers[0].up.copy_(model.layers[0].up.abs() * sign)
                model.layers[0].norm.bias.fill_(5.0)
            out, loss = call(tokens())
            out.sum().backward(retain_graph=True)
            loss.backward()
            found.append(out.detach())
        return found

    compiled = side_by_side(layers(Checked), drive, transfer="copy")
    assert "check" in str(compiled.program)
    assert len(parts_of(compiled)) == 4


def test_a_check_that_reads_the_stack_itself_keeps_it_whole():
    class Checked(Bmm):
        def experts(self, tokens, scores, weights, ids):
            found = super().experts(tokens, scores, weights, ids)
            return found if self.up.max() < 100 else found * 0

    compiled = side_by_side(layers(Checked), lambda call, _: call(tokens())[0].sum().backward(), transfer="copy")
    assert not parts_of(compiled)
    assert len(parts_of(compiled, "layers.0.down")) == 4


def test_a_table_with_sparse_gradients_stays_whole_and_they_stay_sparse():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = nn.Embedding(64, 8, sparse=True)
            self.dense = nn.Embedding(64, 8)

        def forward(self, ids):
            return self.sparse(ids) * self.dense(ids)

    def drive(call, model):
        out = call(torch.tensor([3, 60, 3, 0]))
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        assert model.sparse.weight.grad.is_sparse

    compiled = side_by_side(seeded(Sparse), drive, block_bytes=64 * 8, transfer="copy")
    assert not parts_of(compiled, "sparse.weight")
    assert len(parts_of(compiled, "dense.weight")) == 4


def test_another_module_in_the_place_of_a_layer_is_taken_in():
    def drive(call, model):
        found = [call(tokens())[0].detach()]
        model.layers[0] = seeded(lambda: Bmm(NUM, WIDTH, INNER))
        out, loss = call(tokens())
        (out.sum() + loss).backward()
        return [*found, out.detach()]

    compiled = side_by_side(layers(), drive, transfer="copy")
    assert len(parts_of(compiled)) == 4


def test_a_stack_of_another_size_before_the_first_call_is_captured_anew():
    model = layers()
    compiled = megatrain.compile(model, device="cpu", block_bytes=LIMIT, transfer="copy", example_args=(tokens(),))
    model.layers[0] = seeded(lambda: Bmm(2 * NUM, WIDTH, INNER))
    eager = copy.deepcopy(model)
    assert_same(train(eager, eager, (tokens(),), {}), train(compiled, model, (tokens(),), {}))


@kinds
def test_a_frozen_stack_is_streamed_in_parts_without_gradients(kind):
    model = layers(kind)
    for layer in model.layers:
        layer.up.requires_grad_(False)

    def drive(call, model):
        out, loss = call(tokens())
        loss.backward(retain_graph=True)
        out.sum().backward()
        assert model.layers[0].up.grad is None
        return model.layers[1].down.grad[IDLE]

    compiled = side_by_side(model, drive, transfer="copy")
    blocks = [line for line in str(compiled.program).splitlines() if "up[" in line and line.startswith("  block")]
    assert blocks
    assert any(line.endswith("frozen") for line in blocks)


# -- verify --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "depth"), [wide(("bmm", 2)), ("gathered", 2), ("looped", 1), wide(("looped", 2))])
def test_verify_finds_nothing_where_nothing_is_wrong(kind: str, depth: int):
    model = seeded(lambda: Layers(Layers.KINDS[kind], depth, NUM, WIDTH, INNER))
    report = megatrain.verify(model, tokens(), device="cpu", block_bytes=LIMIT, transfer="copy")
    assert report.ok, report


def test_verify_names_the_part_that_is_wrong_in_its_slot(monkeypatch: pytest.MonkeyPatch):
    real = Slots.prefetch

    def broken(self: Slots, block: int, where: Bytes | None, **options: Any) -> None:
        real(self, block, where, **options)
        if "layers.1.down[4:8]" in [entry.key for entry in self._images[block].entries]:
            self.state(block, where)[0].mul_(1.5)

    monkeypatch.setattr(Slots, "prefetch", broken)
    report = megatrain.verify(layers(), tokens(), device="cpu", block_bytes=LIMIT, transfer="copy")
    assert not report.ok
    assert report.first_difference is not None
    assert (report.first_difference.culprit, report.first_difference.phase) == ("runtime", "forward")
    assert "layers.1.down[4:8]" in str(report)


def test_verify_finds_a_pass_that_cuts_wrongly(monkeypatch: pytest.MonkeyPatch):
    """The joined result keeps the name of the call that it replaces, so it is compared with that."""
    write = part_calls.PartWriter.write

    def swapped(self, use, parts):
        write(self, use, [*parts[1:2], *parts[:1], *parts[2:]])

    monkeypatch.setattr(part_calls.PartWriter, "write", swapped)
    monkeypatch.setattr(lowered, "lowered", captures.LOWERED_ANEW)
    report = megatrain.verify(layers(), tokens(), device="cpu", block_bytes=LIMIT, transfer="copy")
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.culprit == "passes", report


# -- what a gather is taken for ------------------------------------------------------------------------------


class Picks(nn.Module):
    """Rows by number, whose count is that of the numbers, or by a mask, whose count hangs on the weights."""

    def __init__(self, is_masked: bool):
        super().__init__()
        self.is_masked = is_masked
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        picked = self.table[self.table[:, 0] > 0] if self.is_masked else self.table[(x @ self.table.t()).argmax(-1)]
        return picked.sum() * x


@pytest.mark.parametrize("is_masked", [True, False])
def test_only_rows_picked_by_a_mask_have_their_number_checked(is_masked: bool):
    def drive(call, model):
        found = []
        for bias in (0.0, 5.0):
            with torch.no_grad():
                model.table.add_(bias)
            out = call(tokens())
            out.sum().backward()
            found.append(out.detach())
        return found

    compiled = side_by_side(seeded(lambda: Picks(is_masked)), drive, block_bytes=512)
    assert ("check size" in str(compiled.program)) == is_masked


@pytest.mark.parametrize("is_view", [False, True])
def test_a_frozen_stack_that_the_forward_writes_stays_whole(is_view: bool):
    class Decaying(Bmm):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.up.requires_grad_(False)

        def experts(self, tokens, scores, weights, ids):
            with torch.no_grad():
                (self.up[1] if is_view else self.up).mul_(0.5)
            return super().experts(tokens, scores, weights, ids)

    def drive(call, model):
        found = []
        for _ in range(2):
            out, _ = call(tokens())
            out.sum().backward()
            found.append(out.detach())
        return found

    compiled = side_by_side(layers(Decaying), drive, transfer="copy")
    assert not parts_of(compiled)
    assert len(parts_of(compiled, "layers.0.down")) == 4
