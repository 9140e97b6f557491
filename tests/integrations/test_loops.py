"""Loops of accelerate, Lightning and diffusers with a compiled model in place of the model."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from torch import nn

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, codes, llama

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
NEEDS = "needs `pip install -e .[users]`"
POINTS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(12)]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)), nn.Linear(8, 2)
    )


def both(make: Callable[[], nn.Module], train: Callable[[Any, Path], Any], folder: Path) -> None:
    """Trains a model in eager and compiled; what `train` returns, the state and the generators have the same bits."""
    found: list[Any] = []
    recording = megatrain.Recording()
    for compiles in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = make()
        used = megatrain.compile(model, device="cpu", transfer="copy", recording=recording) if compiles else model
        torch.manual_seed(1)
        with contextlib.redirect_stdout(io.StringIO()):
            result = train(used, folder / str(compiles))
        state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
        found.append((result, state, torch.get_rng_state()))
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0


def loader(rows: Any, size: int = 2) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=size)


def updated(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    """An update of a plain loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# -- accelerate -----------------------------------------------------------------------------------------------------


def trained_by(accelerator: Any, model: Any, optimizer: Any, batches: Any, schedule: Any = None) -> list[Any]:
    losses: list[Any] = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()))
    return losses


def goes_on(model: Any, folder: Path) -> Any:
    """Saves all in the middle of an epoch, goes on from there, and saves the model."""
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
    state: Any = accelerator.get_state_dict(model)
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained(folder / "plain", state_dict=state, save_function=accelerator.save)
    again = type(plain).from_pretrained(folder / "plain").state_dict()
    names = sorted(path.name for path in folder.rglob("*") if path.is_file())
    return [losses, names, again, {k: v.clone() for k, v in state.items()}]


def two_models(model: Any, folder: Path) -> Any:
    """A generator and a discriminator, each with its optimizer."""
    torch.manual_seed(2)
    critic: Any = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    if isinstance(model, megatrain.CompiledModule):
        critic = megatrain.compile(critic, device="cpu", transfer="copy")
    accelerator = Accelerator(cpu=True)
    first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, critic))
    model, critic, first, second = accelerator.prepare(model, critic, first, second)
    losses: list[Any] = []
    for x, _ in loader(POINTS, 3):
        loss = critic(model(x).detach()).mean() - critic(torch.ones(3, 2)).mean()
        losses += [updated(second, loss), updated(first, -critic(model(x)).mean())]
        second.zero_grad()
    return losses


# -- loops of one's own -----------------------------------------------------------------------------------------------


def several_calls_and_one_backward(model: Any, folder: Path) -> Any:
    """REINFORCE."""
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), list[Any]()
    for _ in range(2):
        state, chances, rewards = torch.randn(1, 8), list[Any](), list[float]()
        for _ in range(3):
            choice = torch.distributions.Categorical(logits=model(state))
            action = choice.sample()
            chances.append(choice.log_prob(action))
            rewards.append(float(action))
            state = state + 0.1 * action
        weights = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        found += [updated(optimizer, -(torch.stack(chances).squeeze(-1) * weights).sum()), rewards]
    return found


def test_a_loop_of_accelerate_has_the_plain_models_bits(tmp_path: Path) -> None:
    both(lambda: llama(attention_dropout=0.1), goes_on, tmp_path)


@pytest.mark.parametrize("train", [two_models, several_calls_and_one_backward])
def test_calls_of_several_models_or_times_have_the_plain_models_bits(train: Any, tmp_path: Path) -> None:
    both(stack, train, tmp_path)


# -- Lightning ------------------------------------------------------------------------------------------------------


def by_itself(lightning: Any) -> Any:
    class Module(lightning.LightningModule):
        """Logs, and shows gradients."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.found: list[Any] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log_dict({"loss": loss, "twice": 2 * loss}, prog_bar=True)
            self.found.append(loss.detach().clone())
            return {"loss": loss, "extra": batch[1]}

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", F.cross_entropy(self.net(batch[0]), batch[1]))

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = importlib.import_module("lightning.pytorch.utilities").grad_norm(self.net, norm_type=2)
            self.found.append({key: float(value) for key, value in norms.items()})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "twice"}}

    return Module


def by_hand(lightning: Any) -> Any:
    class ByHand(by_itself(lightning)):
        """Manual optimization, with two optimizers in turns."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()[index % 2]
            optimizer.zero_grad()
            self.manual_backward(loss := F.cross_entropy(self.net(batch[0]), batch[1]))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.found.append(loss.detach().clone())

        def configure_optimizers(self) -> Any:
            parameters = list(self.net.parameters())
            return [torch.optim.AdamW(parameters[:4], lr=0.01), torch.optim.SGD(parameters[4:], lr=0.1)]

    return ByHand


CALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "GradientAccumulationScheduler": {"scheduling": {0: 2, 1: 4}},
}
LIGHTNING: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulated, clipped": (by_itself, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "by hand": (by_hand, {"val_check_interval": 2}),
    **{name: (by_itself, {"callbacks": name, "max_epochs": 3}) for name in CALLBACKS},
}


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_trains_goes_on_and_predicts_with_the_plain_models_bits(name: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason=NEEDS)
    make, options = LIGHTNING[name]

    def train(net: Any, folder: Path) -> Any:
        module, results = make(lightning)(net), list[Any]()
        for epochs, more in ((1, {}), (options.get("max_epochs", 2), {"ckpt_path": folder / "first.ckpt"})):
            given = {**options, "max_epochs": epochs}
            if kind := given.pop("callbacks", None):
                callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
                given["callbacks"] = [getattr(callbacks, kind)(**CALLBACKS[kind])]
            trainer = lightning.Trainer(
                accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False, **given,
            )  # fmt: skip
            trainer.fit(module, loader(POINTS, 3), loader(POINTS[:6], 3), **more)
            trainer.save_checkpoint(folder / "first.ckpt")
            results.append({k: float(v) for k, v in trainer.callback_metrics.items()})
            results.append([trainer.global_step, trainer.predict(module, loader(POINTS, 6))])
        saved = torch.load(folder / "first.ckpt", weights_only=False)
        return [module.found, results, saved["state_dict"], saved["optimizer_states"]]

    both(stack, train, tmp_path)


def test_a_lightning_module_of_the_page_trains_and_goes_on_with_the_stock_runs_bits(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason=NEEDS)
    found: dict[str, Any] = {}
    exec(compile(codes("tools.md", "import lightning")[0], "tools.md", "exec"), found)

    class Stock(by_itself(lightning)):
        """As the page's module trains."""

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def fit(name: str, module: Any, size: int, path: Any = None, **options: Any) -> Any:
        torch.manual_seed(1)
        saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / name, save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, callbacks=[saves], **options,
        )  # fmt: skip
        rows = torch.utils.data.DataLoader(POINTS, batch_size=size, generator=torch.Generator())  # pyright: ignore
        trainer.fit(module, rows, loader(POINTS, 3), ckpt_path=path)
        net = getattr(module.net, "net", module.net)
        return trainer, {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}

    def streamed(**options: Any) -> Any:
        return found["Streamed"](stack(), device="cpu", transfer="copy", **options)

    stock, expected = fit("stock", Stock(stack()), 3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    module = streamed(memory="4KiB")
    trainer, state = fit("streamed", module, 6)
    assert_same(state, expected)
    assert trainer.global_step == stock.global_step == module.train_step.progress.count == 6
    assert trainer.callback_metrics["held_out"] == stock.callback_metrics["held_out"]
    _, whole = fit("masters", streamed(precision="bf16"), 6)
    (path,) = (tmp_path / "masters").glob("*step=4.ckpt")  # the end of an epoch; in the middle batches would repeat
    trainer, end = fit("again", streamed(precision="bf16"), 6, str(path))
    assert trainer.global_step == 6
    assert_same(end, whole)


def test_fabric_of_the_page_trains_by_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason=NEEDS)
    monkeypatch.chdir(tmp_path)
    eager, net = stack(), stack()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for x, y in loader(POINTS, 3):
        F.cross_entropy(eager(x), y).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(1)
    found: dict[str, Any] = {"megatrain": megatrain, "torch": torch, "net": net, "loader": loader(POINTS, 3)}
    for code in codes("tools.md", "lightning"):
        exec(compile(code, "tools.md", "exec"), found)
    saved = torch.load("fabric.ckpt", weights_only=False)
    for state in (net.state_dict(), {name.removeprefix("net."): tensor for name, tensor in saved["model"].items()}):
        assert_same({name: t.detach() for name, t in state.items()}, dict(eager.state_dict()))
    assert_same(saved["optimizer"]["state"], optimizer.state_dict()["state"])
    assert found["step"].progress.count == 4


# -- diffusers ------------------------------------------------------------------------------------------------------


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def test_diffusers_with_an_average_of_the_weights_and_a_pipeline_between_the_steps(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason=NEEDS)
    training = pytest.importorskip("diffusers.training_utils")

    def train(model: Any, folder: Path) -> Any:
        noise, losses = diffusers.DDPMScheduler(10), list[Any]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = training.EMAModel(model.parameters(), decay=0.5)
        for number in range(3):
            clean, drawn = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            times = torch.randint(0, 10, (2,))
            F.mse_loss(model(noise.add_noise(clean, drawn, times), times).sample, drawn).backward()
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            pipeline = diffusers.DDPMPipeline(unet=model, scheduler=diffusers.DDPMScheduler(10))
            pipeline.set_progress_bar_config(disable=True)
            seed = torch.Generator().manual_seed(number)
            made = pipeline(generator=seed, num_inference_steps=2, output_type="np")
            losses.append(torch.from_numpy(made.images.copy()))
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        averaged = {k: v.detach().clone() for k, v in model.state_dict().items()}
        ema.restore(model.parameters())
        return [losses, averaged]

    both(unet, train, tmp_path)
