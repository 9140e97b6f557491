"""More loops of accelerate, Lightning, sentence-transformers, diffusers and of one's own, with the stock run's bits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from packaging.version import Version
from peft import LoraConfig
from torch import nn

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, ROWS, llama
from tests.integrations.test_loops import NEEDS, POINTS, both, loader, stack, unet
from tests.integrations.words import text

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


# -- accelerate -----------------------------------------------------------------------------------------------------


def test_accelerate_synchronizes_each_batch_and_stops_on_a_trigger():
    def train(model: Any) -> Any:
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True, adjust_scheduler=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(RAGGED), schedule)
        losses: list[Any] = []
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model), accelerator.autocast():
                outputs = model(**batch)
                loss = outputs["loss"] + 0.01 * outputs["logits"].float().logsumexp(-1).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=False)
            losses.append(loss.detach())
            if number == 4:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        whole: Any = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return [losses, sorted(whole.state_dict())]

    both(llama, train)


def test_a_model_is_compiled_when_accelerate_has_prepared_it():
    """The script prepares first."""

    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        is_compiled = isinstance(model, megatrain.CompiledModule)
        plain = model.megatrain.model if is_compiled else model
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        optimizer, batches = accelerator.prepare(optimizer, loader(ROWS))
        losses: list[Any] = []
        for batch in batches:
            with accelerator.autocast():
                loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    both(llama, train)


# -- loops ----------------------------------------------------------------------------------------------------------


def test_momentum_contrast_with_a_queue():
    def train(model: Any) -> Any:
        key = megatrain.compile(stack(), device="cpu") if isinstance(model, megatrain.CompiledModule) else stack()
        key.requires_grad_(False)
        queue = F.normalize(torch.randn(2, 6), dim=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        losses: list[Any] = []
        for x, _ in loader(POINTS, 3):
            query = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
            with torch.no_grad():
                for slow, fast in zip(key.parameters(), model.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                wanted = F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
            logits = torch.cat([(query * wanted).sum(1, keepdim=True), query @ queue], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([queue[:, 3:], wanted.T], 1)
            losses.append(loss.detach())
        return [losses, queue]

    both(stack, train)


def test_reinforce_with_several_calls_and_one_backward():
    def train(model: Any) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        found: list[Any] = []
        for _ in range(2):
            state, chances, rewards = torch.randn(1, 8), [], []
            for _ in range(3):
                choice = torch.distributions.Categorical(logits=model(state))
                action = choice.sample()
                chances.append(choice.log_prob(action))
                rewards.append(float(action))
                state = state + 0.1 * action
            loss = -(torch.stack(chances).squeeze(-1) * torch.tensor(rewards).flip(0).cumsum(0).flip(0)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [loss.detach(), rewards]
        return found

    both(stack, train)


def test_reptile_copies_the_weights_back_and_forth():
    def train(model: Any) -> Any:
        found: list[Any] = []
        for task in range(2):
            start = {k: v.detach().clone() for k, v in model.state_dict().items()}
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader(POINTS[task * 6 : task * 6 + 6], 3):
                loss = F.cross_entropy(model(x), y)
                inner.zero_grad()
                loss.backward()
                inner.step()
                found.append(loss.detach())
            moved = model.state_dict()
            model.load_state_dict({k: start[k] + 0.5 * (moved[k] - start[k]) for k in start})
        return found

    both(stack, train)


def test_sharpness_aware_minimization():
    def train(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Any] = []
        for x, y in loader(POINTS, 4):
            F.cross_entropy(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / norm for p in model.parameters()]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    both(stack, train)


# -- Lightning ------------------------------------------------------------------------------------------------------


def data_of(lightning: Any) -> Any:
    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(POINTS, 3)

        def val_dataloader(self) -> Any:
            return [loader(POINTS[:6], 3), loader(POINTS[6:], 3)]

        def test_dataloader(self) -> Any:
            return loader(POINTS, 6)

        predict_dataloader = test_dataloader

    return Data()


def all_of_it(lightning: Any) -> Any:
    """A module that logs, shows gradients and clips by itself."""

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["net"])
            self.net = net
            self.right = importlib.import_module("torchmetrics.classification").MulticlassAccuracy(2)
            self.found: list[Any] = []

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log_dict({"loss": loss, "twice": 2 * loss}, prog_bar=True)
            self.found.append(loss.detach().clone())
            return {"loss": loss, "extra": batch[1]}

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.right(self(batch[0]), batch[1])
            self.log("right", self.right)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self(batch[0])

        def test_step(self, batch: Any, index: int) -> None:
            self.log("tested", F.cross_entropy(self(batch[0]), batch[1]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = importlib.import_module("lightning.pytorch.utilities").grad_norm(self.net, norm_type=2)
            self.found.append({key: float(value) for key, value in norms.items()})

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "twice"}}

    return Module


def test_lightning_with_all_that_it_shows_tests_and_goes_on_from(tmp_path: Path):
    lightning = pytest.importorskip("lightning", reason=NEEDS)
    data, kind = data_of(lightning), all_of_it(lightning)

    def train(net: nn.Module) -> Any:
        folder, results = tmp_path / str(id(net)), []
        module = kind(net)
        for epochs, more in ((1, {}), (2, {"ckpt_path": folder / "first.ckpt"})):
            trainer = lightning.Trainer(
                accelerator="cpu", max_epochs=epochs, default_root_dir=folder, logger=False, num_sanity_val_steps=1,
            )  # fmt: skip
            trainer.fit(module, datamodule=data, **more)
            trainer.save_checkpoint(folder / "first.ckpt")
            results.append({k: float(v) for k, v in trainer.callback_metrics.items()})
            results.append(trainer.test(module, datamodule=data, verbose=False))
            results.append(trainer.predict(module, datamodule=data))
        saved = torch.load(folder / "first.ckpt", weights_only=False)
        return [module.found, results, saved["state_dict"], saved["optimizer_states"]]

    both(stack, train)


# -- diffusers ------------------------------------------------------------------------------------------------------


def text_unet() -> Any:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4,
    )  # fmt: skip


def denoised(model: Any, optimizer: Any, count: int, **more: Any) -> list[Any]:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    noise, losses = diffusers.DDPMScheduler(10), []
    for _ in range(count):
        clean, drawn, words = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 3, 8)
        times = torch.randint(0, 10, (2,))
        given = {name: make(clean) for name, make in more.items()}
        found = model(noise.add_noise(clean, drawn, times), times, encoder_hidden_states=words, **given).sample
        loss = F.mse_loss(found, drawn)
        loss.backward()
        losses += [nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0), loss.detach()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adapted_unet() -> Any:
    model = text_unet().requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(
        LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    )
    return model


def test_adapters_of_a_picture_model_under_checkpoints(tmp_path: Path):
    def train(model: Any) -> Any:
        model.enable_gradient_checkpointing()
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        losses = denoised(model, torch.optim.AdamW(trained, lr=0.01), 3)
        from peft.utils import get_peft_model_state_dict

        return [losses, {k: v.clone() for k, v in get_peft_model_state_dict(model).items()}]

    both(adapted_unet, train)


class Controlled(nn.Module):
    """A frozen picture model, and a network that steers it."""

    def __init__(self) -> None:
        super().__init__()
        diffusers = pytest.importorskip("diffusers", reason=NEEDS)
        self.unet = text_unet().requires_grad_(False)
        torch.manual_seed(1)
        self.control = diffusers.ControlNetModel.from_unet(self.unet, conditioning_channels=4)

    def forward(self, noisy: Any, times: Any, encoder_hidden_states: Any, hint: Any) -> Any:
        down, middle = self.control(
            noisy, times, encoder_hidden_states=encoder_hidden_states, controlnet_cond=hint, return_dict=False
        )
        return self.unet(
            noisy, times, encoder_hidden_states=encoder_hidden_states,
            down_block_additional_residuals=down, mid_block_additional_residual=middle,
        )  # fmt: skip


def test_a_control_net_next_to_a_frozen_picture_model():
    def train(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.control.parameters(), lr=0.01)
        return denoised(model, optimizer, 3, hint=lambda clean: F.interpolate(clean, scale_factor=8))

    both(Controlled, train)


def autoencoder() -> Any:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=2, block_out_channels=(8, 8), norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=8,
    )  # fmt: skip


def test_an_autoencoder_that_draws_its_latents():
    def train(model: Any) -> Any:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for number in range(3):
            clean = torch.randn(2, 1, 8, 8)
            found = model(clean, sample_posterior=number > 0).sample
            loss = F.l1_loss(found, clean)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    both(autoencoder, train)


def test_a_picture_model_is_asked_by_a_pipeline_between_the_steps():
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)

    def train(model: Any) -> Any:
        noise, found = diffusers.DDPMScheduler(10), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(2):
            clean, drawn = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            times = torch.randint(0, 10, (2,))
            F.mse_loss(model(noise.add_noise(clean, drawn, times), times).sample, drawn).backward()
            optimizer.step()
            optimizer.zero_grad()
            made = diffusers.DDPMPipeline(unet=model, scheduler=diffusers.DDPMScheduler(10))
            made.set_progress_bar_config(disable=True)
            pictures = made(generator=torch.Generator().manual_seed(number), num_inference_steps=2, output_type="np")
            found.append(torch.from_numpy(pictures.images.copy()))
        return found

    both(unet, train)


# -- sentence-transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["several", "prompts", "adapter", "evaluated"])
def test_sentence_transformers_with_several_data_sets_prompts_adapters_and_evaluators(case: str, tmp_path: Path):
    module: Any = pytest.importorskip("tests.integrations.test_sentence_scripts")
    if case == "adapter" and Version(peft.__version__) < Version("0.19.1"):
        pytest.skip("transformers refuses adapters of an older peft than 0.19.1")
    sentences, datasets = module.sentences, module.datasets

    def run(streams: bool) -> Any:
        from accelerate.state import AcceleratorState

        from megatrain.integrations.hf import Streamed

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model = module.encoder()
        if case == "adapter":
            torch.manual_seed(1)
            model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights="gaussian"))
        rows: Any = datasets.Dataset.from_dict(module.PAIRS)
        loss: Any = module.of("sentence_transformer", "MultipleNegativesRankingLoss")(model)
        more: dict[str, Any] = {}
        options: dict[str, Any] = {"batch_sampler": "no_duplicates"}
        if case == "several":
            rows = {"pairs": rows, "scored": datasets.Dataset.from_dict(module.SCORED)}
            loss = {"pairs": loss, "scored": module.of("sentence_transformer", "CosineSimilarityLoss")(model)}
            options["multi_dataset_batch_sampler"] = "round_robin"
        if case == "prompts":
            options["prompts"] = {"one": "w1 w2 ", "other": "w3 "}
        if case == "evaluated":
            kind = importlib.import_module("sentence_transformers.evaluation").EmbeddingSimilarityEvaluator
            more["evaluator"] = kind(module.PAIRS["one"], module.PAIRS["other"], [i / 12 for i in range(12)])
            options |= {"eval_strategy": "steps", "eval_steps": 1}
        arguments = sentences.SentenceTransformerTrainingArguments(
            str(tmp_path / str(streams)), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-3, **options,
        )  # fmt: skip
        recording = megatrain.Recording()
        kind: Any = sentences.SentenceTransformerTrainer
        if streams:
            kind = type("Streaming", (Streamed, kind), {})
            more |= {"megatrain_transfer": "copy", "megatrain_recording": recording}
        trainer = kind(model=model, args=arguments, train_dataset=rows, loss=loss, **more)
        trainer.train()
        trainer.save_model(str(tmp_path / str(streams) / "saved"))
        assert not streams or sum(entry.stream == "compute" for entry in recording.issued) > 0
        times = ("runtime", "per_second", "flos")
        log = [{k: v for k, v in row.items() if not any(t in k for t in times)} for row in trainer.state.log_history]
        found = model.encode([text(i, 5) for i in range(3)], convert_to_tensor=True)
        names = sorted(p.name for p in (tmp_path / str(streams) / "saved").rglob("*") if p.suffix == ".safetensors")
        return [str(log), found, names, {k: v.detach().clone() for k, v in model.state_dict().items()}]

    assert_same(run(True), run(False))
