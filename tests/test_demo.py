"""The demo's parts, the whole of it on a compiled model, and the command line around it."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain import cli
from megatrain.demo import demo_command as command
from megatrain.demo.course import Course
from megatrain.demo.demonstrate import demonstrate
from megatrain.demo.model import build_model, held_out_loss, write_sample
from megatrain.demo.recipe import Recipe, learning_rate
from megatrain.demo.text import byte_tensor, random_batches, read_corpus, step_batches, unigram_entropy
from megatrain.demo.training import Training
from megatrain.errors import OptionError, ScheduleError

pytestmark = pytest.mark.usefixtures("lowered_once")  # of few models

CPU = torch.device("cpu")
TINY = Recipe(
    device="cpu",
    memory="4MiB",
    steps=4,
    micro_batches=2,
    batch_size=1,
    context=16,
    width=64,
    depth=2,
    warmup_steps=2,
    sample_bytes=20,
)
TEXT = b"the cat sat on the mat and the dog sat on the log " * 4


def test_the_held_out_text_shares_no_paragraph_with_the_training_text():
    training, held_out = read_corpus()
    assert len(held_out) == pytest.approx(len(training) / 9, rel=0.01)
    # The cut itself may fall inside a paragraph.
    assert set(training.split(b"\n\n")[:-1]).isdisjoint(held_out.split(b"\n\n")[1:])


def test_unigram_entropy_of_equal_frequencies_is_their_logarithm():
    text = bytes(range(256))
    assert unigram_entropy(text, text) == pytest.approx(math.log(256))


def test_unigram_entropy_of_unseen_bytes_is_finite():
    assert unigram_entropy(b"a" * 100, b"z") == pytest.approx(math.log(356))


def test_batches_are_windows_of_the_text_in_an_order_fixed_by_the_seed():
    ids = byte_tensor(TEXT)
    first, second = (torch.stack(list(islice(random_batches(ids, TINY), 3))) for _ in range(2))
    assert torch.equal(first, second)
    assert all(bytes(window.tolist()) in TEXT for window in first.flatten(0, 1))


def test_a_text_of_one_window_can_be_drawn():
    window = next(random_batches(torch.arange(TINY.context), TINY))
    assert torch.equal(window, torch.arange(TINY.context).expand(TINY.batch_size, -1))


def test_batches_of_a_later_step_are_those_that_an_earlier_start_comes_to():
    early, late = step_batches(TEXT, TINY, CPU), step_batches(TEXT, TINY, CPU, first_step=2)
    third, first_of_late = next(islice(early, 2, None)), next(late)
    assert len(third) == TINY.micro_batches
    for a, b in zip(third, first_of_late, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["labels"], b["labels"])


def test_learning_rate_warms_up_then_falls_to_a_tenth_of_its_peak():
    assert learning_rate(TINY, 0, 100) == pytest.approx(TINY.learning_rate / 2)
    assert learning_rate(TINY, 1, 100) == pytest.approx(TINY.learning_rate)
    assert learning_rate(TINY, 99, 100) == pytest.approx(TINY.learning_rate / 10)


def test_the_warm_up_is_the_same_however_many_steps_follow():
    for step in range(TINY.warmup_steps):
        assert learning_rate(TINY, step, 3) == learning_rate(TINY, step, 1000)


def trained(course, text=TEXT):
    recipe = course.recipe
    compiled = megatrain.compile(build_model(recipe), device="cpu", memory=recipe.memory, transfer="copy")
    training = Training(compiled, course, text)
    training.run()
    return training, compiled


def test_training_lowers_the_held_out_loss(tmp_path):
    course = Course(TINY, tmp_path / "run", "")
    before = held_out_loss(build_model(TINY), TEXT, TINY, CPU)
    training, compiled = trained(course)
    assert training.step.progress.count == TINY.steps == course.saved
    assert held_out_loss(compiled, TEXT, TINY, CPU) < before


def test_training_ends_when_its_seconds_are_used_up_but_makes_one_step(tmp_path):
    course = Course(replace(TINY, seconds=1e-9), tmp_path / "run", "")
    training, _ = trained(course)
    assert training.step.progress.count == 1
    assert course.seconds > 0


def test_the_number_of_steps_is_fixed_once_the_warm_up_has_shown_the_speed():
    course = Course(replace(TINY, steps=1000, seconds=100.0, warmup_steps=10), Path(), "")
    course.spend(9, 9.0)
    assert course.num_steps is None
    course.spend(10, 10.0)
    assert course.num_steps == 95
    course.spend(50, 99.0)  # slower since: the rates of the steps to come stay what they were
    assert course.num_steps == 95
    assert course.goes_on(94)
    assert not course.goes_on(95)


def test_a_slow_warm_up_fixes_the_number_of_steps_early():
    course = Course(replace(TINY, steps=1000, seconds=100.0, warmup_steps=50), Path(), "")
    course.spend(5, 25.0)
    assert course.num_steps == 19


def test_a_held_out_text_below_one_batch_is_refused():
    with pytest.raises(OptionError, match="5 bytes, too few for the windows"):
        held_out_loss(torch.nn.Linear(1, 1), b"short", TINY, CPU)


def test_a_sample_depends_on_its_prompt_and_seed_only_and_may_outgrow_the_window():
    model = build_model(TINY)
    texts = {write_sample(model, b"The ", TINY, CPU) for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().startswith("The ")


def test_a_missing_transformers_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"(?s)transformers is not installed.*pip install"):
        build_model(TINY)


def test_the_demo_shows_its_parts_and_succeeds(tmp_path, capsys):
    recipe = replace(TINY, steps=150, batch_size=2, context=32, learning_rate=1e-2, memory="1200KiB", depth=3)
    assert demonstrate(Course.begin(recipe, tmp_path / "run"))
    shown = capsys.readouterr().out
    parts = ("model ", "saved in", "held-out loss", "a sample", "schedule:", "device memory", "verify ")
    positions = [shown.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "micro-batches: 2\nupdates: deferred, clipped\n" in shown
    peaks = dict(re.findall(r"^  (the schedule's|measured) peak +(.*)$", shown, re.MULTILINE))
    assert peaks["measured"] == peaks["the schedule's"]


def test_a_budget_for_steps_that_the_comparison_does_not_fit_is_refused_before_training(tmp_path, capsys):
    """A step may need less than a call with gradients, which `verify` compares with eager PyTorch in the end."""
    recipe = replace(TINY, batch_size=4, context=32, memory="1200KiB")
    with pytest.raises(ScheduleError, match="at least 1395716 B are needed"):
        demonstrate(Course.begin(recipe, tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "with a budget of 1.17 MiB" in shown
    assert "plan " not in shown


def test_an_unreadable_budget_is_one_message_and_status_2(tmp_path, capsys):
    assert cli.main(["demo", "--memory", "10 quux", "--folder", str(tmp_path / "run")]) == 2
    assert "10 quux" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--steps", "two"], ["nonsense"], []])
def test_a_wrong_command_line_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: megatrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "steps=0 is less than 1."),
        (["--seconds", "nan"], "seconds=nan is not a number."),
        (["--interrupt-at", "1"], "interrupt_at=1.0 is not below 1."),
    ],
)
def test_a_wrong_value_ends_with_status_2_and_the_rule(arguments, said, tmp_path, capsys):
    assert cli.main(["demo", "--folder", str(tmp_path / "run"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_offers_the_recipe_as_it_is(tmp_path, monkeypatch, capsys):
    seen: list[Recipe] = []
    monkeypatch.setattr(command, "demonstrate", lambda course, **_: seen.append(course.recipe) or True)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--steps", "7"]) == 0
    assert seen == [Recipe(), Recipe(steps=7)]
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"optimizer steps (default: {Recipe().steps})" in capsys.readouterr().out


def test_a_demo_that_is_interrupted_before_it_saves_says_so(tmp_path, monkeypatch, capsys):
    def interrupted(course, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "demonstrate", interrupted)
    assert cli.main(["demo", "--folder", str(tmp_path / "run")]) == 130
    assert "interrupted; nothing was saved, and nothing is still running" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
