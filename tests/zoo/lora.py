"""Adapters of peft around a small Llama, and plain PyTorch's own changes to weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.zoo.case import Case, Family, from_config, tokens
from tests.zoo.causal import DECODER
from tests.zoo.handwritten import Block, Stack, X

# fmt: off

ZOO = Family("lora")
TEXT = tokens(mask="ones")
LINEARS = ["q_proj", "v_proj", "down_proj"]


def _adapted(config: str, prepare: Any, settings: dict[str, Any]) -> nn.Module:
    import peft

    model = from_config("LlamaForCausalLM", DECODER)
    model = peft.get_peft_model(model, getattr(peft, config)(**settings)).train()
    if prepare is not None:
        prepare(model)
    return model


def adapter(name: str, config: str, *, prepare: Any = None, **settings: Any) -> None:
    """Adds a Llama with an adapter; `prepare` changes the model once made."""
    if not config.startswith("Pr"):  # prompts and prefixes have no target
        settings = {"target_modules": LINEARS} | settings
    settings["task_type"] = "CAUSAL_LM"
    ZOO.add(name, lambda: _adapted(config, prepare, settings), TEXT, needs=("peft",))


LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
adapter("peft_lora", "LoraConfig", **LORA, lora_dropout=0.1)
adapter("peft_lora_nodropout", "LoraConfig", **LORA, bias="all", use_rslora=True)
adapter("peft_lora_all", "LoraConfig", **LORA, target_modules="all-linear", modules_to_save=["lm_head"])
adapter("peft_lora_embedding", "LoraConfig", **LORA, target_modules=["embed_tokens", "q_proj"])
adapter("peft_dora", "LoraConfig", **LORA, use_dora=True)


def _merge_again(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def _second(model: Any) -> None:
    import peft

    model.add_adapter("other", peft.LoraConfig(**LORA, target_modules=LINEARS))
    model.set_adapter("other")


def _unloaded() -> nn.Module:
    model: Any = _adapted("LoraConfig", None, LORA | {"target_modules": LINEARS})
    return model.merge_and_unload().requires_grad_(True)


def _checkpointed(model: Any) -> None:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})


adapter("peft_unmerged", "LoraConfig", prepare=_merge_again, **LORA, lora_dropout=0.1)
adapter("peft_two_adapters", "LoraConfig", prepare=_second, **LORA)
adapter("peft_checkpointed", "LoraConfig", prepare=_checkpointed, **LORA)
ZOO.add("peft_merged", _unloaded, TEXT, needs=("peft",))
adapter("peft_adalora", "AdaLoraConfig", init_r=4, target_r=2, total_step=10)
adapter("peft_ia3", "IA3Config", feedforward_modules=["down_proj"])
adapter("peft_loha", "LoHaConfig", r=4, module_dropout=0.0)
adapter("peft_lokr", "LoKrConfig", r=4, rank_dropout=0.2)
adapter("peft_oft", "OFTConfig", oft_block_size=4)
adapter("peft_boft", "BOFTConfig", boft_block_size=4)
adapter("peft_vera", "VeraConfig", r=4, vera_dropout=0.1, target_modules=["q_proj"])
adapter("peft_fourier", "FourierFTConfig", n_frequency=8)
adapter("peft_prompt", "PromptTuningConfig", num_virtual_tokens=3)
adapter("peft_prefix", "PrefixTuningConfig", num_virtual_tokens=3)
adapter("peft_p_tuning", "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8)


def _plain(name: str, change: Any) -> None:
    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            change(block)
        return model

    ZOO.cases.append(Case(name, ZOO.name, build, X))


def _weight_norm_old(block: Block) -> None:
    nn.utils.weight_norm(block.up)


def _pruned(block: Block) -> None:
    prune.random_unstructured(block.up, "weight", amount=0.3)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Square(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        nn.utils.parametrize.register_parametrization(self.mix, "weight", Symmetric())

    def forward(self, x):
        with nn.utils.parametrize.cached():
            return super().forward(self.mix(x) + self.mix(x * x))


_plain("weight_norm_old", _weight_norm_old)
_plain("orthogonal", lambda block: parametrizations.orthogonal(block.up))
_plain("pruned", _pruned)
ZOO.add("parametrized_cached", lambda: Stack(lambda _: Square()), X)


class HandLora(nn.Module):
    """Low rank over a frozen weight, one of its two parts shared by all layers."""

    def __init__(self, shared: nn.Parameter):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = shared
        self.up = nn.Parameter(torch.randn(8, 2) * 0.1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.base(x) + self.drop(x) @ self.down.T @ self.up.T


def _shared_lora() -> nn.Module:
    shared = nn.Parameter(torch.randn(2, 8) * 0.1)
    return Stack(lambda _: HandLora(shared))


ZOO.add("lora_by_hand", _shared_lora, X)
