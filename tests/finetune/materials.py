"""A tiny model with its tokenizer, and data of each kind, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.words import text, tokenizer

TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w1 {% generation %}{{ m['content'] }} </s> "
    "{% endgeneration %}{% else %}w2 {{ m['content'] }} {% endif %}{% endfor %}"
)
"""A chat template that marks the assistant's turns."""
PLAIN = TURNS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ON_CPU = ("--device=cpu", "--precision=fp32", "--length=16")


def config(**sizes: Any) -> LlamaConfig:
    tiny = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3, "attention_dropout": 0.1,
    }  # fmt: skip
    return LlamaConfig(**{**tiny, **sizes})


def save_model(folder: Path, *, template: str | None = TURNS, **sizes: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config(**sizes)).save_pretrained(folder)
    words = tokenizer()
    words.chat_template = template
    words.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(index: int) -> dict[str, Any]:
    turns = [("user", text(index, 3)), ("assistant", text(index + 1, 2 + index % 4))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def data(folder: Path, kind: str, count: int = 24) -> Path:
    rows = {
        "text": lambda i: {"text": text(i, 9)},
        "messages": chat,
        "prompt": lambda i: {"prompt": text(i, 4), "completion": text(i + 5, 1 + i % 5)},
    }
    if kind == "txt":
        path = folder / "texts.txt"
        path.write_text("\n\n".join(text(index, 9) for index in range(count)))
        return path
    return write_lines(folder / f"{kind}.jsonl", [rows[kind](index) for index in range(count)])
