"""More loops of other libraries, as their documentation writes them: accelerate, Lightning, Fabric, diffusers, EMA."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn

import megatrain
from tests.integrations.runs import RAGGED, ROWS, llama
from tests.integrations.test_loops import NEEDS, POINTS, both, dit, loader, stack, unet

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


# -- accelerate -----------------------------------------------------------------------------------------------------


def trained_by(accelerator: Any, model: Any, optimizer: Any, batches: Any, schedule: Any = None) -> list[Any]:
    losses: list[Any] = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def test_accelerate_without_accumulate_and_with_no_sync():
    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True)
        model, optimizer, batches = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), loader(RAGGED)
        )
        losses: list[Any] = []
        for number, batch in enumerate(batches):
            if number % 2 == 0:
                with accelerator.no_sync(model):
                    accelerator.backward(model(**batch).loss / 2)
            else:
                loss = model(**batch).loss / 2
                accelerator.backward(loss)
                accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                losses.append(loss.detach())
        return losses

    both(llama, train)


def test_accelerate_goes_on_in_the_middle_of_an_epoch(tmp_path: Path):
    def train(model: Any) -> Any:
        folder = tmp_path / type(model).__module__ / str(id(model))
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=str(folder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(RAGGED), schedule)
        accelerator.register_for_checkpointing(schedule)
        rows = list(batches)
        losses = trained_by(accelerator, model, optimizer, rows[:2], schedule)
        accelerator.save_state(str(folder))
        trained_by(accelerator, model, optimizer, rows[2:4], schedule)
        accelerator.load_state(str(folder))
        losses += trained_by(accelerator, model, optimizer, skip_first_batches(batches, 2), schedule)
        names = sorted(path.name for path in folder.rglob("*") if path.is_file())
        whole: Any = accelerator.get_state_dict(model)
        return [losses, names, {k: v.clone() for k, v in whole.items()}]

    both(lambda: llama(attention_dropout=0.1), train)


def test_accelerate_saves_a_model_that_from_pretrained_reads(tmp_path: Path):
    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True)
        model, optimizer, batches = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), loader(ROWS)
        )
        trained_by(accelerator, model, optimizer, batches)
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            tmp_path / "a", state_dict=accelerator.get_state_dict(model), save_function=accelerator.save
        )
        accelerator.save_model(model, str(tmp_path / "b"))
        found = [type(unwrapped).from_pretrained(tmp_path / "a").state_dict()]
        from safetensors.torch import load_file

        return [*found, load_file(tmp_path / "b" / "model.safetensors")]

    both(llama, train)


def test_two_models_under_one_accelerator():
    """A generator and a discriminator, each with its optimizer."""

    def train(model: Any) -> Any:
        torch.manual_seed(2)
        critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        if isinstance(model, megatrain.CompiledModule):
            critic = megatrain.compile(critic, device="cpu", transfer="copy")
        accelerator = Accelerator(cpu=True)
        first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, critic))
        model, critic, first, second = accelerator.prepare(model, critic, first, second)
        losses: list[Any] = []
        for x, _ in loader(POINTS, 3):
            made = model(x)
            loss = critic(made.detach()).mean() - critic(torch.ones(3, 2)).mean()
            accelerator.backward(loss)
            second.step()
            second.zero_grad()
            fooled = -critic(model(x)).mean()
            accelerator.backward(fooled)
            first.step()
            first.zero_grad()
            second.zero_grad()
            losses += [loss.detach(), fooled.detach()]
        return losses

    both(stack, train)


def test_accelerate_finds_a_batch_size_and_evaluates():
    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True)

        def inner(size: int) -> Any:
            if size > 2:
                raise RuntimeError("CUDA out of memory.")
            set_seed(3)
            wrapped, optimizer, batches = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader(ROWS, size)
            )
            losses = trained_by(accelerator, wrapped, optimizer, batches)
            wrapped.eval()
            for batch in accelerator.prepare(loader(RAGGED)):
                with torch.no_grad():
                    losses.append(accelerator.gather_for_metrics(wrapped(**batch).logits.argmax(-1)))
            wrapped.train()
            return losses

        search: Any = find_executable_batch_size
        return search(inner, starting_batch_size=4)()

    both(llama, train)


def test_autocast_of_accelerate_around_the_loss():
    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        losses: list[Any] = []
        for batch in loader(ROWS):
            labels = batch.pop("labels")
            logits = model(**batch).logits
            with accelerator.autocast():
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    both(llama, train)


# -- plain loops ----------------------------------------------------------------------------------------------------


def test_averages_of_weights_of_torch():
    def train(model: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        swa = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
        losses: list[Any] = []
        for x, y in loader(POINTS, 3):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            swa.step()
            losses.append(loss.detach())
        average.eval()
        with torch.no_grad():
            losses.append(average(POINTS[0][0][None]))
        return losses

    both(stack, train)


def test_a_teacher_that_follows():
    """Momentum contrast: a copy of the model that moves a little with each step."""

    def train(model: Any) -> Any:
        teacher = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[Any] = []
        for x, _ in loader(POINTS, 3):
            with torch.no_grad():
                wanted = teacher(x)
            loss = F.mse_loss(model(x + 0.1), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            losses.append(loss.detach())
        return losses

    both(stack, train)


def test_gradients_by_autograd_grad_and_a_rule_of_ones_own():
    def train(model: Any) -> Any:
        parameters = list(model.parameters())
        losses: list[Any] = []
        for x, y in loader(POINTS, 3):
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.1 * gradient.sign()
            losses.append(loss.detach())
        return losses

    both(stack, train)


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning_run(make: Callable[[Any], Any], folder: Path, callbacks: Callable[[], list[Any]], **options: Any) -> None:
    lightning = pytest.importorskip("lightning", reason=NEEDS)

    def train(net: nn.Module) -> Any:
        lightning.seed_everything(5)
        module = make(lightning)(net)
        trainer = lightning.Trainer(
            accelerator="cpu", **{"max_epochs": 2, **options}, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder / str(id(net)), callbacks=callbacks(),
        )  # fmt: skip
        trainer.fit(module, loader(POINTS, 3), loader(POINTS[:6], 3))
        return [module.losses, trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}]

    both(stack, train)


def of_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.detach().clone())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    return Module


def by_hand(lightning: Any) -> Any:
    base = of_module(lightning)

    class ByHand(base):
        """Manual optimization, with two optimizers in turns."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()[index % 2]
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.losses.append(loss.detach().clone())

        def configure_optimizers(self) -> Any:
            parameters = list(self.net.parameters())
            return [torch.optim.AdamW(parameters[:4], lr=0.01), torch.optim.SGD(parameters[4:], lr=0.1)]

    return ByHand


