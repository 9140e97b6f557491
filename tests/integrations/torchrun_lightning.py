"""A script of Lightning that torchrun starts in two processes, with its strategy for data parallelism."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatrain

lightning: Any = pytest.importorskip("lightning")  # pytest looks for doctests here, too


class WithLoss(nn.Module):
    """A net and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the loss."""
        return self.net(x).square().mean()


class Module(lightning.LightningModule):
    """Trains a plain model, a compiled one by calls, or by training steps with a process group and without."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net: Any = None
        self.automatic_optimization = how in ("plain", "calls")

    def configure_model(self) -> None:
        """Compiles the model, once Lightning has set up the processes."""
        if self.net is None:
            group: dict[str, Any] = {"process_group": dist.group.WORLD} if self.how == "steps" else {}
            self.net = WithLoss() if self.how == "plain" else megatrain.compile(WithLoss(), device="cpu", **group)

    def configure_optimizers(self) -> Any:
        """Makes the optimizer."""
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, index: int) -> Any:
        """Takes a step."""
        if self.automatic_optimization:
            return self.net(batch[0])
        optimizer: Any = self.optimizers()
        if index == 0:
            self.step = megatrain.TrainStep(self.net, optimizer.optimizer)
        return optimizer.step(lambda: self.step(batch[0]))


def main(how: str) -> None:
    """Trains, and prints the parameters' bits."""
    rows = torch.utils.data.TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module(how)
    try:
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    except megatrain.ExecuteError as error:
        print(f"refused: {str(error).splitlines()[0]}", flush=True)
        return
    bits = b"".join(p.detach().numpy().tobytes() for p in module.net.parameters())
    print(f"trained: {trainer.global_step} steps, {bits.hex()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
