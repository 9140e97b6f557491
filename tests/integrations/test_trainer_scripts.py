"""Scripts as people write them around transformers' Trainer, each with a habit of its own: the stock run's bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from tests.integrations.runs import (
    TWO,
    Loss,
    Scenario,
    assert_streams_as_stock,
    llama,
)
from tests.integrations.words import ragged_texts

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("lowered_once"),  # of few models
]


# -- losses -----------------------------------------------------------------------------------------------------------


class WithParameters(Loss):
    """A loss with parameters of its own, which its optimizer trains too; and a teacher, which stays plain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.centre = nn.Parameter(torch.randn(64))
        self.teacher = llama(num_hidden_layers=1).eval()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().create_optimizer(*args, **kwargs)
        if not any(p is self.centre for group in found.param_groups for p in group["params"]):
            found.add_param_group({"params": [self.centre], "lr": 0.1})
        return found

    def loss_of(self, model: Any, inputs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        loss = nn.functional.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean")
        return loss + (outputs.logits - self.centre).square().mean(), outputs


# -- trainers ---------------------------------------------------------------------------------------------------------


class OwnOptimizer(Trainer):
    """Makes an optimizer, in groups by name, and a scheduler by itself."""

    optimizer: Any
    lr_scheduler: Any

    def create_optimizer(self, model: Any = None) -> Any:
        named = dict(self.model.named_parameters())  # pyright: ignore
        heads = [p for name, p in named.items() if "head" in name]
        rest = [p for name, p in named.items() if "head" not in name]
        self.optimizer = torch.optim.NAdam([{"params": heads, "lr": 0.03}, {"params": rest}], lr=0.01)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer if optimizer is None else optimizer, [0.03, 0.01], total_steps=num_training_steps + 1
        )
        return self.lr_scheduler


class Rebuilds(Trainer):
    """Gives the model more tokens, another head and fewer layers when the trainer is there."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(4)
        model: Any = self.model
        model.resize_token_embeddings(72, mean_resizing=False)
        model.lm_head = nn.Linear(32, 72, bias=False)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        return super().train(*args, **kwargs)


# -- callbacks ------------------------------------------------------------------------------------------------------


# -- models -----------------------------------------------------------------------------------------------------------


WAVES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2, "vocab_size": 32, "feat_extract_norm": "layer", "layerdrop": 0.0,
    "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2, "pad_token_id": 0,
}  # fmt: skip


def of_sound() -> Any:
    torch.manual_seed(0)
    return Wav2Vec2ForCTC(Wav2Vec2Config(**WAVES, ctc_loss_reduction="mean"))


def sound(index: int) -> dict[str, torch.Tensor]:
    values = torch.randn(800, generator=torch.Generator().manual_seed(index))
    return {"input_values": values, "labels": torch.arange(4) * 7 % 31 + 1}


# -- data and optimizers ----------------------------------------------------------------------------------------------


def flat(model: Any) -> Mapping[str, Any]:
    return {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)}


SCENARIOS: dict[str, Scenario] = {
    "a loss with parameters": Scenario(TWO, kind=WithParameters),
    "optimizer and rates of one's own": Scenario(TWO, kind=OwnOptimizer),
    "rebuilt before it trains": Scenario(TWO, kind=Rebuilds),
    "flattened, with lengths": Scenario(TWO, rows=ragged_texts(), more=flat),
    "wav2vec2, masked by numpy": Scenario(
        TWO, of_sound, [sound(index) for index in range(12)],
        reason="nothing says beforehand how many random numbers the model draws",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
