"""TRL's fused head gets narrower tiles where a step doesn't fit otherwise; another Function stands for it here."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.passes.check_rewrite import check_rewrite
from megatrain.passes.rewrites.head.fused_head import NarrowHead, narrow_fused_head
from megatrain.sizes import parse_bytes
from tests.stand_in_triton import JITFunction, stand_in_triton

WORDS, WIDTH, TILE_ROWS = 3000, 16, 100

unread = JITFunction(lambda x: None, None)


class Fused(torch.autograd.Function):
    """Log-probabilities of labels and entropies, in tiles of rows and words; gradients of the former."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        total, weighted, top = (torch.zeros(len(hidden)) for _ in range(3))
        for start in range(0, len(weight), chunk_size):
            tile = hidden @ weight[start : start + chunk_size].t() / temperature
            total += tile.exp().sum(1)
            weighted += (tile.exp() * tile).sum(1)
            top = torch.maximum(top, tile.amax(1))
        chosen = (hidden * weight[targets]).sum(1) / temperature
        ctx.save_for_backward(hidden, weight, targets, total)
        ctx.given = temperature, chunk_size
        entropy = total.log() - weighted / total if "entropy" in outputs else None
        is_top = chosen >= top
        ctx.mark_non_differentiable(*(x for x in (entropy, is_top) if x is not None))
        return chosen - total.log(), entropy, is_top

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, total = ctx.saved_tensors
        temperature, chunk_size = ctx.given
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(weight), chunk_size):
            part = weight[start : start + chunk_size]
            tile = -(hidden @ part.t() / temperature).exp() / total[:, None]
            tile += torch.arange(start, start + len(part)) == targets[:, None]
            tile *= gradients[0][:, None] / temperature
            of_hidden += tile @ part
            of_weight[start : start + chunk_size] = tile.t() @ hidden
        return of_hidden, of_weight, None, None, None, None, None


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of TRL's with this head."""
    module = ModuleType("trl.stand_in")
    vars(module)["TOKEN_CHUNK_SIZE"] = TILE_ROWS
    monkeypatch.setitem(sys.modules, "trl.stand_in", module)
    for kind in (Fused, Launched):
        monkeypatch.setattr(kind, "__module__", "trl.stand_in")


class Model(nn.Module):
    def __init__(self, function: Any = Fused, words_at_once: int = 2048) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.function, self.words_at_once = function, words_at_once

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        found = self.function.apply(
            hidden.reshape(-1, WIDTH), self.head.weight, None, labels.reshape(-1), 0.5, self.words_at_once, ("entropy",)
        )
        return {"loss": -found[0].mean(), "entropy": found[1].mean(), "accuracy": found[2].float().mean()}


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (2, 200), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids.roll(-1)}


def heads_of(graphs: Any) -> list[NarrowHead]:
    return [node.target for graph in graphs for node in graph.nodes if isinstance(node.target, NarrowHead)]


def test_all_results_are_those_of_wider_tiles_but_for_the_order_of_sums():
    traced = megatrain.trace(Model(), kwargs=batch(0))
    narrow = narrow_fused_head(traced)
    [head] = heads_of([narrow.graph])
    assert (head.words, head.words_before, head.rows) == (128, 2048, TILE_ROWS)
    assert "Fused; 128 words at a time)" in str(narrow)
    report = check_rewrite(Model(), narrow_fused_head, kwargs=batch(0))
    assert report.ok, str(report)


def test_no_tile_gets_wider_than_it_was():
    traced = megatrain.trace(Model(words_at_once=128), kwargs=batch(0))
    assert narrow_fused_head(traced) is traced


def other(module: str = "trl.stand_in", name: str | None = None) -> Any:
    """The Function in another module, or with another name for the width of a tile."""

    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any, width: Any, outputs: Any
    ):
        return Fused.forward(ctx, hidden, weight, bias, targets, temperature, width, outputs)

    body = {"__module__": module} | ({} if name is None else {name: staticmethod(forward)})
    return type("Other", (Fused,), body)


@pytest.mark.parametrize("function", [other("somebody.elses"), other(name="forward")], ids=["module", "argument"])
def test_what_isnt_trls_head_stays(function: Any):
    traced = megatrain.trace(Model(function), kwargs=batch(0))
    assert narrow_fused_head(traced) is traced


class Launched(Fused):
    """The head with a kernel that torch can't analyse."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor | None, ...]:
        unread[(1,)](args[0])
        return Fused.forward(ctx, *args)


def test_a_head_whose_kernels_need_values_keeps_its_tiles(monkeypatch: pytest.MonkeyPatch):
    signature = inspect.signature(Fused.forward)
    monkeypatch.setattr(Launched.forward, "__signature__", signature, raising=False)
    with stand_in_triton():
        traced = megatrain.trace(Model(Launched), kwargs=batch(0))
        assert "Launched" in str(traced)
        assert narrow_fused_head(traced) is traced


# The stand-in takes all rows at a time: a tile of 2048 words has 3.3 MB, and some exist together.
@pytest.mark.parametrize(("memory", "words"), [("40MiB", []), ("4MiB", [128])])
def test_tiles_get_narrow_only_where_a_step_doesnt_fit(memory: str, words: list[int]):
    eager, model = Model(), Model()
    step = megatrain.TrainStep(
        compiled := megatrain.compile(model, device="cpu", memory=memory),
        torch.optim.SGD(compiled.parameters(), lr=0.1),
    )
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for number in range(3):
        loss = step(batch(number))
        want = eager(**batch(number))["loss"]
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Sums over tiles add in another order; a step follows from the one before.
        torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=0)
    step.flush()
    program = step.program
    assert [head.words for head in heads_of(t.graph for t in program.templates.values())] == words
    assert compiled.peak_bytes <= step.schedule.device_bytes <= parse_bytes(memory)
    for (name, want), found in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7, msg=name)


def test_a_plan_says_what_a_tile_takes():
    plan = megatrain.plan(Model(), example_kwargs=batch(0), optimizer="SGD", device_memory="4MiB")
    assert plan.fits
    assert "chunked: logits of 128 words at a time in block 4 (self), 50.00 KiB instead of 800.00 KiB" in str(plan)
    never = megatrain.plan(Model(), example_kwargs=batch(0), optimizer="SGD", device_memory="4MiB", chunking="never")
    assert not never.fits
