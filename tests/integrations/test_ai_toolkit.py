"""The adapter for ai-toolkit against a stand-in: its network of adapters, its loop, and what detaching restores."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatrain.errors import ExecuteError, OptionError
from megatrain.integrations import ai_toolkit
from megatrain.integrations.ai_toolkit import MemoryManager
from tests.comparing import assert_same

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """A model that takes keywords and returns a tuple, as those of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.is_checkpointing = False

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor]:
        x = hidden_states + timestep[:, None, None]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointing else layer(x)
        return (x,)


class Adapter(nn.Module):
    """As ai-toolkit's: over a layer's `forward`, and in no module of the model. It asks its network at each call."""

    def __init__(self, network: Network, layer: Any) -> None:
        super().__init__()
        self.network_ref, self.org_module = weakref.ref(network), [layer]
        self.lora_down, self.lora_up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features)
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(2.0))

    def apply_to(self) -> None:
        self.org_forward = self.org_module[0].forward
        self.org_module[0].forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        network, plain = self.network_ref(), self.org_forward(x)
        if network is None or not network.is_active:
            return plain
        return plain + self.lora_up(self.lora_down(x)) * self.alpha * network.torch_multiplier[:, None, None]


class Network(nn.Module):
    """All adapters of a model. The loop enters it around calls, and sets a multiplier for each batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.is_active = False
        self.torch_multiplier = torch.ones(1)
        self.each = [Adapter(self, each) for each in model.modules() if isinstance(each, nn.Linear)]
        self.adapters = nn.ModuleList(self.each)

    def apply_to(self) -> None:
        for each in self.each:
            each.apply_to()

    def set_multiplier(self, multiplier: float) -> None:
        place = getattr(self.each[0].lora_down, "_memory_management_device", torch.device("cpu"))
        self.torch_multiplier = torch.full((1,), multiplier, device=place)

    def __enter__(self) -> None:
        self.is_active = True

    def __exit__(self, *_: object) -> None:
        self.is_active = False


def made() -> tuple[Transformer, Network]:
    torch.manual_seed(0)
    model = Transformer().requires_grad_(False)
    return model, Network(model)


def trained(model: nn.Module, network: Network, steps: int = 4) -> Iterator[torch.Tensor]:
    """A loop as ai-toolkit's: two micro-batches, clipped by the norm, and an evaluation without the adapters."""
    network.apply_to()
    model.to("cpu")
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(2):
            x, t = torch.randn(2, 6, WIDTH, generator=random), torch.rand(2, generator=random)
            network.set_multiplier(1.0)
            with network:
                loss = (model(hidden_states=x, timestep=t)[0] - x.flip(1)).square().mean() / 2
                loss.backward()
            yield loss.detach()
        yield torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            sample = model(hidden_states=x, timestep=t)[0] if step % 2 else model(x, t)[0]
        yield sample


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryManager, "options", {"memory": "120KiB"})


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_training_has_the_bits_of_the_model_alone(is_checkpointing: bool):
    expected, (model, network) = made(), made()
    expected[0].is_checkpointing = model.is_checkpointing = is_checkpointing
    MemoryManager.attach(model, torch.device("cpu"), offload_percent=0.5, ignore_modules=[model.layers[0].norm])
    for one, other in zip(trained(*expected), trained(model, network), strict=True):
        assert_same(one, other)
    assert_same(list(expected[1].parameters()), list(network.parameters()))
    manager: Any = vars(model)["_memory_manager"]
    assert len(manager.compiled.program.blocks) >= 4
    weights = sum(p.nbytes for p in model.parameters())
    assert manager.compiled.peak_bytes <= 120 << 10 < weights
    # With gradients, and without: keywords, or not. The multiplier, another tensor for each batch, is an input.
    assert len(list(manager.compiled.megatrain._variants)) == 3


def test_detaching_restores_everything():
    (plain, _), (model, network) = made(), made()
    before = {name: dict(vars(each)) for name, each in model.named_modules()}
    MemoryManager.attach(model, torch.device("cpu"))
    MemoryManager.attach(model, torch.device("cpu"))  # once more does nothing, as in ai-toolkit
    assert model.to("cuda") is model
    assert next(model.to(torch.float64).parameters()).dtype == torch.float64
    model.to(dtype=torch.float32)
    for _ in trained(model, network, 2):
        pass
    with pytest.raises(OptionError, match=r"the model streams, and can't become torch.bfloat16 any more"):
        model.to(torch.bfloat16)
    values = copy.deepcopy(network.state_dict())
    MemoryManager.detach(model)
    MemoryManager.detach(model)
    for each in network.each:
        each.org_module[0].forward = each.org_forward  # ai-toolkit's network stays on until it is taken off
        del each.org_module[0].forward
    assert {name: {key for key in vars(each)} for name, each in model.named_modules()} == {
        name: set(known) for name, known in before.items()
    }
    assert not any("_memory_management_device" in vars(each) for each in network.modules())
    assert_same(values, network.state_dict())
    assert_same(plain.state_dict(), model.state_dict())
    x, t = torch.randn(2, 6, WIDTH), torch.rand(2)
    assert_same(plain(x, t)[0], model(x, t)[0])
    MemoryManager.free(model)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    MemoryManager.release_cached_memory()


def test_other_adapters_than_at_the_first_call_are_refused():
    model, network = made()
    MemoryManager.attach(model, torch.device("cpu"))
    x, t = torch.randn(2, 6, WIDTH), torch.rand(2)
    model(x, t)
    network.apply_to()
    with pytest.raises(ExecuteError, match="other adapters than at its first call"):
        model(x, t)
    MemoryManager.detach(model)
    MemoryManager.attach(model, torch.device("cpu"))
    with network:
        model(x, t)[0].sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_install_takes_the_place_of_ai_toolkits_object(monkeypatch: pytest.MonkeyPatch):
    names = ("toolkit", "toolkit.memory_management", "toolkit.memory_management.manager")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ai_toolkit.install(memory="1GiB")
    for name in names[1:]:
        assert vars(sys.modules[name])["MemoryManager"] is MemoryManager
    assert MemoryManager.options == {"memory": "1GiB"}
