"""Programs, run block by block, leave behind what eager PyTorch leaves behind, bit for bit."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject
from torch import nn

import tests.models  # pyright: ignore[reportUnusedImport]
from megatrain.passes.interpret import Code
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program, template_text
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from tests import captures
from tests.comparing import assert_same
from tests.draws import draws
from tests.models import MODELS
from tests.strategies import WIDTH, block_limits, module_trees
from tests.tracer.parity import SEED, Step, assert_same_step, eager_step, program_step

TELLING = {
    "gpt_loss": None, "cnn": 1, "torch_encoder_padded": 10**9, "lstm": None, "llama_padded": None,
    "block_called_twice": 1, "shared_parameter": 1, "unet": None, "lengths_read": None, "custom_function": 1,
    "ema_buffer": 10**9, "aliased_inplace": None, "parameter_view": 1, "no_grad_region": 10**9, "autocast_region": 1,
    "nested_outputs": None, "hidden_collected": 1, "returns_everything": None, "views": 1, "checkpointed": None,
    "random_path": 1, "mixture_of_experts": 1, "spectral_norm": None,
}  # fmt: skip
"""For each model blocks at its own modules, a block for each call and row (or nearly), or one of all."""
NIGHTLY = [(name, limit) for name in MODELS for limit in (None, 500, 10**9) if TELLING.get(name, 0) != limit]


@pytest.mark.parametrize(
    ("name", "limit"), [*TELLING.items(), *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_blocks_one_after_the_other_equal_eager(name: str, limit: int | None):
    model, args, kwargs = MODELS[name]()
    traced = captures.traced(name)
    program = lower(traced, block_bytes=limit)
    assert_same_step(program_step(traced, program, model, args, kwargs), eager_step(*MODELS[name]()))


@given(model=module_trees(), limit=block_limits())
@draws(60)
def test_random_module_trees_equal_eager(model: nn.Module, limit: int | None):
    args = (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)),)
    eager = _eager_or_reject(copy.deepcopy(model), args)
    torch.manual_seed(SEED)  # a capture holds for the numbers that the model read of what it drew
    traced = trace(model, args)
    program = lower(traced, block_bytes=limit)
    assert_same_step(program_step(traced, program, model, args, {}), eager)


def _eager_or_reject(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Step:
    try:
        return eager_step(model, args, {})
    except RuntimeError as error:
        # Two in-place calls in a row may overwrite what the first one needs for its backward.
        if "modified by an inplace operation" in str(error):
            reject()
        raise


def _arguments(program: Program, template_name: str) -> list[torch.Tensor]:
    """Random tensors for the ports of a template; small integers, which index anything."""
    template = program.templates[template_name]
    generator = torch.Generator().manual_seed(3)

    def of_spec(spec: TensorSpec) -> torch.Tensor:
        if not spec.dtype.is_floating_point:
            values = torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)
        else:
            values = torch.rand(spec.shape, generator=generator).to(spec.dtype)
        if spec.stride is None:
            return values
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(values)

    return [of_spec(port.spec) for port in (*template.inputs, *template.state)]


@pytest.mark.parametrize(
    "name",
    [
        name if name in TELLING else pytest.param(name, marks=pytest.mark.nightly)
        for name in MODELS
        if name != "lengths_read"
    ],
)
def test_the_text_of_a_template_is_python_that_computes_the_same(name: str):
    program = captures.program(name)
    scope: dict[str, Any] = {"torch": torch, "F": F, "operator": operator, "tests": tests}
    for template in program.templates.values():
        exec(template_text(template), scope)
        inputs = _arguments(program, template.name)
        count = len(template.inputs)
        by_name = {p.name: t for p, t in zip(template.state, inputs[count:], strict=True)}
        torch.manual_seed(0)
        expected = Code(template.graph)([t.clone() for t in inputs])
        torch.manual_seed(0)
        found = scope[template.name](*(t.clone() for t in inputs[:count]), **by_name)
        results = (found,) if len(template.outputs) == 1 else found
        assert_same(list(expected), list(results), template.name)
