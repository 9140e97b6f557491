"""chunk_head_loss: which heads it finds, and that the chunked loss has the bits of the whole one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss
from tests.nightly import nightly

# Of fewer rows than 32 products of the CPU may have other bits.
WORDS, WIDTH, ROWS = 211, 24, 40
CLASSES = torch.rand(WORDS, generator=torch.Generator().manual_seed(5)) + 0.5


class Reader(nn.Module):
    """An embedding, a hidden layer and a head; `form` makes the loss of the head's logits."""

    def __init__(self, form: Any, *, bias: bool = True, tied: bool = False, autocast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.scale = nn.Parameter(torch.rand(WORDS) + 0.5)
        self.register_buffer("classes", CLASSES.clone())
        self.form, self.autocast = form, autocast
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            hidden = self.layer(self.embed(ids)).tanh()
            return self.form(self, self.head(hidden), ids)


def flat(_: Any, logits: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), ids.reshape(-1), **options)


Each = Callable[[torch.Tensor], torch.Tensor]
# What is done to the rows of logits, and likewise to labels.
MOVES: list[tuple[Each, Each]] = [
    (lambda x: x, lambda y: y),
    (lambda x: x[..., :-1, :].contiguous(), lambda y: y[..., 1:]),
    (lambda x: x.unflatten(1, (3, 11)), lambda y: y.view(3, 3, 11)),
    (lambda x: x[1:, 2:31:2], lambda y: y[1:, 2:31:2]),
]
# What is done to each row.
CALLS: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
    lambda m, x: x.float(),
    lambda m, x: x.mul(0.5),
    lambda m, x: (x.float() / 3.0).tanh() * 3.0,
    lambda m, x: x * m.scale,
    lambda m, x: x + m.classes.view(1, 1, -1),
]


class Form:
    """A loss of logits, drawn at random."""

    def __init__(self, dice: random.Random) -> None:
        self.move, self.of_labels = dice.choice(MOVES)
        self.calls = dice.sample(CALLS, dice.choice([0, 0, 1, 2]))
        self.is_moved_first = dice.random() < 0.5
        self.end = dice.choice(["cross_entropy", "cross_entropy", "transposed", "log_softmax"])
        self.reduction, self.ignored = dice.choice(["mean", "sum", "none"]), dice.choice([-100, 1])
        self.smoothing = dice.choice([0.0, 0.2]) if self.end != "log_softmax" else 0.0
        self.is_weighted = dice.random() < 0.2

    @property
    def is_exact(self) -> bool:
        """Of weights of classes rows are summed in another order, and of transposed logits the words of a row."""
        return not self.is_weighted and self.end != "transposed"

    def __call__(self, model: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = self.move(logits) if self.is_moved_first else logits
        for call in self.calls:
            logits = call(model, logits)
        logits, labels = logits if self.is_moved_first else self.move(logits), self.of_labels(ids)
        options: dict[str, Any] = {"reduction": self.reduction, "ignore_index": self.ignored}
        options |= {"label_smoothing": self.smoothing} if self.smoothing else {}
        options |= {"weight": model.classes.to(logits.dtype)} if self.is_weighted else {}
        if self.end == "transposed":
            loss = F.cross_entropy(logits.movedim(-1, 1), labels, **options)
        elif self.end == "cross_entropy":
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
        else:
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32).reshape(-1, WORDS)
            options |= {"weight": model.classes.float()} if self.is_weighted else {}
            loss = F.nll_loss(log_probs, labels.reshape(-1), **options)
        return loss if self.reduction != "none" else (loss.flatten() * torch.arange(loss.numel())).sum() / 9


def ids_of(step: int) -> torch.Tensor:
    ids = torch.randint(WORDS, (3, 33), generator=torch.Generator().manual_seed(step))
    ids[0, :5] = torch.arange(5)  # what some forms ignore
    return ids


