"""A compiled model passes for the model: class, attributes, copies, replaced forwards; never silently eager."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from transformers import LlamaForCausalLM

import megatrain
from megatrain import ExecuteError, OptionError
from tests.comparing import assert_same, assert_same_state
from tests.gradients import grad_of
from tests.tools.models import IDS, llama, values

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def compiled_llama(**options: Any) -> Any:
    return megatrain.compile(llama(), device="cpu", transfer="copy", recording=megatrain.Recording(), **options)


def streams(compiled: Any, call: Any) -> bool:
    """Tells whether a call ran the schedule."""
    recording = compiled.megatrain._recording
    before = len(recording.issued)
    call()
    return len(recording.issued) > before


class Plain(nn.Module):
    """A model with attributes that are named like ours."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.schedule = "cosine"
        self.scale = 1.0

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return self.model(x) * self.scale + shift


def test_class_name_signature_and_attributes_are_the_models():
    compiled = compiled_llama()
    assert isinstance(compiled, LlamaForCausalLM)
    assert isinstance(compiled, megatrain.CompiledModule)
    assert compiled._get_name() == "LlamaForCausalLM"
    assert type(compiled).__qualname__ == "LlamaForCausalLM"
    assert inspect.signature(compiled.forward) == inspect.signature(llama().forward)
    assert inspect.signature(type(compiled).forward) == inspect.signature(LlamaForCausalLM.forward)
    assert compiled.model is compiled.megatrain.model.model
    assert compiled.model.layers[1] is compiled.get_submodule("model.layers.1")
    assert compiled.lm_head.weight is next(p for n, p in compiled.named_parameters() if n == "lm_head.weight")
    assert list(map(id, compiled.parameters())) == list(map(id, compiled.megatrain.model.parameters()))


def test_the_models_own_attributes_come_before_ours():
    model = Plain()
    compiled = megatrain.compile(model, device="cpu")
    assert compiled.schedule == "cosine"
    compiled(torch.ones(2, 4))
    assert compiled.megatrain.schedule.num_slots
    assert compiled.model is model.model
    assert "3 ticks" not in str(compiled.program)
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'nothing'"):
        compiled.nothing  # noqa: B018


def test_attributes_written_on_either_reach_both():
    model = Plain()
    compiled = megatrain.compile(model, device="cpu")
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    compiled.scale = 3.0  # pyright: ignore[reportArgumentType]
    assert model.scale == 3.0
    assert torch.equal(compiled(x), model(x))
    model.extra = nn.Linear(4, 4)
    assert compiled.extra is model.extra
    del compiled.extra
    assert not hasattr(model, "extra")
    compiled.eval()
    assert not model.training
    assert not model.model.training
    compiled.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    handle = compiled.register_forward_hook(lambda _, __, result: result + 1)  # pyright: ignore[reportOperatorIssue]
    assert torch.equal(compiled(x), model(x))
    handle.remove()


def test_its_text_says_what_it_is():
    model = Plain()
    compiled = megatrain.compile(model, device="cpu", memory="1MiB")
    assert_expected_inline(
        str(compiled).partition("\n  (")[0],
        """\
compiled by megatrain for cpu, memory 1.00 MiB, fp32, activations auto
  nothing is captured yet: call the model once, or give compile(example_args=..., example_kwargs=...)
Plain(""",
    )
    assert str(compiled).endswith(f"\n{model!r}")
    compiled(torch.ones(2, 4))
    with torch.no_grad():
        compiled(torch.ones(3, 4))
    compiled.scale = 3.0  # pyright: ignore[reportArgumentType]
    compiled.megatrain.prepare(torch.ones(2, 4))
    assert_expected_inline(
        str(compiled).partition("\n  (")[0],
        """\
compiled by megatrain for cpu, memory 1.00 MiB, fp32, activations auto
  capture 1: Plain(x: f32[2, 4])
    1 block, 1 template; parameters 80 B, buffers 0 B; train: 1 slot, device 400 B, peak 304 B
  capture 2: Plain(x: f32[3, 4])
    1 block, 1 template; parameters 80 B, buffers 0 B; forward: 1 slot, device 272 B, peak 224 B
  capture 3: Plain(x: f32[2, 4]), of the latest call
    1 block, 1 template; parameters 80 B, buffers 0 B; train: 1 slot, device 400 B, peak 304 B
    because model.scale == 1.0 at test_compiled_module.py:49: `return self.model(x) * self.scale + shift`; now 3.0
Plain(""",
    )
    assert str(compiled).endswith(f"\n{model!r}")


def test_copies_and_pickles_are_those_of_the_plain_model():
    compiled = compiled_llama()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)
    file = io.BytesIO()
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: saved(model, file)):
        step({"input_ids": IDS, "labels": IDS})  # its updates are due
        other: Any = copied(compiled)
        assert type(other) is LlamaForCausalLM
        assert_same(values(other), values(compiled.megatrain.model))
        assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in compiled.parameters()}


def saved(model: Any, file: io.BytesIO) -> Any:
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# -- forward ------------------------------------------------------------------------------------------------------