def callbacks_of(*names: tuple[str, dict[str, Any]]) -> Callable[[], list[Any]]:
    def made() -> list[Any]:
        module: Any = importlib.import_module("lightning.pytorch.callbacks")
        return [getattr(module, name)(**options) for name, options in names]

    return made


def test_lightning_with_averaged_weights(tmp_path: Path):
    averaged = callbacks_of(("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}))
    lightning_run(of_module, tmp_path, averaged, max_epochs=3)


def test_lightning_with_an_accumulation_that_changes(tmp_path: Path):
    lightning_run(of_module, tmp_path, callbacks_of(("GradientAccumulationScheduler", {"scheduling": {0: 2, 1: 4}})))


def test_lightning_with_early_stopping_and_checkpoints(tmp_path: Path):
    names = ("EarlyStopping", {"monitor": "held_out", "patience": 1}), ("ModelCheckpoint", {"monitor": "held_out"})
    lightning_run(of_module, tmp_path, callbacks_of(*names), max_epochs=4)


def test_lightning_by_hand_with_two_optimizers(tmp_path: Path):
    lightning_run(by_hand, tmp_path, list)


def test_lightning_clips_values_and_checks_within_an_epoch(tmp_path: Path):
    lightning_run(
        of_module, tmp_path, list, gradient_clip_val=0.01, gradient_clip_algorithm="value", val_check_interval=2
    )


def test_fabric_accumulates_saves_and_loads(tmp_path: Path):
    fabric_of = pytest.importorskip("lightning.fabric", reason=NEEDS).Fabric

    def train(net: nn.Module) -> Any:
        fabric = fabric_of(accelerator="cpu")
        fabric.seed_everything(3)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        losses: list[Any] = []
        rows = list(fabric.setup_dataloaders(loader(POINTS, 3)))
        path = tmp_path / str(id(net))
        for round_ in range(2):
            for number, (x, y) in enumerate(rows):
                is_last = number % 2 == 1
                with fabric.no_backward_sync(model, enabled=not is_last):
                    loss = F.cross_entropy(model(x), y)
                    fabric.backward(loss)
                if is_last:
                    fabric.clip_gradients(model, optimizer, clip_val=0.01)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            if round_ == 0:
                fabric.save(path, {"model": model, "optimizer": optimizer, "count": 4})
            else:
                rest = fabric.load(path, {"model": model, "optimizer": optimizer})
                losses.append(torch.tensor(rest["count"]))
        return losses

    both(stack, train)


# -- diffusers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [unet, dit])
def test_diffusers_trained_with_accelerate_and_saved(make: Callable[[], nn.Module], tmp_path: Path):
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    training = pytest.importorskip("diffusers.training_utils")

    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        noise = diffusers.DDPMScheduler(10, prediction_type="v_prediction")
        kind = diffusers.UNet2DModel if make is unet else diffusers.DiTTransformer2DModel
        ema = training.EMAModel(
            model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=kind, model_config=model.config
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = importlib.import_module("diffusers.optimization").get_scheduler(
            "cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=8
        )
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        losses: list[Any] = []
        for number in range(4):
            clean, drawn = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            times = torch.randint(0, 10, (2,))
            more = {"class_labels": torch.tensor([number, 1])} if make is dit else {}
            with accelerator.accumulate(model):
                found = model(noise.add_noise(clean, drawn, times), times, **more).sample
                weights = training.compute_snr(noise, times).clamp(max=5.0)
                loss = (
                    F.mse_loss(found, noise.get_velocity(clean, drawn, times), reduction="none").mean((1, 2, 3))
                    * weights
                ).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
            losses.append(loss.detach())
        folder = tmp_path / str(id(model))
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        accelerator.unwrap_model(model).save_pretrained(folder / "averaged")
        ema.restore(model.parameters())
        ema.save_pretrained(folder / "ema")
        again = kind.from_pretrained(folder / "averaged")
        return [losses, {k: v.clone() for k, v in again.state_dict().items()}, [t.clone() for t in ema.shadow_params]]

    both(make, train)
