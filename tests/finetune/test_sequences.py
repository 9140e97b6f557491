"""Documents as sequences: what is learnt, what is packed, what is cut, and what is held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import OptionError
from megatrain.finetune.dealt_batches import rate_of
from megatrain.finetune.documents import Documents, read_documents
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.finetune.pace import Pace
from megatrain.finetune.sequences import IGNORED, Sequences, tokenized
from tests.finetune.materials import PLAIN, TURNS, data, write_lines
from tests.integrations.words import SPECIAL, tokenizer

END = SPECIAL.index("</s>")


def words(*numbers: int) -> list[int]:
    return [len(SPECIAL) + number for number in numbers]


def documents(kind: str, *records: Any) -> Documents:
    return Documents("given.jsonl", kind, records, "")


def rows(sequences: Sequences) -> list[tuple[list[int], list[int]]]:
    found = [sequences[index] for index in range(len(sequences))]
    return [(row["input_ids"].tolist(), row["labels"].tolist()) for row in found]


def test_texts_are_packed_one_after_the_other() -> None:
    made = tokenized(documents("text", {"text": "w1 w2 w3"}, {"text": "w4 w5"}), tokenizer(), 4)
    ids = [[*words(1, 2, 3), END], [*words(4, 5), END, 0]]
    assert rows(made) == [(ids[0], ids[0]), (ids[1], [*ids[1][:3], IGNORED])]
    assert made.notes == []
    assert made.padded_fraction == 1 / 8


class Begins:
    """A tokenizer that begins each text with a token."""

    bos_token_id, eos_token_id, pad_token_id = 2, None, 0

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [2, *map(int, text.split())]}


def test_each_packed_sequence_begins_as_a_text_does() -> None:
    made = tokenized(documents("text", {"text": "11 12 13 14 15"}, {"text": "16 17"}), Begins(), 3)
    assert [ids for ids, _ in rows(made)] == [[2, 11, 12], [2, 13, 14], [2, 15, 2], [2, 16, 17]]
    made = tokenized(documents("text", {"text": "11 12"}, {"text": "13 14"}), Begins(), 3)
    assert [ids for ids, _ in rows(made)] == [[2, 11, 12], [2, 13, 14]]


def test_a_last_token_alone_is_no_sequence() -> None:
    made = tokenized(documents("text", {"text": "w1 w2"}), tokenizer(), 2)
    assert rows(made) == [(words(1, 2), words(1, 2))]


def test_only_completions_are_learnt_and_what_is_too_long_is_cut() -> None:
    records = [
        {"prompt": "w1", "completion": "w2"},
        {"prompt": "w1 w2", "completion": "w3 w4 w5"},
        {"prompt": "w1 w2 w3 w4 w5", "completion": "w6"},
    ]
    made = tokenized(documents("prompt", *records), tokenizer(), 4)
    assert rows(made) == [
        ([*words(1, 2), END, 0], [IGNORED, *words(2), END, IGNORED]),
        (words(1, 2, 3, 4), [IGNORED, IGNORED, *words(3, 4)]),
    ]
    assert made.notes == [
        "the loss is on completions",
        "2 longer than 4 tokens, cut at the end by 5 tokens in all",
        "1 left out: nothing to learn within 4 tokens",
    ]


def test_only_the_assistants_turns_are_learnt_where_the_template_marks_them() -> None:
    turns = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    marked, plain = tokenizer(), tokenizer()
    marked.chat_template, plain.chat_template = TURNS, PLAIN
    made = tokenized(documents("messages", {"messages": turns}), marked, 16)
    ids = [*words(2, 7, 1, 8), END]
    assert rows(made) == [(ids, [IGNORED] * 3 + ids[3:])]
    assert made.notes == ["the loss is on the assistant's turns"]
    made = tokenized(documents("messages", {"messages": turns}), plain, 16)
    assert rows(made) == [(ids, ids)]
    assert made.notes[0].startswith("the loss is on all tokens, because the chat template doesn't mark")


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(OptionError, match="no chat template"):
        tokenized(documents("messages", {"messages": [{"role": "user", "content": "w1"}]}), tokenizer(), 16)


def test_a_part_is_held_out_at_random_and_nothing_is_lost() -> None:
    pairs = [(torch.tensor([index, 1]), torch.tensor([index, 1])) for index in range(10)]
    kept, out = Sequences(pairs, 0).split(0.25, seed=3)
    assert out is not None
    assert (len(kept), len(out)) == (8, 2)
    assert sorted(row[0][0] for row in [*rows(kept), *rows(out)]) == list(range(10))
    assert rows(Sequences(pairs, 0).split(0.25, seed=3)[0]) == rows(kept)
    assert rows(Sequences(pairs, 0).split(0.25, seed=4)[0]) != rows(kept)
    assert Sequences(pairs, 0).split(0.05, seed=3)[1] is None


def test_both_get_the_width_of_the_longest() -> None:
    short, longer = (Sequences([(torch.ones(n), torch.ones(n))], 0) for n in (3, 11))
    short.widened(longer, 64)
    assert (short.width, longer.width) == (16, 16)
    short.widened(longer, 12)
    assert len(short[0]["input_ids"]) == 12


def test_empty_lines_separate_documents_where_that_is_asked_for(tmp_path: Path) -> None:
    path = data(tmp_path, "txt", 3)
    assert str(read_documents(path)) == "texts.txt: 1 text"
    split = read_documents(path, split=True)
    assert str(split) == "texts.txt: 3 texts"
    assert all(len(record["text"].split()) == 9 for record in split.records)


def test_a_line_may_have_any_character_of_json(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "given.jsonl", [{"text": "a"}])
    path.write_text('{"text": "a\u2028b", "id": 1}\r\n\n{"text": "c"}')
    assert [record["text"] for record in read_documents(path).records] == ["a\u2028b", "c"]


FEW = "so few steps hardly change a model. Give --epochs "


@pytest.mark.parametrize(
    ("num", "given", "counts", "hint"),
    [
        (1000, {}, (50, 20, 1, 2), ""),
        (48, {}, (2, 24, 1, 3), ""),
        (10_000, {}, (256, 40, 2, 4), ""),
        (19, {}, (1, 19, 0, 2), FEW + "2"),
        (1000, {"epochs": 2.5}, (50, 50, 2, 5), ""),
        (1000, {"epochs": 0.5, "warmup": 4}, (50, 10, 4, 1), FEW + "1, or a smaller --tokens-per-step or --accumulate"),
        (1000, {"tokens_per_step": 640, "batch": 2}, (5, 100, 3, 10), ""),
        (1000, {"tokens_per_step": 16384}, (256, 4, 0, 1), FEW + "5, or a smaller --tokens-per-step or --accumulate"),
        (1000, {"accumulate": 5000}, (1000, 1, 0, 1), FEW + "20, or a smaller --tokens-per-step or --accumulate"),
        (1000, {"steps": 7, "save_every": 3}, (256, 7, 0, 3), ""),
    ],
)
def test_the_pace_follows_from_the_data_and_each_step_trains(
    num: int, given: Any, counts: Any, hint: str, tmp_path: Path
) -> None:
    tuning = FineTuning("model", str(data(tmp_path, "text", 1)), "out", **given)
    pace = Pace.of(tuning, num, 64)
    assert (pace.accumulate, pace.num_steps, pace.warmup, pace.save_every) == counts
    assert pace.hint == hint
    rates = [rate_of(step, warmup=pace.warmup, num_steps=pace.num_steps) for step in range(pace.num_steps)]
    assert 0 < min(rates) < max(rates) == 1 or rates == [1]
