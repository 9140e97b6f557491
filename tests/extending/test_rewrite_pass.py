"""A pass of a user's own: the loss of a language model, chunk by chunk, through `compile(passes=[...])`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.rewriter import Rewriter

ROWS, WIDTH, WORDS = 24, 16, 96
IDS = torch.randint(WORDS, (3, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(IDS % 5 == 0, -100, IDS.roll(-1, 1))


def chunked_cross_entropy(traced: megatrain.TracedModule, *, rows: int = 10) -> megatrain.TracedModule:
    """Replaces `cross_entropy(linear(hidden, weight), labels)` by the sums of chunks of `rows` tokens."""
    rewriter = Rewriter(traced)
    for loss in rewriter.calls(F.cross_entropy):
        logits: Any = loss.args[0]
        labels, options = loss.args[1], loss.kwargs
        while logits.target in ("view", "reshape", "flatten"):
            logits = logits.args[0]
        is_plain = options["reduction"] == "mean" and options["weight"] is None and not options["label_smoothing"]
        if logits.target is not F.linear or not is_plain:
            continue
        add, ignored = partial(rewriter.call, loss), options["ignore_index"]
        hidden = add("flatten", logits.args[0], 0, -2)
        sums: list[Any] = []
        for chunk, target in zip(add("split", hidden, rows), add("split", labels, rows), strict=True):
            part = add(F.linear, chunk, *logits.args[1:])
            sums.append(add(F.cross_entropy, part, target, ignore_index=ignored, reduction="sum"))
        num_counted = add("sum", add("ne", labels, ignored))
        rewriter.replace(loss, add("div", add("sum", add(torch.stack, sums)), num_counted))
    return rewriter.done()


class Model(nn.Module):
    """Layers, a head, and the mean loss of the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).view(-1, WORDS), labels.view(-1))


def seeded(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Model().to(dtype)


def step(model: nn.Module, call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = call(IDS, LABELS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def specs(program: megatrain.Program) -> set[tuple[int, ...]]:
    return {n.meta["spec"].shape for t in program.templates.values() for n in t.graph.nodes if "spec" in n.meta}


def test_the_loss_and_the_gradients_are_those_of_eager():
    """Sums of 24 terms associate differently: each is off by at most 24 roundings of its absolute terms.

    The loss's terms are all positive, so that its error is at most 24 eps of itself. A gradient's may cancel: they are
    compared with the largest of its tensor, with 100 eps for the sums over words, width and layers on the way.
    """
    eps = torch.finfo(torch.float64).eps
    eager, model = seeded(), seeded()
    compiled = megatrain.compile(model, device="cpu", passes=[chunked_cross_entropy])
    (expected, gradients), (found, chunked) = step(eager, eager), step(model, compiled)
    assert abs(found - expected) <= ROWS * eps * expected
    assert gradients.keys() == chunked.keys() == dict(eager.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert (chunked[name] - gradient).abs().max() <= 100 * eps * gradient.abs().max(), name
    assert "chunked_cross_entropy" in compiled.program.provenance


def test_no_template_holds_the_logits_of_all_tokens():
    compiled = megatrain.compile(seeded(), device="cpu", passes=[chunked_cross_entropy], example_args=(IDS, LABELS))
    plain = megatrain.compile(seeded(), device="cpu", example_args=(IDS, LABELS))
    assert {(3, 8, WORDS), (ROWS, WORDS)} <= specs(plain.program)
    assert not {(3, 8, WORDS), (ROWS, WORDS)} & specs(compiled.program)
    assert {(10, WORDS), (4, WORDS)} <= specs(compiled.program)
    text = str(compiled.program)
    assert "; from canonicalize, chunked_cross_entropy, partition, lift_state, dedup, measure\n" in text
    assert text.count("reduction='sum'") == 3
    heads = [p.templates[p.blocks[-1].template].cost for p in (compiled.program, plain.program)]
    assert heads[0].forward_workspace_bytes < heads[1].forward_workspace_bytes


def test_verify_compares_the_rewritten_model_with_eager():
    options = {"passes": [partial(chunked_cross_entropy, rows=7)]}
    report = megatrain.verify(seeded(), IDS, LABELS, device="cpu", compile_options=options)
    assert report.ok, report
    assert report.num_blocks == 5


def test_a_training_step_runs_it():
    models = [seeded(), seeded()]
    losses: list[list[float]] = []
    for model, passes in zip(models, ([], [chunked_cross_entropy]), strict=True):
        compiled = megatrain.compile(model, device="cpu", activations="recompute", passes=passes)
        train = megatrain.TrainStep(compiled, torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
        losses.append([float(train((IDS, LABELS))) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][3] < losses[0][0]


def test_a_plan_takes_the_same_passes():
    plain = megatrain.plan(seeded(), IDS, LABELS)
    chunked = megatrain.plan(seeded(), IDS, LABELS, passes=[chunked_cross_entropy])
    assert "chunked_cross_entropy" in chunked.program.provenance
    assert chunked.program.templates.keys() == plain.program.templates.keys()
    assert str(chunked.program) != str(plain.program)
