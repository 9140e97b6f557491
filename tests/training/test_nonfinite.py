"""Gradients that aren't finite: the step is refused or skipped as a whole, and the block is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.tiers import diagonal
from tests.training.hazards import WIDTH
from tests.training.parity import SideBySide, adamw, generator_of, loop_gradients, sgd

MODES = [
    pytest.param({"overlap": overlap, "max_grad_norm": norm}, id=f"{'overlap' if overlap else 'serial'}-{norm}")
    for overlap in (True, False)
    for norm in (None, 0.5)
]
PLACES = {"layers.0.fc.weight": 0, "layers.1.norm.bias": 1, "head.weight": None}


def batches(step: int) -> list[torch.Tensor]:
    return [torch.randn(size, WIDTH, generator=generator_of(step * 2 + i)) for i, size in enumerate((2, 3))]


class Run:
    """Steps on both sides; in some, a factor makes an element of one parameter's gradient infinite."""

    def __init__(self, mode: dict[str, Any], optimizer: Any = sgd, **options: Any):
        chaos = Chaos(seed=1, max_delay_s=0.0001)
        compiled = {"activations": "offload", "chaos": chaos}
        self.sides = SideBySide.of("hazardous", optimizer, compile_options=compiled, **mode, **options)
        self.bad: str | None = None
        self.factor = math.inf
        self.handles = [
            model.get_parameter(name).register_hook(lambda gradient, name=name: self.spoil(name, gradient))
            for model in (self.sides.eager, self.sides.streamed)
            for name in PLACES
        ]
        self.number = 0

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def spoil(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if name != self.bad:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = self.factor
        return spoilt

    def take(self, count: int = 1) -> None:
        self.bad = None
        for _ in range(count):
            self.sides.take(batches(self.number), seed=self.number)
            self.number += 1

    def skip(self, name: str) -> None:
        """The loop makes gradients, and doesn't use them."""
        self.bad = name
        torch.manual_seed(self.number)
        expected = loop_gradients(self.sides.eager, batches(self.number), loss=self.sides.loss)
        self.sides.eager.zero_grad()
        drawn = torch.get_rng_state()
        torch.manual_seed(self.number)
        assert_same(expected, self.sides.step(batches(self.number)), f"loss of step {self.number}")
        assert_same(drawn, torch.get_rng_state(), f"generator after step {self.number}")
        self.number += 1

    def refuse(self, name: str) -> str:
        """The step raises, and all is as before."""
        self.bad = name
        torch.manual_seed(self.number)
        drawn = torch.get_rng_state()
        expected = snapshot(self.sides.eager, self.sides.eager_optimizer)
        count = self.sides.step.progress.count
        with pytest.raises(ExecuteError, match="is not finite") as caught:
            self.sides.step(batches(self.number))
        assert_same(drawn, torch.get_rng_state(), "generator")
        self.sides.step.flush()
        assert_same(expected, snapshot(self.sides.streamed, self.sides.optimizer), name)
        assert self.sides.step.progress.count == count
        assert not [key for key, p in self.sides.streamed.named_parameters() if p.grad is not None]
        return str(caught.value)


def block_of(run: Run, name: str) -> int:
    found = PLACES[name]
    return max(op.block for op in run.sides.step.schedule.ops if op.what == "G") if found is None else found


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    made = Run(*request.param[:1], **request.param[1])
    yield made
    made.close()


MET = {"skip": ("sgd", "adamw", "adamw", "sgd"), "raise": ("adamw", "sgd", "sgd", "adamw")}  # by each mode


def cases(on_nonfinite: str) -> Any:
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(
                (mode.values[0], {"on_nonfinite": on_nonfinite, "optimizer": optimizer}),
                id=f"{mode.id}-{name}",
                marks=[pytest.mark.wide] if name != MET[on_nonfinite][row] else [],
            )
            for row, mode in enumerate(MODES)
            for name, optimizer in (("sgd", sgd), ("adamw", adamw))
        ],
        indirect=True,
    )


@cases("skip")
def test_skipped_steps_are_those_of_a_loop_that_skips_them(run: Run) -> None:
    names = list(PLACES)
    run.take(2)
    for number, name in enumerate(names):
        run.skip(name)
        assert run.sides.step.progress.skipped == number + 1
        text = run.sides.step.progress.nonfinite
        assert text == f"the gradient of `{name}`, of block {block_of(run, name)},"
        if number != 1:
            run.take(number + 1)  # and after the second, two skipped ones in a row
    run.sides.assert_same()
    assert run.sides.step.progress.count == run.number
    assert run.sides.step.progress.skipped == 3


@cases("raise")
def test_refused_steps_leave_no_trace(run: Run) -> None:
    for name in PLACES:  # the first ahead of any good step
        text = run.refuse(name)
        assert f"the gradient of `{name}`, of block {block_of(run, name)}, is not finite" in text
        run.take(2)
    run.sides.assert_same()
    assert run.sides.step.progress.skipped == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_first_to_arrive_is_named(mode: dict[str, Any]) -> None:
    """The last block's gradients come first: what is infinite there is behind all others."""
    run = Run(mode, on_nonfinite="skip")
    try:
        handles = [p.register_hook(lambda gradient: gradient * math.nan) for p in run.sides.streamed.parameters()]
        run.sides.step(batches(0))
        assert run.sides.step.progress.nonfinite.endswith(f"of block {block_of(run, 'head.weight')},")
        for handle in handles:
            handle.remove()
    finally:
        run.close()


@pytest.mark.parametrize(("mode", "on_nonfinite"), diagonal([mode.values[0] for mode in MODES], ["raise", "skip"]))
def test_finite_gradients_whose_norm_overflows_are_taken_as_eager_takes_them(
    mode: dict[str, Any], on_nonfinite: str
) -> None:
    run = Run(mode, on_nonfinite=on_nonfinite)
    run.factor = 1e30
    try:
        run.take(1)
        run.bad = "layers.1.norm.bias"
        run.sides.take(batches(1)[:1], seed=1)  # a hook on a parameter runs once a step, in the loop with each backward
        run.number = 2
        run.take(1)
        run.sides.assert_same()
        assert run.sides.step.progress.skipped == 0
    finally:
        run.close()


@pytest.mark.parametrize("mode", MODES)
def test_without_the_option_infinity_goes_where_eager_lets_it_go(mode: dict[str, Any]) -> None:
    run = Run(mode)
    try:
        run.take(1)
        run.bad = "layers.1.norm.bias"
        run.sides.take(batches(1)[:1], seed=1)  # a hook on a parameter runs once a step, in the loop with each backward
        run.number = 2
        run.sides.step.flush()
        left, right = (dict(m.named_parameters()) for m in (run.sides.eager, run.sides.streamed))
        for name in left:
            assert torch.equal(left[name].isnan(), right[name].isnan()), name
            assert torch.equal(left[name].nan_to_num(), right[name].nan_to_num()), name
        assert not left["layers.1.norm.bias"].isfinite().all()
    finally:
        run.close()
