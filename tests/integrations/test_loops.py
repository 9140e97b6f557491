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


# -- loops of one's own -----------------------------------------------------------------------------------------------


def test_a_loop_of_accelerate_has_the_plain_models_bits(tmp_path: Path) -> None:
    both(lambda: llama(attention_dropout=0.1), goes_on, tmp_path)


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
