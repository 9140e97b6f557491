"""Random configurations against eager PyTorch: models, optimizers, options, and what users do between two steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from torch import nn

import megatrain
from tests.comparing import assert_same, assert_same_bits, snapshot
from tests.faults.edits import EDITS, ONE_BATCH, Edit, Side, edits
from tests.faults.tally import Tally
from tests.optim.reference import Reference, values_of
from tests.training.parity import generator_of, loop_step

WIDTH = 4
PIECE = 50
SHRINKING_S = 60


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.2)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": Normed,
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
NARROW = [name for name in LAYERS if name != "batch norm"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, foreach=False),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05),
}


@dataclass(frozen=True)
class Configuration:
    """One run; `is_tied` uses the first layer a second time at the end."""

    layers: list[str]
    is_tied: bool
    optimizer: str
    num_groups: int
    sizes: list[int]
    max_norm: float | None
    overlap: bool
    activations: str
    transfer: str
    block_bytes: int | None
    steps: list[list[Edit]]
    seed: int

    def built(self) -> nn.Module:
        torch.manual_seed(self.seed)
        made = [nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in self.layers)]
        return nn.Sequential(*made, *(made[:1] if self.is_tied else []))

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        cut = len(parameters) // 2 if self.num_groups == 2 else 0
        groups = [{"params": part} for part in (parameters[:cut], parameters[cut:]) if part]
        return OPTIMIZERS[self.optimizer](groups)


@st.composite
def wide(draw: st.DrawFn) -> Configuration:
    """In fp32. Tied weights with several micro-batches round differently, as documented, so they have one."""
    is_tied = draw(st.booleans())
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=1 if is_tied else 3))
    allowed = [name for name in EDITS if len(sizes) == 1 or name not in ONE_BATCH]
    return Configuration(
        layers=draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4)),
        is_tied=is_tied,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        num_groups=draw(st.sampled_from([1, 2])),
        sizes=sizes,
        max_norm=draw(st.sampled_from([None, 0.5])),
        overlap=draw(st.booleans()),
        activations=draw(st.sampled_from(["auto", "keep", "recompute", "offload"])),
        transfer=draw(st.sampled_from(["copy", "copy", "bind"])),
        block_bytes=draw(st.sampled_from([None, None, 1, 100])),
        steps=draw(st.lists(st.lists(edits(allowed), max_size=2), min_size=2, max_size=4)),
        seed=draw(st.integers(0, 100)),
    )


def check_wide(it: Configuration) -> None:
    eager = it.built()
    streamed = copy.deepcopy(eager)
    left, right = Side(eager, it.optimizer_of(eager)), Side(streamed, it.optimizer_of(streamed))
    activations = "auto" if it.transfer == "bind" and it.activations == "offload" else it.activations
    compiled = megatrain.compile(
        streamed, device="cpu", transfer=it.transfer, activations=activations, block_bytes=it.block_bytes
    )
    step = megatrain.TrainStep(
        compiled, right.optimizer, loss=mean_of_squares, max_grad_norm=it.max_norm, overlap=it.overlap
    )
    right.flush = step.flush
    for number, changes in enumerate(it.steps):
        for change in changes:
            change.apply(left)
            change.apply(right)
        generator = generator_of(100 * it.seed + number)
        batches = [torch.randn(size, WIDTH, generator=generator) for size in it.sizes]
        torch.manual_seed(number)
        expected, norm = loop_step(eager, left.optimizer, batches, loss=mean_of_squares, max_norm=it.max_norm)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        assert_same(expected, step(batches), f"loss of step {number}")
        assert_same(drawn, torch.get_rng_state(), f"generator after step {number}")
        if it.max_norm is not None:
            assert_same(norm, step.progress.grad_norm, f"norm of step {number}")
    step.flush()
    assert_same(snapshot(eager, left.optimizer), snapshot(streamed, right.optimizer))


def mean_of_squares(result: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return result.float().square().mean()


@st.composite
def narrow(draw: st.DrawFn) -> Configuration:
    """In bf16 over fp32 masters; one batch, because the reference adds up nothing."""
    names = ["rate", "decay", "hook", "forward hook", "eval"]
    return Configuration(
        layers=draw(st.lists(st.sampled_from(NARROW), min_size=1, max_size=4)),
        is_tied=draw(st.booleans()),
        # AdamW has the bits of its fused code; Adagrad makes its state when it is made, so in bf16.
        optimizer=draw(st.sampled_from(["sgd", "plain sgd", "adam", "fused", "rmsprop"])),
        num_groups=1,
        sizes=[draw(st.integers(2, 4))],
        max_norm=None,
        overlap=draw(st.booleans()),
        activations=draw(st.sampled_from(["auto", "keep", "recompute", "offload"])),
        transfer="copy",
        block_bytes=draw(st.sampled_from([None, None, 1, 100])),
        steps=draw(st.lists(st.lists(edits(names), max_size=2), min_size=2, max_size=4)),
        seed=draw(st.integers(0, 100)),
    )


def check_narrow(it: Configuration) -> None:
    model = it.built()
    reference = Reference(model, OPTIMIZERS[it.optimizer])
    compiled = megatrain.compile(
        model, device="cpu", precision="bf16", activations=it.activations, block_bytes=it.block_bytes, transfer="copy"
    )
    optimizer = OPTIMIZERS[it.optimizer]([p for p in model.parameters() if p.requires_grad])
    step = megatrain.TrainStep(compiled, optimizer, loss=mean_of_squares, overlap=it.overlap)
    left, right = Side(reference.model, reference.optimizer), Side(model, optimizer, step.flush)
    for number, changes in enumerate(it.steps):
        for change in changes:
            change.apply(left)
            change.apply(right)
        batch = torch.randn(it.sizes[0], WIDTH, generator=generator_of(100 * it.seed + number))
        torch.manual_seed(number)
        expected = reference.step((batch,), {})
        torch.manual_seed(number)
        assert expected == float(step(batch)), f"loss of step {number}"
    step.flush()
    masters = values_of(compiled)
    for name, master in reference.masters.items():
        assert_same_bits(master.detach(), masters[name], f"master of {name}")
    for name, value in reference.model.state_dict().items():
        assert_same_bits(value, model.state_dict()[name], name)


KINDS: dict[str, tuple[st.SearchStrategy[Configuration], Callable[[Configuration], None], int]] = {
    "configuration in fp32": (wide(), check_wide, 4),
    "configuration in bf16": (narrow(), check_narrow, 1),
}


def configurations(tally: Tally, *, seed: int, first: int, count: int) -> None:
    """Tries `count` configurations, a fifth of them in bf16, in pieces that each have a seed."""
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S
    whole = sum(share for _, _, share in KINDS.values())
    for name, (strategy, check, share) in KINDS.items():
        total = max(1, count * share // whole)
        for number, begun in enumerate(range(0, total, PIECE)):
            _piece(tally, name, strategy, check, seed + first + number, min(PIECE, total - begun))


def _piece(tally: Tally, name: str, strategy: Any, check: Callable[[Any], None], seed: int, size: int) -> None:
    """Tries until one fails, which hypothesis then makes smaller."""
    repeat = f"--only configurations --seed {seed}"
    held = 0
    has_failed = False

    def tried(it: Configuration) -> None:
        nonlocal held, has_failed
        try:
            check(it)
        except BaseException:
            has_failed = True
            raise
        held += not has_failed

    options = settings(
        max_examples=size,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        phases=[Phase.generate, Phase.shrink],
    )
    error: BaseException | None = None
    try:
        hypothesis.seed(seed)(options(hypothesis.given(strategy)(tried)))()
    except Exception as failure:
        error = failure
    for _ in range(held):
        tally.add(name, None, repeat)
    if error is not None:
        notes = " | ".join(getattr(error, "__notes__", ()))
        tally.add(name, f"{type(error).__name__}: {error} {notes}", repeat)
