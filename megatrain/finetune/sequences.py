"""Sequences: documents as token ids and labels, all padded to one width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.errors import OptionError
from megatrain.finetune.chats import chat_tokens, marks_turns
from megatrain.finetune.documents import CHAT, PROMPT, TEXT, Documents

IGNORED = -100
"""The label of a token that isn't learnt, for the losses of transformers."""
_MULTIPLE = 8
_Pair = tuple[torch.Tensor, torch.Tensor]
"""Ids and labels, as int32: the text is not kept, and they are all that a large data set takes of memory."""


@dataclass(slots=True)
class Sequences:
    """Token ids and labels, as rows of a data set.

    All rows have one width, so that one schedule serves all of them. Padding comes last and has no attention mask: a
    causal model doesn't see what follows a token, and a mask would make another graph of each batch that has padding.

    Args:
        pairs: For each sequence its ids and labels.
        padding: The id that pads.
        width: Tokens of each row.
        notes: What was cut or left out, in words.
    """

    pairs: list[_Pair]
    padding: int
    width: int = 0
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.width = max(self.width, max((len(ids) for ids, _ in self.pairs), default=0))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = self.pairs[index]
        missing = self.width - len(ids)
        pad = torch.nn.functional.pad
        # int32 is enough for an id, and half the memory; the model takes int64.
        return {
            "input_ids": pad(ids.long(), (0, missing), value=self.padding),
            "labels": pad(labels.long(), (0, missing), value=IGNORED),
        }

    @property
    def padded_fraction(self) -> float:
        """The fraction of all tokens that is padding."""
        return 1 - sum(len(ids) for ids, _ in self.pairs) / max(1, self.width * len(self.pairs))

    @property
    def largest_id(self) -> int:
        """The largest token id in any sequence."""
        return max((int(ids.max()) for ids, _ in self.pairs), default=0)

    def widened(self, other: Sequences | None, most: int) -> None:
        """Gives both the width of the longest sequence, rounded up, but not above `most`."""
        both = [self] if other is None else [self, other]
        width = max(each.width for each in both)
        for each in both:
            each.width = min(most, -(-width // _MULTIPLE) * _MULTIPLE)

    def split(self, fraction: float, seed: int) -> tuple[Sequences, Sequences | None]:
        """Holds out a fraction at random; None if that is less than one sequence."""
        num_out = int(fraction * len(self))
        if num_out == 0:
            return self, None
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        out = set(order[:num_out])
        kept = [pair for index, pair in enumerate(self.pairs) if index not in out]
        held = [pair for index, pair in enumerate(self.pairs) if index in out]
        return Sequences(kept, self.padding, notes=self.notes), Sequences(held, self.padding)


def tokenized(documents: Documents, tokenizer: Any, length: int) -> Sequences:
    """Makes sequences of at most `length` tokens: texts one after the other, chats and prompts one in each.

    Args:
        documents: What to learn.
        tokenizer: Of transformers.
        length: Most tokens of a sequence.

    Raises:
        OptionError: If nothing is left to learn, or the tokenizer can't take chats.
    """
    notes: list[str] = []
    if documents.kind == TEXT:
        pairs = _packed(documents, tokenizer, length)
    else:
        make: Callable[..., Any] = _chats if documents.kind == CHAT else _prompts
        pairs = _cut(make(documents, tokenizer, notes), length, notes)
    if not pairs:
        raise OptionError(
            f"`{documents.name}` has nothing to learn within sequences of {length} tokens.\n"
            "  A sequence needs a token that follows another one, and of prompts and chats an answer.\n"
            "  Give a larger --length, or check the data."
        )
    padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return Sequences(pairs, padding, notes=notes)


def _ended(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """The ids, and the token that ends a text if the tokenizer has one and hasn't put it there."""
    end = tokenizer.eos_token_id
    return [*ids] if end is None or (ids and ids[-1] == end) else [*ids, end]


def _packed(documents: Documents, tokenizer: Any, length: int) -> list[_Pair]:
    pairs: list[_Pair] = []
    rest: list[int] = []
    # Where texts begin with a token of their own, each sequence does: some models are at a loss without it.
    begin = tokenizer.bos_token_id
    begins = False
    for number, record in enumerate(documents.records):
        # Without `verbose`, it doesn't warn that a whole text is longer than what the model takes: it is cut here.
        rest += _ended(tokenizer(record["text"], verbose=False)["input_ids"], tokenizer)
        if number == 0:
            begins = begin is not None and rest[:1] == [begin]
        is_last = number == len(documents.records) - 1
        place = 0
        while place < len(rest) and (is_last or place + length <= len(rest)):
            first = [begin] if begins and rest[place] != begin else []
            end = place + length - len(first)
            ids = torch.tensor([*first, *rest[place:end]], dtype=torch.int32)
            # The last, shorter one is padded; a single token has nothing that follows it.
            if len(ids) > 1:
                pairs.append((ids, ids))
            place = end
        del rest[:place]
    return pairs


def _prompts(documents: Documents, tokenizer: Any, notes: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    assert documents.kind == PROMPT
    for record in documents.records:
        prompt = tokenizer(record["prompt"], verbose=False)["input_ids"]
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]  # of a tokenizer that ends every text: this one goes on
        answer = tokenizer(record["completion"], add_special_tokens=False, verbose=False)["input_ids"]
        answer = _ended(answer, tokenizer)
        yield [*prompt, *answer], [*[IGNORED] * len(prompt), *answer]
    notes.append("the loss is on completions")


def _chats(documents: Documents, tokenizer: Any, notes: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    for ids, learnt in chat_tokens(documents, tokenizer):
        yield ids, [token if is_learnt else IGNORED for token, is_learnt in zip(ids, learnt, strict=True)]
    notes.append(
        "the loss is on the assistant's turns"
        if marks_turns(tokenizer)
        else "the loss is on all tokens, because the chat template doesn't mark the assistant's turns "
        "with {% generation %}"
    )


def _cut(found: Iterable[tuple[list[int], list[int]]], length: int, notes: list[str]) -> list[_Pair]:
    """Cuts what is too long at its end, and leaves out what has nothing to learn then."""
    pairs: list[_Pair] = []
    num_long = num_cut = num_left_out = 0
    for ids, labels in found:
        num_long += len(ids) > length
        num_cut += max(0, len(ids) - length)
        if any(label != IGNORED for label in labels[1:length]):
            pairs.append(
                (torch.tensor(ids[:length], dtype=torch.int32), torch.tensor(labels[:length], dtype=torch.int32))
            )
        else:
            num_left_out += 1
    if num_long:
        notes.append(f"{num_long} longer than {length} tokens, cut at the end by {num_cut} tokens in all")
    if num_left_out:
        notes.append(f"{num_left_out} left out: nothing to learn within {length} tokens")
    return pairs