def losses_and_gradients(call: Any, model: nn.Module, steps: int = 2) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Takes steps of gradient descent, so that weights and inputs differ in each."""
    found: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for step in range(steps):
        loss = call(ids_of(step))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
        for parameter in model.parameters():
            parameter.grad = None
    return found


def chunked(model: nn.Module, rows: int = ROWS) -> Any:
    compiled = megatrain.compile(model, device="cpu", passes=[partial(chunk_head_loss, rows=rows)])
    compiled.prepare(ids_of(0))
    assert sum(isinstance(n.target, HeadLoss) for t in compiled.program.templates.values() for n in t.graph.nodes) == 1
    return compiled


# Summed over chunks: the head's own, in fp32; and what the steps behind it read.
SUMMED = {"head.weight", "head.bias", "scale"}


def assert_chunked_equals_whole(
    model: nn.Module, rows: int = ROWS, *, is_exact: bool = True, eps: float | None = None
) -> None:
    """Compares losses and gradients; sums over chunks within what their order may change.

    A sum of n terms in another order differs by at most n eps times the sum of sizes. Here n is 99 rows, eps that of
    fp32; bf16 rounds the sum once more, which may fall to the other side. `eps` is that of products, if they are
    coarser than the weights.
    """
    eps = eps or torch.finfo(next(model.parameters()).dtype).eps
    whole = copy.deepcopy(model)
    compiled = chunked(model, rows)
    expected, found = losses_and_gradients(whole, whole), losses_and_gradients(compiled, model)
    for (loss, gradients), (found_loss, found_gradients) in zip(expected, found, strict=True):
        assert gradients.keys() == found_gradients.keys()
        assert torch.equal(loss, found_loss) or (not is_exact and torch.allclose(loss, found_loss, rtol=99 * eps))
        for name, gradient in gradients.items():
            if is_exact and name not in SUMMED:
                assert torch.equal(gradient, found_gradients[name]), name
            atol = float(gradient.abs().max()) * max(2 * eps, 99 * torch.finfo(torch.float32).eps)
            torch.testing.assert_close(found_gradients[name], gradient, rtol=4 * eps, atol=atol, msg=name)


@pytest.mark.parametrize("seed", [*range(12), *map(nightly, range(12, 400))])
def test_chunks_of_any_head_are_right_and_keep_the_bits_of_loss_and_hidden_gradients(seed: int):
    dice = random.Random(seed)
    form, dtype = Form(dice), dice.choice([torch.float32, torch.float32, torch.bfloat16])
    is_tied, is_cast, rows = dice.random() < 0.2, dice.random() < 0.3, dice.choice([1, 3, ROWS, ROWS, 64])
    rows = 14 if form.move is MOVES[-1][0] else rows  # of 30
    model = Reader(form, bias=dice.random() < 0.5 and not is_tied, tied=is_tied, autocast=is_cast).to(dtype)
    frozen = "nothing" if is_tied else dice.choice(["nothing", "nothing", "head", "layer", "embed"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    is_exact = form.is_exact and rows >= ROWS and not is_tied
    assert_chunked_equals_whole(model, rows, is_exact=is_exact, eps=2**-7 if is_cast else None)


def test_sums_over_chunks_are_rounded_once():
    """In bf16 the head's gradient is as near to that of fp64 as the whole one; rounding each chunk's isn't."""
    model = Reader(flat, bias=False).bfloat16()
    exact, whole = copy.deepcopy(model).double(), copy.deepcopy(model)
    ((_, truth),) = losses_and_gradients(exact, exact, steps=1)
    ((_, expected),) = losses_and_gradients(whole, whole, steps=1)
    ((_, found),) = losses_and_gradients(chunked(model, 1), model, steps=1)
    errors = [(each["head.weight"].double() - truth["head.weight"]).norm() for each in (expected, found)]
    assert errors[1] <= 1.05 * errors[0]


def of_half(_: Any, logits: torch.Tensor, ids: torch.Tensor, end: Any = flat) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16) if end is flat else torch.no_grad():
        return flat(_, logits, ids)


