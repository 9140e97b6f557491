"""chat_tokens(): chats as token ids, by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatrain.errors import OptionError
from megatrain.finetune.documents import Documents

_MARK = re.compile(r"\{%-?\s*generation\b")


def marks_turns(tokenizer: Any) -> bool:
    """Tells whether the chat template marks the assistant's turns, so that they alone can be learnt.

    Raises:
        OptionError: If the tokenizer has no chat template.
    """
    return _MARK.search(_template_of(tokenizer)) is not None


def chat_tokens(documents: Documents, tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields for each chat its ids, and which of them are learnt.

    Raises:
        OptionError: If the tokenizer has no chat template, or the template refuses a chat.
    """
    has_turns = marks_turns(tokenizer)
    for number, record in enumerate(documents.records, 1):
        try:
            found: Any = tokenizer.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=has_turns,
                verbose=False,
            )
        except Exception as error:  # a template raises what it likes, for roles that don't take turns say
            raise OptionError(
                f"the chat template refuses chat {number} of `{documents.name}`: {error}\n"
                "  The tokenizer's own template decides which roles may follow each other.\n"
                "  Correct the chat, or take it out."
            ) from error
        ids: list[int] = list(found["input_ids"])
        yield ids, [bool(mark) for mark in found["assistant_masks"]] if has_turns else [True] * len(ids)


def _template_of(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise OptionError(
            "the tokenizer has no chat template, and the data has `messages`.\n"
            "  A chat template says how turns become one text; models that were tuned for chats have one.\n"
            "  Name a tokenizer that has one with --tokenizer, or give data with `text`."
        ) from error
