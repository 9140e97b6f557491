"""The code of docs/tools.md for Lightning: whole training steps, with the bits of a stock run, resumed as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from tests.comparing import assert_same

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e .[users]")
pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
MODULE, FABRIC = (
    code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "lightning" in code
)
POINTS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(24)]


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(4))
        self.layers = nn.Sequential(*layers, nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loader(size: int) -> Any:
    return torch.utils.data.DataLoader(POINTS, batch_size=size, generator=torch.Generator())  # pyright: ignore


class Stock(lightning.LightningModule):
    """The same training, as Lightning does it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held_out", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Notes(lightning.Callback):
    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        state = {name: p.detach().clone() for name, p in module.net.named_parameters()}
        self.found[trainer.global_step] = (float(trainer.callback_metrics["loss"]), state)


def fit(folder: Path, module: Any, size: int, **options: Any) -> Any:
    path = options.pop("ckpt_path", None)
    torch.manual_seed(1)
    notes = Notes()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[notes, saves], **options,
    )  # fmt: skip
    trainer.fit(module, loader(size), loader(size), ckpt_path=path)
    return trainer, notes.found, values(module.net)


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    """The plain net's, by its own names."""
    plain: Any = net
    return {name: tensor.detach().clone() for name, tensor in getattr(plain, "net", plain).state_dict().items()}


def streamed(found: dict[str, Any], dropout: float, **options: Any) -> tuple[Any, Any]:
    recording = megatrain.Recording()
    more = {"device": "cpu", "transfer": "copy", "recording": recording, **options}
    return found["Streamed"](Net(dropout), **more), recording


def test_a_module_trains_by_whole_steps_with_the_stock_runs_bits(tmp_path: Path) -> None:
    stock, _, expected = fit(tmp_path / "stock", Stock(Net(0.1)), 3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    found: dict[str, Any] = {}
    exec(compile(MODULE, "tools.md", "exec"), found)
    module, recording = streamed(found, 0.1, memory="4KiB")
    trainer, _, state = fit(tmp_path / "streamed", module, 6)
    assert_same(state, expected)
    assert trainer.global_step == stock.global_step == module.train_step.progress.count == 12
    assert trainer.callback_metrics["held_out"] == stock.callback_metrics["held_out"]
    assert sum(entry.stream == "compute" for entry in recording.issued) > 12 * len(module.net.program.blocks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_module_goes_on_with_the_bits_of_an_undisturbed_run(precision: str, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(compile(MODULE, "tools.md", "exec"), found)
    _, steps, state = fit(tmp_path / "whole", streamed(found, 0.1, precision=precision)[0], 6)
    for number in (4, 8):  # Lightning goes on from the end of an epoch; in the middle it would repeat batches
        (path,) = (tmp_path / "whole").glob(f"*step={number}.ckpt")
        module, _ = streamed(found, 0.1, precision=precision)
        trainer, again, end = fit(tmp_path / f"again-{number}", module, 6, ckpt_path=str(path))
        assert trainer.global_step == 12
        assert_same(again, {at: each for at, each in steps.items() if at > number})
        assert_same(end, state)


def test_fabric_trains_by_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eager = Net(0.1)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for x, y in loader(3):
        F.cross_entropy(eager(x), y).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    net = Net(0.1)
    torch.manual_seed(1)
    found: dict[str, Any] = {
        "megatrain": megatrain, "torch": torch, "net": net, "loader": loader(3)
    }  # fmt: skip
    exec(compile(MODULE, "tools.md", "exec"), found)
    exec(compile(FABRIC, "tools.md", "exec"), found)
    expected = {name: tensor.detach() for name, tensor in eager.state_dict().items()}
    assert_same({name: tensor.detach() for name, tensor in net.state_dict().items()}, expected)
    saved = torch.load("fabric.ckpt", weights_only=False)
    assert_same({name.removeprefix("net."): tensor for name, tensor in saved["model"].items()}, expected)
    assert_same(saved["optimizer"]["state"], optimizer.state_dict()["state"])
    assert found["step"].progress.count == 8
