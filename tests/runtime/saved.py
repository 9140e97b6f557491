"""What the tests of weights share: models on meta, and files with the state of their copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import megatrain
from megatrain.errors import WeightsError
from tests.models import Gpt

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def gpt(seed: int = 0) -> Gpt:
    torch.manual_seed(seed)
    return Gpt()


def on_meta() -> Gpt:
    with torch.device("meta"):
        return Gpt()


def state_of(model: nn.Module, *, drop: tuple[str, ...] = ("head.weight",)) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items() if name not in drop}


def save(path: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file({name: t.contiguous() for name, t in state.items()}, path)
    return path


def save_sharded(folder: Path, state: dict[str, torch.Tensor], shards: int = 3) -> Path:
    """Neighbours lie in different files, so that no order of reading goes through one file after the other."""
    folder.mkdir(exist_ok=True)
    listed = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(state)}
    for file in set(listed.values()):
        save(folder / file, {name: t for name, t in state.items() if listed[name] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return index


def refusal(model: nn.Module, weights: Any, folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        megatrain.compile(model, device="cpu", weights=weights)
    return str(caught.value).replace(str(folder), "FOLDER")


def assert_holds(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    for name, expected in state.items():
        assert found[name].device.type == "cpu"
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name


class Partial(nn.Module):
    """Uses one of its layers or both, has a buffer of each kind and a parameter that no forward reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x, both: bool = False):
        y = self.norm(self.first(x)) * self.scale
        return self.second(y) if both else y


def partial_on_meta() -> Partial:
    with torch.device("meta"):
        model = Partial()
    model.scale = torch.full((4,), 2.0)
    return model
