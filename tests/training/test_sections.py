"""Steps whose first block is updated and copied section by section: the bits of the loop, whatever happens between."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.memory.bus import Bus
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.runtime import loaded
from megatrain.runtime.slots import Slots
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler import from_program
from megatrain.sizes import Section
from tests.tiers import diagonal, wide
from tests.training.parity import TASKS, SideBySide, fresh, gpt_batch, labelled, sgd
from tests.training.sections import NUM_SECTIONS, always_divided

WAYS: dict[str, dict[str, Any]] = {"spread": {"spread": True}, "clipped": {"max_grad_norm": 0.5}}


@pytest.fixture(autouse=True)
def divided() -> Generator[None]:
    with always_divided():
        yield


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def sections_of(step: megatrain.TrainStep) -> list[str]:
    return [str(op).partition("@")[0] for op in step.schedule.ops if op.section is not None]


def all_sections(block: int = 0) -> list[str]:
    return [f"{what}{block}/{number}" for what in "UW" for number in range(NUM_SECTIONS)]


@pytest.mark.parametrize(("name", "way"), diagonal(["llama", "gpt"], WAYS))
def test_steps_in_sections_have_the_bits_of_the_loop(name: str, way: str):
    sides = SideBySide.of(name, fused, compile_options={"chaos": Chaos(seed=5, max_delay_s=1e-4)}, **WAYS[way])
    for number in range(5):
        # The tied weights of gpt have the loop's bits with one micro-batch.
        batches = [labelled(10 * number + i, 2) for i in range(1 + number % 2)]
        sides.take(batches if name == "llama" else gpt_batch(number, 2), seed=number)
        if number == 2:
            sides.assert_same()  # looks, and so completes what is due
    assert sorted(sections_of(sides.step)) == all_sections()
    sides.assert_same()


@pytest.mark.parametrize("masters", ["exact", wide("rounded")])  # of rounded ones a plan is made below
def test_bf16_steps_in_sections_have_the_bits_of_whole_ones(masters: str):
    """Rounding at random has one stream of numbers for each parameter, so these updates are never divided."""
    found: list[dict[str, torch.Tensor]] = []
    for count in (1, NUM_SECTIONS):
        with always_divided(count):
            torch.manual_seed(0)
            compiled = megatrain.compile(
                TASKS["llama"].build(), device="cpu", transfer="copy", precision="bf16", masters=masters
            )
            step = megatrain.TrainStep(compiled, optimizer := fused(compiled), spread=True)
            for number in range(4):
                step(labelled(number, 2))
            assert bool(sections_of(step)) == (count > 1 and masters == "exact")
            step.flush()
        states = {f"{i}.{name}": value for i, s in enumerate(optimizer.state.values()) for name, value in s.items()}
        found.append({**{key: value.clone() for key, value in compiled.state_dict().items()}, **states})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda model: torch.optim.AdamW(model.parameters(), fused=True, amsgrad=True)],
    ids=["sgd", "amsgrad"],
)
def test_updates_that_may_depend_on_more_are_not_divided(optimizer: Callable[[nn.Module], torch.optim.Optimizer]):
    sides = SideBySide.of("llama", optimizer, spread=True)
    for number in range(3):
        sides.take(labelled(number, 2), seed=number)
    assert sections_of(sides.step) == []
    sides.assert_same()


def test_without_deferred_updates_nothing_is_divided():
    others: list[dict[str, Any]] = [{"spread": False}, {"overlap": False}, {"report_norm": True}]
    for options in others:
        sides = SideBySide.of("llama", fused, **options)
        sides.take(labelled(0, 2), seed=0)
        sides.take(labelled(1, 2), seed=1)
        assert sections_of(sides.step) == []
    bound = SideBySide.of("llama", fused, spread=True, compile_options={"transfer": "bind"})
    bound.take(labelled(0, 2), seed=0)
    assert sections_of(bound.step) == []


def test_an_optimizer_that_changes_its_mind_updates_all_with_the_first_section(monkeypatch: pytest.MonkeyPatch):
    """The table says sections; a step's own options may say otherwise. No section is copied before it is final."""
    sides = SideBySide.of("llama", fused, spread=True)
    sides.step.prepare(labelled(0, 2))
    assert sections_of(sides.step)
    asked: list[Section] = []
    monkeypatch.setattr(MasterStep, "update_section", lambda *args, section: asked.append(section))
    for attribute, other in (("is_elementwise", False), ("is_sure", lambda *_: False)):
        with monkeypatch.context() as patch:
            patch.setattr(AdamWInOnePass, attribute, other)
            for number in range(3):
                sides.take(labelled(number, 2), seed=number)
            sides.assert_same(attribute)
    assert sections_of(sides.step)
    assert not asked


