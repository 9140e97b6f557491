"""chunk_head_loss: which heads it finds, and that the chunked loss has the bits of the whole one."""

from __future__ import annotations

import copy
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss

# Of fewer rows than 32 products of the CPU may have other bits.
WORDS, WIDTH, ROWS = 211, 24, 40
CLASSES = torch.rand(WORDS, generator=torch.Generator().manual_seed(5)) + 0.5


class Reader(nn.Module):
    """An embedding, a hidden layer and a head; `form` makes the loss of the head's logits."""

    def __init__(self, form: Any, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.scale = nn.Parameter(torch.rand(WORDS) + 0.5)
        self.register_buffer("classes", CLASSES.clone())
        self.form = form
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(ids)).tanh()
        return self.form(self, self.head(hidden), ids)


def flat(_: Any, logits: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), ids.reshape(-1), **options)


def shifted(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().flatten(0, 1), ids[..., 1:].reshape(-1))


def first_rows(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[1][2:9:3], ids[1][2:9:3])


def capped(model: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = (logits.float() / 3.0).tanh() * 3.0 * model.scale + model.classes.view(1, 1, -1)
    return F.cross_entropy(logits.reshape(-1, WORDS), ids.reshape(-1), reduction="sum") / 5


def of_log_softmax(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    log_probs = F.log_softmax(logits.mul(0.5), dim=-1, dtype=torch.float32)
    return nn.NLLLoss(ignore_index=3)(log_probs.view(-1, WORDS), ids.flatten())


def row_by_row(model: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (flat(model, logits, ids, reduction="none", ignore_index=2) * torch.arange(ids.numel())).sum()


def transposed(_: Any, logits: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), ids, **options)


def transposed_rows(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    found = F.cross_entropy(logits.unflatten(1, (3, 11)).permute(0, 3, 1, 2), ids.view(3, 3, 11), reduction="none")
    return (found * torch.arange(33.0).view(3, 11)).sum()


def weighted(model: Any, logits: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return flat(model, logits, ids, weight=model.classes.to(logits.dtype), **options)


FORMS: dict[str, Any] = {
    "flat": flat,
    "sum": partial(flat, reduction="sum"),
    "ignored": partial(flat, ignore_index=0),
    "smoothed": partial(flat, label_smoothing=0.2, ignore_index=1),
    "smoothed sum": partial(flat, label_smoothing=0.2, reduction="sum"),
    "smoothed rows": lambda m, x, ids: flat(m, x, ids, label_smoothing=0.2, reduction="none").square().sum(),
    "shifted": shifted,
    "some rows": first_rows,
    "capped": capped,
    "log_softmax": of_log_softmax,
    "row by row": row_by_row,
}
WEIGHTED: dict[str, Any] = {
    "mean": weighted,
    "sum": partial(weighted, reduction="sum", ignore_index=4),
    "smoothed": partial(weighted, label_smoothing=0.1, ignore_index=4),
    "rows": lambda m, x, ids: weighted(m, x, ids, reduction="none").square().sum(),
}


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


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMS, cycle([torch.float32, torch.bfloat16]), strict=False)))
def test_loss_and_hidden_gradients_have_the_bits_of_the_whole(form: str, dtype: torch.dtype):
    # Of three rows products have other bits than of two and one.
    rows, is_exact = (2, False) if form == "some rows" else (ROWS, True)
    assert_chunked_equals_whole(Reader(FORMS[form], bias=form != "flat").to(dtype), rows, is_exact=is_exact)


TRANSPOSED: dict[str, Any] = {
    "mean": transposed,
    "ignored": partial(transposed, ignore_index=0),
    "smoothed": partial(transposed, label_smoothing=0.2, ignore_index=1),
    "smoothed rows": lambda m, x, ids: transposed(m, x, ids, label_smoothing=0.2, reduction="none").square().sum(),
    "weighted rows": lambda m, x, ids: transposed(m, x, ids, weight=m.classes, reduction="none").square().sum(),
    "rows of rows": transposed_rows,
}


@pytest.mark.parametrize("form", TRANSPOSED)
def test_transposed_logits_sum_words_in_another_order(form: str):
    """[batch, words, length]: torch's softmax over words that don't lie side by side adds them up otherwise."""
    assert_chunked_equals_whole(Reader(TRANSPOSED[form]), is_exact=False)


@pytest.mark.parametrize("form", WEIGHTED)
def test_weights_of_classes_sum_rows_in_another_order(form: str):
    assert_chunked_equals_whole(Reader(WEIGHTED[form]), is_exact=False)


@pytest.mark.parametrize("rows", [1, 3, 32, 98])
def test_any_number_of_rows_makes_a_chunk(rows: int):
    assert_chunked_equals_whole(Reader(flat), rows, is_exact=rows > 32)


class Mixed(Reader):
    """Mixed precision: fp32 weights, and a forward under autocast."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_the_loss_has_the_bits_of_the_whole(form: str):
    rows, is_exact = (2, False) if form == "some rows" else (ROWS, True)
    assert_chunked_equals_whole(Mixed(FORMS[form], bias=form != "flat"), rows, is_exact=is_exact, eps=2**-7)


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_what_is_frozen_gets_no_gradient(frozen: str):
    model = Reader(flat)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head") == (frozen == "body"))
    assert_chunked_equals_whole(model)
    assert all((p.grad is None) for p in model.parameters())


def test_sums_over_chunks_are_rounded_once():
    """In bf16 the head's gradient is as near to that of fp64 as the whole one; rounding each chunk's isn't."""
    model = Reader(flat, bias=False).bfloat16()
    exact, whole = copy.deepcopy(model).double(), copy.deepcopy(model)
    ((_, truth),) = losses_and_gradients(exact, exact, steps=1)
    ((_, expected),) = losses_and_gradients(whole, whole, steps=1)
    ((_, found),) = losses_and_gradients(chunked(model, 1), model, steps=1)
    errors = [(each["head.weight"].double() - truth["head.weight"]).norm() for each in (expected, found)]
    assert errors[1] <= 1.05 * errors[0]


def test_a_tied_weight_gets_the_gradients_of_both_uses():
    model = Reader(flat, bias=False, tied=True)
    whole = copy.deepcopy(model)
    expected, found = losses_and_gradients(whole, whole), losses_and_gradients(chunked(model), model)
    for (loss, gradients), (found_loss, found_gradients) in zip(expected, found, strict=True):
        assert torch.equal(loss, found_loss)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-7)


