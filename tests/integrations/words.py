"""Texts of a few words, and the tokenizer that knows them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(60))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # pyright: ignore
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def text(start: int, count: int) -> str:
    return " ".join(f"w{(start * 7 + i * 3) % 60}" for i in range(count))


def ragged_texts() -> list[dict[str, Any]]:
    return [{"input_ids": tokenizer()(text(i, 3 + i % 6))["input_ids"]} for i in range(12)]
