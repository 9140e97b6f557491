"""Loops of other libraries with a compiled model in place of the model, and their trainers that stream."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import BertConfig, BertModel

import megatrain
from megatrain.integrations.hf import Streamed
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, ROWS, llama
from tests.integrations.words import text, tokenizer

NEEDS = "needs `pip install -e .[users]`"
pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)), nn.Linear(8, 2)
    )


POINTS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(12)]


def both(make: Callable[[], nn.Module], train: Callable[[Any], Any]) -> None:
    """Trains a model in eager and compiled; what `train` returns, the state and the generators have the same bits."""
    found: list[Any] = []
    recording = megatrain.Recording()
    for compiles in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = make()
        used = megatrain.compile(model, device="cpu", transfer="copy", recording=recording) if compiles else model
        torch.manual_seed(1)
        with contextlib.redirect_stdout(io.StringIO()):
            result = train(used)
        state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
        found.append((result, state, torch.get_rng_state()))
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0


# -- accelerate -----------------------------------------------------------------------------------------------------


def loader(rows: Any, size: int = 2) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=size)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("rows", [ROWS, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("count", [1, 3])
def test_accelerate(precision: str, rows: Any, count: int):
    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(rows), schedule)
        losses: list[Any] = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
        return losses

    both(llama, train)


def test_accelerate_saves_and_loads_every_tensor(tmp_path: Path):
    def step(accelerator: Any, model: Any, optimizer: Any) -> None:
        accelerator.backward(model(input_ids=ROWS[0]["input_ids"][None], labels=ROWS[0]["labels"][None]).loss)
        optimizer.step()
        optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    recording = megatrain.Recording()
    compiled = megatrain.compile(llama(), device="cpu", transfer="copy", recording=recording)
    model, optimizer = accelerator.prepare(compiled, torch.optim.AdamW(compiled.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path))
    kept = {key: tensor.detach().clone() for key, tensor in compiled.state_dict().items()}
    step(accelerator, model, optimizer)
    expected = {key: tensor.detach().clone() for key, tensor in compiled.state_dict().items()}
    accelerator.load_state(str(tmp_path))
    assert_same({k: t.detach() for k, t in compiled.state_dict().items()}, kept)
    step(accelerator, model, optimizer)
    assert_same({k: t.detach() for k, t in compiled.state_dict().items()}, expected)
    assert sum(entry.stream == "compute" for entry in recording.issued) == 3 * 2 * len(compiled.program.blocks)


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "limit_val_batches": 2},
    ],
    ids=str,
)
def test_lightning_module(tmp_path: Path, options: dict[str, Any]):
    lightning = pytest.importorskip("lightning", reason=NEEDS)

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]).detach().clone())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train(net: nn.Module) -> Any:
        module = Module(net)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, enable_checkpointing=False, **options,
        )  # fmt: skip
        trainer.fit(module, loader(POINTS, 3), loader(POINTS[:6], 3))
        return module.losses

    both(stack, train)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_fabric(tmp_path: Path, precision: str):
    fabric_of = pytest.importorskip("lightning.fabric", reason=NEEDS).Fabric

    def train(net: nn.Module) -> Any:
        fabric = fabric_of(accelerator="cpu", precision=precision)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        losses: list[torch.Tensor] = []
        for x, y in fabric.setup_dataloaders(loader(POINTS, 3)):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            losses.append(torch.as_tensor(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        path = tmp_path / type(net).__name__
        fabric.save(path, {"model": model})
        saved = torch.load(path, weights_only=False)["model"]
        return [losses, {key: tensor for key, tensor in saved.items()}]

    both(stack, train)


# -- sentence-transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "CosineSimilarityLoss"])
@pytest.mark.parametrize("how", ["compiled", "streamed"])
def test_sentence_transformers(tmp_path: Path, loss: str, how: str):
    sentences = pytest.importorskip("sentence_transformers", reason=NEEDS)
    is_new = importlib.util.find_spec("sentence_transformers.sentence_transformer") is not None  # from version 6 on
    losses: Any = importlib.import_module(f"sentence_transformers{'.sentence_transformer' * is_new}.losses")
    datasets = pytest.importorskip("datasets", reason=NEEDS)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    rows: dict[str, Any] = {"one": [text(i, 4) for i in range(12)], "other": [text(i + 1, 5) for i in range(12)]}
    if loss == "CosineSimilarityLoss":
        rows["score"] = [i / 12 for i in range(12)]
    recording = megatrain.Recording()
    options: dict[str, Any] = {"transfer": "copy", "recording": recording}

    def train(way: str) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model: Any = sentences.SentenceTransformer(str(tmp_path / "bert"), device="cpu")
        used = megatrain.compile(model, device="cpu", **options) if way == "compiled" else model
        arguments = sentences.SentenceTransformerTrainingArguments(
            str(tmp_path / way), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        kind: Any = sentences.SentenceTransformerTrainer
        more = {f"megatrain_{name}": value for name, value in options.items()} if way == "streamed" else {}
        kind = type("Streaming", (Streamed, kind), {}) if way == "streamed" else kind
        given = {"model": used, "args": arguments, "train_dataset": datasets.Dataset.from_dict(rows), **more}
        trainer = kind(loss=getattr(losses, loss)(used), **given)
        trainer.train()
        log = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return [log, {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}]

    expected = train("eager")
    assert_same(train(how), expected)
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0


# -- diffusers ------------------------------------------------------------------------------------------------------


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def dit() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=1, out_channels=1, num_layers=2, norm_num_groups=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip


@pytest.mark.parametrize("make", [unet, dit])
@pytest.mark.parametrize("has_ema", [False, True])
def test_diffusers_with_an_average_of_the_weights(make: Callable[[], nn.Module], has_ema: bool):
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    training = pytest.importorskip("diffusers.training_utils")

    def train(model: Any) -> Any:
        noise = diffusers.DDPMScheduler(10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = training.EMAModel(model.parameters(), decay=0.5) if has_ema else None
        losses: list[torch.Tensor] = []
        for number in range(3):
            clean, drawn = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            times = torch.randint(0, 10, (2,))
            more = {"class_labels": torch.tensor([number, 1])} if make is dit else {}
            found = model(noise.add_noise(clean, drawn, times), times, **more).sample
            loss = F.mse_loss(found, drawn)
            loss.backward()
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.step(model.parameters())
            losses.append(loss.detach())
        return losses + ([t.clone() for t in ema.shadow_params] if ema is not None else [])

    both(make, train)