def test_each_of_several_heads_is_chunked():
    """Multi-token prediction: a head for each of the next words."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            logits = [head(hidden[:, : -1 - i]) for i, head in enumerate(self.heads)]
            return sum(F.cross_entropy(x.flatten(0, 1), ids[:, 1 + i :].flatten()) for i, x in enumerate(logits))  # pyright: ignore

    traced = chunk_head_loss(megatrain.trace(Several(), (ids_of(0),)), rows=4)
    assert [n.target.shape.numel() for n in traced.graph.nodes if isinstance(n.target, HeadLoss)] == [96, 93, 90]
    assert str(traced).count("linear, cross_entropy; 4 rows at a time") == 3


def in_place(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits.mul_(2.0), ids)


def dropped(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, F.dropout(logits, 0.1), ids)


def scaled_by_row(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits * torch.rand(3, 33, 1), ids)


def centered(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits - logits.mean(1, keepdim=True), ids)


def some_words(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :200].flatten(0, 1), ids.flatten() % 200)


def regrouped(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(WORDS, -1).t().contiguous(), ids.flatten())


def transposed_otherwise(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = logits.unflatten(1, (11, 3))  # 11 and 3 change places, too
    return F.cross_entropy(logits.permute(0, 3, 2, 1), ids.view(3, 3, 11))


def of_probabilities(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(ids.flatten(), WORDS).float())


def without_softmax(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.flatten(0, 1), ids.flatten())


def softmax_over_rows(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), dim=0), ids.flatten())


def scaled_log_probs(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), dim=-1).mul(2.0), ids.flatten())


def read_twice(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits, ids) + 1e-4 * logits.logsumexp(-1).square().mean()


def returned(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> Any:
    return flat(_, logits, ids), logits


def partly_under_autocast(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return flat(_, logits, ids)


def without_gradients(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return flat(_, logits, ids)


OTHERS = [
    in_place, dropped, scaled_by_row, centered, some_words, regrouped, transposed_otherwise, of_probabilities,
    without_softmax, softmax_over_rows, scaled_log_probs, read_twice, returned, partly_under_autocast,
    without_gradients,
]  # fmt: skip


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_what_isnt_the_pattern_stays(form: Any):
    traced = megatrain.trace(Reader(form), (ids_of(0),))
    assert chunk_head_loss(traced, rows=4) is traced


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


def test_fewer_rows_than_a_chunk_stay():
    traced = megatrain.trace(Reader(flat), (ids_of(0),))
    assert chunk_head_loss(traced) is traced
    assert chunk_head_loss(traced, rows=99) is traced
    assert chunk_head_loss(traced, rows=98) is not traced


def test_one_and_one_point_nought_are_two_templates():
    texts = [str(chunk_head_loss(megatrain.trace(Reader(form), (ids_of(0),)), rows=4)) for form in (by_one, by_float)]
    assert "mul(1)" in texts[0]
    assert "mul(1.0)" in texts[1]
    targets = [
        next(n.target for n in chunk_head_loss(megatrain.trace(Reader(form), (ids_of(0),)), rows=4).graph.nodes
             if isinstance(n.target, HeadLoss))
        for form in (by_one, by_float)
    ]  # fmt: skip
    assert targets[0] != targets[1]


def by_one(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits * 1, ids)


def by_float(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return flat(_, logits * 1.0, ids)


@pytest.mark.parametrize("label", [WORDS, -1, -100])
def test_a_label_that_is_no_word_is_eagers_own_error(label: int):
    class Given(Reader):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten(), ignore_index=7)

    model = Given(flat)
    compiled = megatrain.compile(model, device="cpu", passes=[partial(chunk_head_loss, rows=40)])
    ids, labels = ids_of(0), ids_of(0)
    assert torch.equal(compiled(ids, labels), model(ids, labels))
    labels[2, 3] = label
    with pytest.raises(IndexError) as expected:
        model(ids, labels)
    with pytest.raises(IndexError) as found:
        compiled(ids, labels)
    assert str(found.value) == str(expected.value)


def test_a_second_derivative_is_refused():
    target = next(
        n.target
        for n in chunk_head_loss(megatrain.trace(Reader(flat), (ids_of(0),)), rows=4).graph.nodes
        if isinstance(n.target, HeadLoss)
    )
    hidden, weight = torch.randn(99, WIDTH, requires_grad=True), torch.randn(WORDS, WIDTH)
    loss = target(hidden, ids_of(0).flatten(), weight, None, None)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


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
