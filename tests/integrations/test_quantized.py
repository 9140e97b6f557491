"""Frozen quantized bases under LoRA, and 8-bit optimizers, of torchao, bitsandbytes and quanto: the bits of the plain
loop, and of the stock runs of trainers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import megatrain
from megatrain.errors import TraceError
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, TWO, Scenario, assert_streams_as_stock, llama

ao: Any = pytest.importorskip("torchao.quantization")
ao_optim: Any = pytest.importorskip("torchao.optim")
ao_nf4: Any = pytest.importorskip("torchao.prototype._nf4tensor_api")
bnb: Any = pytest.importorskip("bitsandbytes")
quanto: Any = pytest.importorskip("optimum.quanto")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

WIDTH = 128
TORCHAO: dict[str, Callable[[], Any]] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "fp8": lambda: ao.Float8WeightOnlyConfig(),
    "nf4": lambda: ao_nf4.NF4WeightOnlyConfig(),
    "int8, dynamic inputs": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
}


class Lora(nn.Module):
    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).tanh()


def of_torchao(kind: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Lora(nn.Linear(WIDTH, WIDTH)) for _ in range(4))).to(dtype)
    ao.quantize_(model, TORCHAO[kind](), filter_fn=lambda module, name: name.endswith("base"))
    return model


def of_bitsandbytes(nested: bool, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    bases = [bnb.nn.Linear4bit(WIDTH, WIDTH, compress_statistics=nested, quant_type="nf4") for _ in range(4)]
    return nn.Sequential(*map(Lora, bases)).to(dtype).to("cpu")  # the second quantizes


def of_quanto(kind: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Lora(nn.Linear(WIDTH, WIDTH)) for _ in range(4))).to(dtype)
    quanto.quantize(model, weights=getattr(quanto, kind), include="*base")
    quanto.freeze(model)
    for layer in model:
        layer.base.requires_grad_(False)
    return model


def square(result: Any, batch: Any) -> torch.Tensor:
    return result.float().square().mean()


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_trains(
    model: nn.Sequential, dtype: torch.dtype, eager: nn.Module | None = None, **options: Any
) -> megatrain.CompiledModule:
    """A call with its backward after another call, then clipped steps, against the plain loop.

    Args:
        model: Streams.
        dtype: Of its inputs.
        eager: The same model again; None for a copy, where its tensors can be copied.
        options: Of `compile`.
    """
    eager = copy.deepcopy(model) if eager is None else eager
    compiled = megatrain.compile(model, device="cpu", **options)
    x = torch.randn(4, WIDTH).to(dtype)
    result = compiled(x)
    compiled(x + 1)
    for one in (result, eager(x)):
        one.square().sum().backward()
    assert_same([p.grad for p in trained(eager)], [p.grad for p in trained(model)])
    for p in (*trained(eager), *trained(model)):
        p.grad = None
    own = torch.optim.AdamW(trained(eager), lr=1e-2)
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(trained(model), lr=1e-2), loss=square, max_grad_norm=0.1)
    for _ in range(3):
        batch = torch.randn(4, WIDTH).to(dtype)
        loss = square(eager(batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(eager), 0.1)
        own.step()
        own.zero_grad()
        assert_same(loss.detach(), step(batch).detach().reshape(()))
    step.flush()
    assert_same(trained(eager), trained(model))
    assert compiled.peak_bytes <= compiled.megatrain.budget.nbytes
    return compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao(kind: str, dtype: torch.dtype) -> None:
    activations = "keep" if dtype == torch.bfloat16 else "recompute"
    compiled = assert_trains(of_torchao(kind, dtype), dtype, memory="640KiB", activations=activations)
    assert len(compiled.program.templates) == 1
    largest = max(compiled.program.state_bytes(block) for block in compiled.program.blocks)
    packed = WIDTH * WIDTH if kind != "nf4" else WIDTH * WIDTH // 2
    assert packed < largest < packed + 9 * 4 * WIDTH + 2 * 4 * 4 * WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_quanto(kind: str, dtype: torch.dtype) -> None:
    compiled = assert_trains(of_quanto(kind, dtype), dtype, of_quanto(kind, dtype), memory="640KiB")
    largest = max(map(compiled.program.state_bytes, compiled.program.blocks))
    assert WIDTH * WIDTH < largest <= WIDTH * WIDTH + 4 * dtype.itemsize * WIDTH * 4


@pytest.mark.parametrize(("dtype", "activations"), [(torch.float32, "keep"), (torch.bfloat16, "recompute")])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(nested: bool, dtype: torch.dtype, activations: str) -> None:
    compiled = assert_trains(of_bitsandbytes(nested, dtype), dtype, memory="640KiB", activations=activations)
    assert len(compiled.program.templates) == 2  # the first layer's input needs no gradient
    assert max(map(compiled.program.state_bytes, compiled.program.blocks)) < WIDTH * WIDTH


def loaded(folder: Path, kind: str) -> Any:
    if not folder.exists():
        llama(hidden_size=64, intermediate_size=64).save_pretrained(folder)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantization: Any = TorchAoConfig(ao.Int8WeightOnlyConfig()) if kind == "torchao" else nf4
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


def lora() -> Any:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")


def prepared(folder: Path, kind: str, checkpointed: bool = False) -> Any:
    """What the guides for QLoRA say."""
    return prepare_model_for_kbit_training(loaded(folder, kind), use_gradient_checkpointing=checkpointed)


def adapted(folder: Path, kind: str, checkpointed: bool = False) -> Any:
    model = prepared(folder, kind, checkpointed)
    torch.manual_seed(1)
    return get_peft_model(model, lora()).train()  # from_pretrained returns a model in eval mode


def tokens(number: int) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_a_pretrained_base_under_peft(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"

    def stepping(model: Any) -> tuple[megatrain.CompiledModule, torch.optim.Optimizer]:
        return megatrain.compile(model, device="cpu", memory="1MiB"), torch.optim.AdamW(trained(model), lr=1e-2)

    eager, model = adapted(folder, kind), adapted(folder, kind)
    assert_same(trained(eager), trained(model))
    compiled, optimizer = stepping(model)
    step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=0.5)
    own = torch.optim.AdamW(trained(eager), lr=1e-2)
    for number in range(3):
        loss = eager(**tokens(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(eager), 0.5)
        own.step()
        own.zero_grad()
        assert_same(loss.detach(), step(tokens(number)).detach().reshape(()))
    step.save(tmp_path / "run")
    assert_same(trained(eager), trained(model))
    again = adapted(folder, kind)
    compiled, optimizer = stepping(again)
    resumed = megatrain.TrainStep.load(tmp_path / "run", compiled, optimizer, max_grad_norm=0.5)
    assert_same(step(tokens(5)), resumed(tokens(5)))
    for each in (step, resumed):
        each.flush()
    assert_same(trained(model), trained(again))
    model.save_pretrained(tmp_path / "adapters")
    read = PeftModel.from_pretrained(prepared(folder, kind), tmp_path / "adapters").train()
    assert_same(*(each(**tokens(9)).logits.detach() for each in (model, read)))


def test_what_bitsandbytes_moves_about_is_refused_and_the_advice_works() -> None:
    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False) for _ in range(2)]
    model = nn.Sequential(*map(Lora, layers)).to("cpu")
    x = torch.randn(4, WIDTH)
    message = r"`0\.base\.weight` is a Int8Params that holds its values again in its attribute `CB`"
    with pytest.raises(TraceError, match=message) as caught:
        megatrain.compile(model, device="cpu")(x)
    assert "torchao's Int8WeightOnlyConfig or to bitsandbytes' 4 bit" in str(caught.value)  # the tests above
    model(x)
    with pytest.raises(TraceError, match="is a Int8Params of codes without scales beside them"):
        megatrain.compile(model, device="cpu")(x)
    unquantized = nn.Sequential(Lora(bnb.nn.Linear4bit(WIDTH, WIDTH)))
    with pytest.raises(TraceError, match=r"If a later step quantizes this one \(with bitsandbytes, `model.to"):
        megatrain.compile(unquantized, device="cpu")(x)
    unquantized.to("cpu")
    assert torch.equal(megatrain.compile(unquantized, device="cpu")(x), copy.deepcopy(unquantized)(x))


# -- trainers ----------------------------------------------------------------------------------------------------------


def with_trl(name: str, kind: str, **options: Any) -> Callable[[Path], Scenario]:
    """TRL makes the adapters."""

    def made(folder: Path) -> Scenario:
        from tests.integrations import test_trl

        rows, reason = {"SFT": ("texts", None), "DPO": ("preferences", test_trl.AGAIN)}[name]
        script = test_trl.script(
            name, getattr(test_trl, rows), more=lambda model: {"peft_config": lora()}, reason=reason,
            model=lambda: loaded(folder, kind), options={**TWO, **options}, streaming={"memory": "4MiB"},
        )  # fmt: skip
        return script()

    return made


def with_trainer(kind: str, checkpointed: bool) -> Callable[[Path], Scenario]:
    saved = {"gradient_checkpointing": checkpointed, "save_strategy": "steps", "save_steps": 2}
    model: Any = lambda folder: lambda: adapted(folder, kind, checkpointed)  # noqa: E731
    return lambda folder: Scenario({**TWO, **saved}, model(folder), RAGGED, streaming={"memory": "4MiB"})


SCRIPTS: dict[str, Callable[[Path], Scenario]] = {
    "nf4, trainer, checkpoints": with_trainer("bitsandbytes", True),
    "int8, trainer": with_trainer("torchao", False),
    "nf4, sft, packed": with_trl("SFT", "bitsandbytes", packing=True, max_length=16),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_qlora_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found = assert_streams_as_stock(SCRIPTS[name](tmp_path / "base"), tmp_path)
    assert found.trainer.model.megatrain.peak_bytes <= 4 << 20


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torchao AdamW8bit": lambda ps: ao_optim.AdamW8bit(ps, lr=1e-2),
    "bitsandbytes AdamW8bit": lambda ps: bnb.optim.AdamW8bit(ps, lr=1e-2),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}], ids=["at once", "deferred"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_8_bits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    def stepping(model: nn.Module) -> tuple[megatrain.CompiledModule, Any]:
        return megatrain.compile(model, device="cpu", memory="600KiB"), OPTIMIZERS[name](model.parameters())

    eager, model = network(), network()
    own = OPTIMIZERS[name](eager.parameters())
    compiled, optimizer = stepping(model)
    step = megatrain.TrainStep(compiled, optimizer, loss=square, **options)
    for _ in range(3):
        batch = torch.randn(8, WIDTH)
        step(batch)
        square(eager(batch), batch).backward()
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(eager.parameters(), options["max_grad_norm"])
        own.step()
        own.zero_grad()
    step.save(tmp_path / "run")
    assert_same(list(eager.parameters()), list(model.parameters()))
    again = network()
    compiled, optimizer = stepping(again)
    resumed = megatrain.TrainStep.load(tmp_path / "run", compiled, optimizer, loss=square, **options)
    for _ in range(2):
        batch = torch.randn(8, WIDTH)
        assert_same(step(batch), resumed(batch))
    for each in (step, resumed):
        each.flush()
    assert_same(list(model.parameters()), list(again.parameters()))
