"""The command run here or in a process of its own, on a tiny model and data of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.tools import cli
from tests.integrations.words import text, tokenizer

ROOT = Path(__file__).parents[2]
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w1 {% generation %}{{ m['content'] }} </s> "
    "{% endgeneration %}{% else %}w2 {{ m['content'] }} {% endif %}{% endfor %}"
)
"""A chat template that marks the assistant's turns."""
_TIMES = ("runtime", "per_second", "flos")


def train(*arguments: object) -> int:
    """Runs the command in this process; returns its status."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps what a process began with
    return cli.main(["train", *map(str, arguments)])


def started(*arguments: object) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "megatrain", "train", *map(str, arguments)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses, norms and rates of a trainer's log; no times, and no sums of one process."""
    kept = [row for row in log if "train_loss" not in row]
    return [{key: value for key, value in row.items() if not any(word in key for word in _TIMES)} for row in kept]


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The log of a training in its last checkpoint."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return rows_of(json.loads((last / "trainer_state.json").read_text())["log_history"])


def losses_of(folder: Path) -> list[dict[str, Any]]:
    """What the folder's file of losses has."""
    return rows_of([json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def save_model(folder: Path, *, template: str | None = TURNS, **sizes: Any) -> Path:
    torch.manual_seed(0)
    tiny = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3, "attention_dropout": 0.1,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**tiny, **sizes})).save_pretrained(folder)
    words = tokenizer()
    words.chat_template = template
    if sizes.get("pad_token_id", 0) is None:
        words.pad_token = None
    if sizes.get("eos_token_id", 3) is None:
        words.eos_token = None
    words.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(index: int) -> dict[str, Any]:
    turns = [("user", text(index, 3)), ("assistant", text(index + 1, 2 + index % 4))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def rows(kind: str, count: int = 24) -> list[dict[str, Any]]:
    made = {
        "text": lambda i: {"text": text(i, 9)},
        "messages": chat,
        "prompt": lambda i: {"prompt": text(i, 4), "completion": text(i + 5, 1 + i % 5)},
    }
    return [made[kind](index) for index in range(count)]


def data(folder: Path, kind: str, count: int = 24) -> Path:
    if kind == "txt":
        path = folder / "texts.txt"
        path.write_text("\n\n".join(row["text"] for row in rows("text", count)))
        return path
    return write_lines(folder / f"{kind}.jsonl", rows(kind, count))