def test_sections_move_what_the_table_says(monkeypatch: pytest.MonkeyPatch):
    moved: list[int] = []
    to_device = Bus.to_device

    def counted(bus: Bus, out: torch.Tensor, source: torch.Tensor, arena: Any) -> None:
        moved.append(source.nbytes)
        to_device(bus, out, source, arena)

    sides = SideBySide.of("llama", fused, spread=True)
    sides.take(labelled(0, 2), seed=0)
    monkeypatch.setattr(Bus, "to_device", counted)
    sides.take(labelled(1, 2), seed=1)
    plan = sides.step.schedule
    (first,) = {plan.known_workload().blocks[op.block].state_bytes for op in plan.ops if op.section is not None}
    sections = [plan.effects().of(*op.key).moves for op in plan.ops if op.what == "W" and op.section is not None]
    assert sum(sections) == first
    assert len(sections) == NUM_SECTIONS
    # Gaps between neighbours are copied with them, but not between sections of tensors.
    assert plan.h2d_bytes - 64 * len(moved) <= sum(moved) <= plan.h2d_bytes


class Fails(Exception):
    """What a test raises."""


@pytest.mark.parametrize(
    ("owner", "number", "way"),
    [
        (MasterStep, 0, "clipped"),
        wide((MasterStep, 1, "spread")),
        (MasterStep, 2, "spread"),
        wide((Slots, 0, "spread")),
        (Slots, 1, "clipped"),
        wide((Slots, 2, "spread")),
    ],
)
def test_a_failure_between_two_sections_leaves_the_end_of_a_step(
    monkeypatch: pytest.MonkeyPatch, owner: type[Any], number: int, way: str
):
    """Whatever sections were updated before it: the previous step is completed, and this one left no trace."""
    sides = SideBySide.of("llama", fused, **WAYS[way])
    for seed in range(2):
        sides.take(labelled(seed, 2), seed=seed)
    name = "update_section" if owner is MasterStep else "prefetch"
    original, has_failed = getattr(owner, name), list[bool]()

    def failing(*args: Any, section: Section | None = None, **options: Any) -> None:
        if section is not None and section.number == number and not has_failed:
            has_failed.append(True)
            raise Fails
        original(*args, section=section, **options)

    monkeypatch.setattr(owner, name, failing)
    generator = torch.get_rng_state()
    with pytest.raises(megatrain.ExecuteError, match=f"{'U' if owner is MasterStep else 'W'}0/{number}"):
        sides.step(labelled(2, 2))
    assert has_failed
    assert torch.equal(generator, torch.get_rng_state())
    sides.assert_same("after the failure")
    for seed in range(2, 5):
        sides.take(labelled(seed, 2), seed=seed)
    sides.assert_same("further steps")


def test_a_checkpoint_between_steps_completes_the_sections(tmp_path: Any):
    sides = SideBySide.of("llama", fused, spread=True)
    for seed in range(3):
        sides.take(labelled(seed, 2), seed=seed)
    assert 0 in sides.step._setup.updates.due  # type: ignore[union-attr]
    sides.step.save(tmp_path / "saved")
    compiled = fresh("llama")
    resumed = megatrain.TrainStep.load(tmp_path / "saved", compiled, fused(compiled), spread=True)
    for seed in range(3, 6):
        torch.manual_seed(seed)
        expected = sides.expect(labelled(seed, 2))
        torch.manual_seed(seed)
        assert torch.equal(expected, resumed(labelled(seed, 2)))
    resumed.flush()
    pairs = zip(sides.eager.parameters(), compiled.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_schedule_that_divides_a_block_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Such a block is never divided by `step_schedule`; another schedule might."""
    answers = iter([False, True])
    monkeypatch.setattr(from_program, "has_parts", lambda *_: next(answers))
    monkeypatch.setattr(loaded, "has_parts", lambda *_: next(answers))
    sides = SideBySide.of("llama", fused, spread=True)
    with pytest.raises(megatrain.ExecuteError) as caught:
        sides.step(labelled(0, 2))
    assert str(caught.value) == (
        "block 0 holds rows of a tensor, and the schedule divides it into sections.\n"
        "  Sections are of whole tensors, as updates are.\n"
        "  Build the schedule without sections."
    )
    monkeypatch.setattr(from_program, "has_parts", lambda *_: True)
    sides = SideBySide.of("llama", fused, spread=True)
    sides.take(labelled(0, 2), seed=0)
    assert sections_of(sides.step) == []


@pytest.mark.parametrize("masters", ["exact", "rounded"])
def test_a_plan_has_the_sections_of_its_step(masters: str):
    model = TASKS["llama"].build()
    chosen: dict[str, Any] = {"precision": "bf16", "masters": masters}
    planned = megatrain.plan(model, example_kwargs=labelled(0, 2), optimizer="AdamW", **chosen)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", **chosen)
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), spread=True)
    step.prepare(labelled(0, 2))
    assert planned.schedule.sections == step.schedule.sections
    assert (planned.schedule.sections is not None) == (masters == "exact")


def test_a_plan_of_updates_that_may_depend_on_more_has_no_sections():
    model = TASKS["llama"].build()
    whole = megatrain.plan(model, example_kwargs=labelled(0, 2), optimizer="SGD", precision="bf16")
    assert whole.schedule.sections is None
