"""Models by their names: the figures of well-known ones, so that `megatrain plan` needs neither files nor a network.

Each row has what decides bytes and time: sizes, layers, heads, words, positions. Figures that change neither, such as
the base of rotary embeddings, are those of transformers' configuration classes. The count of parameters next to each
is the published one (its model card, or the sizes of its files); a test makes the model and counts.
"""

from __future__ import annotations

import difflib
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from megatrain.errors import OptionError

# How long the hub may take to answer at all.
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The figures of a model.

    Args:
        parameters: How many it has, as published; tied ones once.
        kind: `model_type` of its configuration.
        inner: Width of its feed-forward part.
        key_heads: Heads of keys and values.
        positions: The most tokens of a sequence.
        tied: Whether the embedding is the head's weight.
    """

    parameters: int
    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    words: int
    positions: int
    tied: bool = False
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def config(self) -> Any:
        """Makes the configuration, of transformers' class for it."""
        from transformers import AutoConfig

        figures = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.words,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            **self.more,
        }
        names = _NAMES.get(self.kind, {})
        return AutoConfig.for_model(self.kind, **{names.get(name, name): value for name, value in figures.items()})


_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim"},
}
"""Where a class has another name for a figure."""
_HEAD = {"head_dim": 128}
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256}
_OLMO2 = {"eos_token_id": 100257, "pad_token_id": 100277}
_PHI = {"pad_token_id": None}
_STAR = {"use_bias": True}