def nll(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(x.flatten(0, 1), y.flatten())


OTHERS: dict[str, Any] = {
    "in place": lambda m, x, y: flat(m, x.mul_(2.0), y),
    "dropped": lambda m, x, y: flat(m, F.dropout(x, 0.1), y),
    "scaled by row": lambda m, x, y: flat(m, x * torch.rand(3, 33, 1), y),
    "centered": lambda m, x, y: flat(m, x - x.mean(1, keepdim=True), y),
    "some words": lambda m, x, y: F.cross_entropy(x[..., :200].flatten(0, 1), y.flatten() % 200),
    "regrouped": lambda m, x, y: F.cross_entropy(x.reshape(WORDS, -1).t().contiguous(), y.flatten()),
    # 11 and 3 change places, too.
    "transposed": lambda m, x, y: F.cross_entropy(x.unflatten(1, (11, 3)).permute(0, 3, 2, 1), y.view(3, 3, 11)),
    "of probabilities": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), F.one_hot(y.flatten(), WORDS).float()),
    "without softmax": lambda m, x, y: nll(x, y),
    "softmax over rows": lambda m, x, y: F.nll_loss(F.log_softmax(x.flatten(0, 1), dim=0), y.flatten()),
    "scaled log-probabilities": lambda m, x, y: nll(F.log_softmax(x, dim=-1).mul(2.0), y),
    "read twice": lambda m, x, y: flat(m, x, y) + 1e-4 * x.logsumexp(-1).square().mean(),
    "returned": lambda m, x, y: (flat(m, x, y), x),
    "partly under autocast": of_half,
    "without gradients": partial(of_half, end=None),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_isnt_the_pattern_stays(form: str):
    traced = megatrain.trace(Reader(OTHERS[form]), (ids_of(0),))
    assert chunk_head_loss(traced, rows=4) is traced


def target_of(form: Any) -> HeadLoss:
    traced = chunk_head_loss(megatrain.trace(Reader(form), (ids_of(0),)), rows=4)
    return next(node.target for node in traced.graph.nodes if isinstance(node.target, HeadLoss))


def test_one_and_one_point_nought_are_two_templates():
    whole, decimal = (target_of(lambda m, x, y, by=by: flat(m, x * by, y)) for by in (1, 1.0))
    assert whole != decimal
    assert "mul(1)," in whole.call_text("")
    assert "mul(1.0)," in decimal.call_text("")


def test_the_measured_memory_is_that_of_chunks():
    """The block of the head needs the memory of a chunk's logits, and the measured peak is within the plan."""
    ids = torch.randint(WORDS, (8, 64))
    model = Reader(flat)
    costs = []
    for passes in ((), (partial(chunk_head_loss, rows=16),)):
        program = megatrain.lower(megatrain.trace(model, (ids,)), rewrites=passes)
        costs.append(program.templates[program.blocks[-1].template].cost)
    assert not costs[1].unmeasured
    assert costs[1].forward_workspace_bytes < costs[0].forward_workspace_bytes / 4
    assert costs[1].backward_workspace_bytes < costs[0].backward_workspace_bytes / 4
    assert costs[1].saved_bytes < costs[0].saved_bytes / 4


class WritesLater(Reader):
    """Writes into its hidden states once a head that saves nothing has read them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(ids))
        logits = self.head(hidden)
        hidden.mul_(0.5)
        return self.form(self, logits, ids) + hidden.sum()


def test_hidden_states_that_are_written_after_the_head_has_read_them_stay():
    """The loss is called last: chunks would read what was written meanwhile."""
    model = WritesLater(flat)
    model.head.requires_grad_(False)
    assert chunk_head_loss(traced := megatrain.trace(model, (ids_of(0),)), rows=4) is traced
    expected = WritesLater(flat)(ids_of(0)).item()
    compiled = megatrain.compile(model, device="cpu", chunking="always")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert megatrain.TrainStep(compiled, torch.optim.SGD(trained, lr=0.1))(ids_of(0)).item() == expected