def fused(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
    """What a trainer with a fused head puts in place of a model's forward."""
    hidden = self.base_model(input_ids).last_hidden_state
    logits = self.get_output_embeddings()(hidden)
    return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("is_bound", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_forward_that_a_tool_replaces_is_streamed(is_bound: bool):
    compiled, eager = compiled_llama(), llama()
    for model in (compiled, eager):
        before = values(model)
        model.forward = MethodType(fused, model) if is_bound else lambda *a, m=model, **k: fused(m, *a, **k)
        assert list(inspect.signature(model.forward).parameters)[: 1 + is_bound] == (
            ["input_ids", "labels"] if is_bound else ["a"]
        )
        assert_same(values(model), before)
    expected = eager(input_ids=IDS)
    expected["loss"].backward()
    assert streams(compiled, lambda: compiled(input_ids=IDS)["loss"].backward())
    assert streams(compiled, lambda: compiled.forward(input_ids=IDS))
    assert_same_state(compiled, eager)
    del compiled.forward
    del eager.forward
    assert torch.equal(compiled(input_ids=IDS).logits, eager(input_ids=IDS).logits)
    with pytest.raises(AttributeError, match="forward"):
        del compiled.forward


def test_a_former_forward_called_alone_is_refused():
    compiled = compiled_llama()
    former = compiled.forward
    compiled.forward = lambda *args, **kwargs: former(*args, **kwargs).logits
    with pytest.raises(ExecuteError, match="this `forward` of the compiled model was replaced by another"):
        former(input_ids=IDS)


def test_forward_beside_hooks_is_refused():
    compiled = compiled_llama()
    compiled.register_forward_hook(lambda *_: None)
    with pytest.raises(ExecuteError, match="`forward` was called on a compiled model that has forward hooks"):
        compiled.forward(input_ids=IDS)


# -- moves ----------------------------------------------------------------------------------------------------------


def test_moves_to_where_it_computes_change_nothing():
    compiled = compiled_llama()
    compiled(input_ids=IDS)
    places = [p.data_ptr() for p in compiled.parameters()]
    assert compiled.to("cpu") is compiled
    assert compiled.to(torch.float32).cpu().float() is compiled
    assert [p.data_ptr() for p in compiled.parameters()] == places


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda m: m.half(), "can't be converted from torch.float32 to torch.float16"),
        (lambda m: m.to("meta"), r"(?s)can't be moved to meta: it computes on cpu.*plan takes plain models on meta"),
        (lambda m: m.share_memory(), "can't be put into shared memory"),
    ],
    ids=["half", "meta", "shared"],
)
def test_moves_that_it_can_not_follow_are_refused(move: Any, message: str):
    compiled = compiled_llama()
    before = values(compiled)
    with pytest.raises(ExecuteError, match=message):
        move(compiled)
    assert_same(values(compiled), before)


def test_a_move_of_the_plain_model_says_who_moves_models():
    compiled = compiled_llama()
    compiled(input_ids=IDS)
    compiled.megatrain.model.to("meta")
    with pytest.raises(ExecuteError, match=r"(?s)became f32.* on meta.*Module\.to.*trainer"):
        compiled(input_ids=IDS)


# -- compilers ------------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_not_compiled_again():
    compiled = compiled_llama()
    with pytest.raises(OptionError, match="compiled already"):
        megatrain.compile(compiled)
    again = megatrain.compile(compiled.megatrain.model, device="cpu")
    assert torch.equal(again(input_ids=IDS).logits, compiled(input_ids=IDS).logits)


def test_torch_compile_over_a_compiled_model_leaves_it_alone():
    compiled = compiled_llama()
    over = torch.compile(compiled, backend="eager")
    assert streams(compiled, lambda: over(input_ids=IDS, labels=IDS).loss.backward())
    gradients = [p.grad.clone() for p in compiled.parameters()]
    eager = llama()
    eager(input_ids=IDS, labels=IDS).loss.backward()
    assert all(torch.equal(g, grad_of(p)) for g, p in zip(gradients, eager.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_model_of_inference_mode_is_refused_and_the_way_out_works(kind: str):
    model = nn.BatchNorm1d(4)
    with torch.inference_mode():
        if kind == "parameter":
            model.weight = nn.Parameter(torch.ones(4))
        else:
            model.running_mean = torch.zeros(4)
    name = "weight" if kind == "parameter" else "running_mean"
    with pytest.raises(OptionError, match=f"^{kind} `{name}` was made under torch.inference_mode"):
        megatrain.compile(model, device="cpu")
    copied, x = copy.deepcopy(model), torch.randn(3, 4)
    expected = copy.deepcopy(copied)(x)
    assert torch.equal(megatrain.compile(copied, device="cpu")(x), expected)


def test_a_compiled_model_inside_a_compiled_models_forward_is_refused():
    inner = megatrain.compile(Plain(), device="cpu")
    outer: Any = Plain()
    outer.forward = lambda x: inner(x) + 1
    with pytest.raises(ExecuteError, match="called in the forward of a compiled model"):
        megatrain.compile(outer, device="cpu")(torch.ones(2, 4))


class Slotted(nn.Linear):
    __slots__ = ("mine",)


def test_a_class_that_cannot_be_derived_from_is_refused_early():
    model = Slotted(3, 3)
    before = values(model)
    with pytest.raises(OptionError, match=r"(?s)a Slotted can't be compiled: .*a module of your own"):
        megatrain.compile(model, device="cpu", precision="bf16")
    assert_same(values(model), before)
    assert megatrain.compile(nn.Sequential(model), device="cpu")(torch.ones(2, 3)).shape == (2, 3)