KNOWN: Mapping[str, KnownModel] = {
    "meta-llama/Llama-2-7b-hf": KnownModel(6738415616, "llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Llama-2-13b-hf": KnownModel(13015864320, "llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "meta-llama/Llama-2-70b-hf": KnownModel(68976648192, "llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "meta-llama/Llama-3.1-8B": KnownModel(8030261248, "llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.1-70B": KnownModel(70553706496, "llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "meta-llama/Llama-3.2-1B": KnownModel(1235814400, "llama", 2048, 8192, 16, 32, 8, 128256, 131072, True),
    "meta-llama/Llama-3.2-3B": KnownModel(3212749824, "llama", 3072, 8192, 28, 24, 8, 128256, 131072, True),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": KnownModel(1100048384, "llama", 2048, 5632, 22, 32, 4, 32000, 2048),
    "HuggingFaceTB/SmolLM2-135M": KnownModel(134515008, "llama", 576, 1536, 30, 9, 3, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-360M": KnownModel(361821120, "llama", 960, 2560, 32, 15, 5, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-1.7B": KnownModel(1711376384, "llama", 2048, 8192, 24, 32, 32, 49152, 8192, True),
    "HuggingFaceTB/SmolLM3-3B": KnownModel(3075098624, "smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, True),
    "01-ai/Yi-6B": KnownModel(6061035520, "llama", 4096, 11008, 32, 32, 4, 64000, 4096),
    "01-ai/Yi-34B": KnownModel(34388917248, "llama", 7168, 20480, 60, 56, 8, 64000, 4096),
    "deepseek-ai/deepseek-coder-6.7b-base": KnownModel(6740512768, "llama", 4096, 11008, 32, 32, 32, 32256, 16384),
    "mistralai/Mistral-7B-v0.1": KnownModel(7241732096, "mistral", 4096, 14336, 32, 32, 8, 32000, 32768),
    "mistralai/Mistral-7B-v0.3": KnownModel(7248023552, "mistral", 4096, 14336, 32, 32, 8, 32768, 32768),
    "mistralai/Mistral-Nemo-Base-2407": KnownModel(
        12247782400, "mistral", 5120, 14336, 40, 32, 8, 131072, 131072, more=_HEAD
    ),
    "mistralai/Mistral-Small-24B-Base-2501": KnownModel(
        23572403200, "mistral", 5120, 32768, 40, 32, 8, 131072, 32768, more=_HEAD
    ),
    "mistralai/Mixtral-8x7B-v0.1": KnownModel(46702792704, "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768),
    "Qwen/Qwen2.5-0.5B": KnownModel(494032768, "qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-1.5B": KnownModel(1543714304, "qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen/Qwen2.5-3B": KnownModel(3085938688, "qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-7B": KnownModel(7615616512, "qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "Qwen/Qwen2.5-14B": KnownModel(14770033664, "qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-32B": KnownModel(32763876352, "qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-72B": KnownModel(72706203648, "qwen2", 8192, 29568, 80, 64, 8, 152064, 131072),
    "Qwen/Qwen3-0.6B": KnownModel(596049920, "qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, True, _HEAD),
    "Qwen/Qwen3-1.7B": KnownModel(1720574976, "qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, True, _HEAD),
    "Qwen/Qwen3-4B": KnownModel(4022468096, "qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, True, _HEAD),
    "Qwen/Qwen3-8B": KnownModel(8190735360, "qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, more=_HEAD),
    "Qwen/Qwen3-14B": KnownModel(14768307200, "qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, more=_HEAD),
    "Qwen/Qwen3-32B": KnownModel(32762123264, "qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, more=_HEAD),
    "Qwen/Qwen3-30B-A3B": KnownModel(
        30532122624, "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960,
        more={**_HEAD, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "google/gemma-2-2b": KnownModel(2614341888, "gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, True, _GEMMA2),
    "google/gemma-2-9b": KnownModel(9241705984, "gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, True, _GEMMA2),
    "google/gemma-2-27b": KnownModel(
        27227128320, "gemma2", 4608, 36864, 46, 32, 16, 256000, 8192, True,
        {"head_dim": 128, "query_pre_attn_scalar": 144},
    ),
    "google/gemma-3-1b-pt": KnownModel(
        999885952, "gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, True,
        {"head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256},
    ),
    "microsoft/Phi-3-mini-4k-instruct": KnownModel(3821079552, "phi3", 3072, 8192, 32, 32, 32, 32064, 4096, more=_PHI),
    "microsoft/phi-4": KnownModel(14659507200, "phi3", 5120, 17920, 40, 40, 10, 100352, 16384, more=_PHI),
    "openai-community/gpt2": KnownModel(124439808, "gpt2", 768, 3072, 12, 12, 12, 50257, 1024, True),
    "openai-community/gpt2-xl": KnownModel(1557611200, "gpt2", 1600, 6400, 48, 25, 25, 50257, 1024, True),
    "openai/gpt-oss-20b": KnownModel(
        20914757184, "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072,
        more={"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "allenai/OLMo-2-1124-7B": KnownModel(7298617344, "olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, more=_OLMO2),
    "allenai/OLMo-2-1124-13B": KnownModel(13716198400, "olmo2", 5120, 13824, 40, 40, 40, 100352, 4096, more=_OLMO2),
    "bigcode/starcoder2-3b": KnownModel(3030371328, "starcoder2", 3072, 12288, 30, 24, 2, 49152, 16384, True, _STAR),
    "bigcode/starcoder2-7b": KnownModel(7173923840, "starcoder2", 4608, 18432, 32, 36, 4, 49152, 16384, True, _STAR),
    "EleutherAI/pythia-1b": KnownModel(1011781632, "gpt_neox", 2048, 8192, 16, 8, 8, 50304, 2048),
    "facebook/opt-6.7b": KnownModel(
        6658473984, "opt", 4096, 16384, 32, 32, 32, 50272, 2048, True, {"word_embed_proj_dim": 4096}
    ),
    "THUDM/GLM-4-9B-0414": KnownModel(9400279040, "glm4", 4096, 13696, 40, 32, 2, 151552, 32768,
                                      more={**_HEAD, "pad_token_id": 151329}),
}  # fmt: skip
"""By their names on the hub."""


def known(name: str) -> KnownModel | None:
    """The figures of a model by its name, with or without its owner, in small or capital letters; None if unknown."""
    asked = name.lower()
    return next((model for full, model in KNOWN.items() if asked in (full.lower(), _tail(full))), None)


def _nearest(name: str) -> str | None:
    """The known name that is spelt most like another one."""
    tails = {_tail(full): full for full in KNOWN}
    found = difflib.get_close_matches(_tail(name), tails, 1)
    return tails[found[0]] if found else None


def _tail(name: str) -> str:
    return name.lower().rpartition("/")[2]


def check_found(name: str) -> None:
    """Refuses the name of a model that can't be found, within seconds: libraries of the hub try for half a minute.

    Raises:
        OptionError: With what was tried.
    """
    if Path(name).exists():
        return
    other = _nearest(name)
    meant = "" if other is None else f"\n  Did you mean {other}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None or name.startswith(".") or name.endswith(".json"):
        what = "file" if name.endswith(".json") else "folder"
        raise OptionError(
            f"there is no {what} `{name}`.\n  A model is a folder, or `owner/model` on the hub.\n"
            f"  Check the path, or write the name with its owner.{meant}"
        )
    if find_spec("huggingface_hub") is None:
        return  # the command says what is missing
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    host = urlsplit(constants.ENDPOINT)
    is_offline = bool(constants.HF_HUB_OFFLINE)
    if is_offline or not (getproxies() or _answers(host.hostname or "", host.port or 443)):
        why = "the hub's libraries are set to be offline" if is_offline else f"{host.netloc} doesn't answer"
        raise OptionError(
            f"`{name}` can't be found: {why}.\n"
            f"  There is no folder of this name, none of its files is in the hub's cache, and {why}.\n"
            f"  Check the network, or give a folder with config.json.{meant}"
        )


def _answers(host: str, port: int) -> bool:
    """Whether a host takes a connection within seconds; to look for its address may take longer than any timeout."""
    found = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((host, port), timeout=_SECONDS):
            found.set()

    thread = threading.Thread(target=connect, name="megatrain-hub", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return found.is_set()
