"""The demo's parts on a plain model, the whole of it on a compiled one, and the command line around it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch

from megatrain import cli, demo
from megatrain.errors import OptionError

CPU = torch.device("cpu")
TINY = demo.Recipe(
    device="cpu",
    memory="4MiB",
    steps=4,
    batch_size=2,
    context=16,
    width=64,
    depth=2,
    warmup_steps=2,
    sample_bytes=20,
)
TEXT = b"the cat sat on the mat and the dog sat on the log " * 4


def test_the_held_out_text_shares_no_paragraph_with_the_training_text():
    training, held_out = demo.read_corpus()
    assert len(held_out) == pytest.approx(len(training) / 9, rel=0.01)
    # The cut itself may fall inside a paragraph.
    assert set(training.split(b"\n\n")[:-1]).isdisjoint(held_out.split(b"\n\n")[1:])


def test_unigram_entropy_of_equal_frequencies_is_their_logarithm():
    text = bytes(range(256))
    assert demo.unigram_entropy(text, text) == pytest.approx(math.log(256))


def test_unigram_entropy_of_unseen_bytes_is_finite():
    assert demo.unigram_entropy(b"a" * 100, b"z") == pytest.approx(math.log(356))


def test_batches_are_windows_of_the_text_in_an_order_fixed_by_the_seed():
    ids = demo.byte_tensor(TEXT)
    first, second = (torch.stack(list(islice(demo.random_batches(ids, TINY), 3))) for _ in range(2))
    assert torch.equal(first, second)
    assert all(bytes(window.tolist()) in TEXT for window in first.flatten(0, 1))


def test_a_text_of_one_window_can_be_drawn():
    window = next(demo.random_batches(torch.arange(TINY.context), TINY))
    assert torch.equal(window, torch.arange(TINY.context).expand(TINY.batch_size, -1))


def test_learning_rate_warms_up_then_falls_to_a_tenth_of_its_peak():
    assert demo.learning_rate(TINY, 0, 0.0) == pytest.approx(TINY.learning_rate / 2)
    assert demo.learning_rate(TINY, 1, 0.0) == pytest.approx(TINY.learning_rate)
    assert demo.learning_rate(TINY, 99, 1.0) == pytest.approx(TINY.learning_rate / 10)


def test_training_an_eager_model_lowers_the_held_out_loss():
    model = demo.build_model(TINY)
    before = demo.held_out_loss(model, TEXT, TINY, CPU)
    assert demo.train(model, TEXT, TINY, CPU)[0] == TINY.steps
    assert demo.held_out_loss(model, TEXT, TINY, CPU) < before


def test_training_ends_when_its_seconds_are_used_up_but_makes_one_step():
    num_steps, seconds = demo.train(demo.build_model(TINY), TEXT, replace(TINY, seconds=1e-9), CPU)
    assert num_steps == 1
    assert seconds > 0


def test_a_held_out_text_below_one_batch_is_refused():
    with pytest.raises(OptionError, match="5 bytes, too few for one batch"):
        demo.held_out_loss(torch.nn.Linear(1, 1), b"short", TINY, CPU)


def test_a_sample_depends_on_its_prompt_and_seed_only_and_may_outgrow_the_window():
    model = demo.build_model(TINY)
    texts = {demo.write_sample(model, b"The ", TINY, CPU) for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().startswith("The ")


def test_a_missing_transformers_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"(?s)transformers is not installed.*pip install"):
        demo.build_model(TINY)


def test_the_demo_shows_its_parts_and_succeeds(capsys):
    assert demo.run(replace(TINY, steps=150, batch_size=4, context=32, learning_rate=1e-2))
    shown = capsys.readouterr().out
    parts = ("model ", "held-out loss", "a sample", "schedule:", "device memory", "verify ")
    positions = [shown.index(part) for part in parts]
    assert positions == sorted(positions)


def test_an_unreadable_budget_is_one_message_and_status_2(capsys):
    assert cli.main(["demo", "--memory", "10 quux"]) == 2
    assert "10 quux" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["demo", "--seconds", "nan"], ["nonsense"], []])
def test_a_wrong_command_line_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: megatrain" in capsys.readouterr().err


def test_the_command_line_offers_the_recipe_as_it_is(monkeypatch):
    seen: list[demo.Recipe] = []
    monkeypatch.setattr(demo, "run", lambda recipe: seen.append(recipe) or True)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--steps", "7"]) == 0
    assert [r.steps for r in seen] == [demo.Recipe().steps, 7]
    assert seen[0] == demo.Recipe()


def test_an_interrupted_demo_says_so(monkeypatch, capsys):
    def interrupted(recipe):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert "interrupted; nothing was saved" in capsys.readouterr().err
