"""What an optimizer will keep, found out before it has it, is what it then keeps."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.errors import OptimizerError, OptionError
from megatrain.optim.impostor import step_code
from megatrain.optim.made_over import OPTIMIZER, made_over
from megatrain.optim.masters.halves import SplitMaster
from megatrain.optim.need import Updated, optimizer_need
from megatrain.optim.per_parameter import register
from megatrain.tracer.spec import TensorSpec
from tests.tiers import diagonal

SHAPES = ((96, 110), (96,), (3, 4, 5), ())
MATRICES = ((40, 11), (11, 12))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("AdamW", "Adam", "SGD", "Adafactor", "RAdam", "NAdam", "Adagrad", "RMSprop")},
    **{name: (name, {}) for name in ("Adadelta", "Adamax", "ASGD", "Rprop", "Muon")},
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "RMSprop, centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, amsgrad": ("AdamW", {"amsgrad": True}),
    "AdamW, rate in a tensor": ("AdamW", {"lr": torch.tensor(1e-3)}),
}


def parameters_of(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def alone(parameters: list[nn.Parameter]) -> list[list[Updated]]:
    return [[Updated(p, TensorSpec.of(p))] for p in parameters]


def kept(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                found[name] = found.get(name, 0) + value.untyped_storage().nbytes()
    return found


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("case", "dtype"), diagonal(CASES, [torch.float32, torch.bfloat16]))
def test_every_optimizer_of_torch_keeps_what_was_found(case: str, dtype: torch.dtype):
    name, options = CASES[case]
    parameters = parameters_of(MATRICES if name == "Muon" else SHAPES, dtype)
    optimizer = getattr(torch.optim, name)(parameters, **options)
    before, generator = kept(optimizer), torch.get_rng_state()
    need = optimizer_need(optimizer, alone(parameters))
    assert kept(optimizer) == before, "the optimizer is left as it was"
    assert torch.equal(torch.get_rng_state(), generator)
    step(optimizer, parameters)
    step(optimizer, parameters)
    assert dict(need.state) == kept(optimizer)
    assert not need.is_estimate
    again = optimizer_need(optimizer, alone(parameters))
    assert (again.state, again.is_estimate) == (need.state, False), "state that exists"


def test_an_optimizer_that_branches_on_values_keeps_what_was_found():
    transformers = pytest.importorskip("transformers")
    parameters = parameters_of(SHAPES)
    optimizer = transformers.optimization.Adafactor(parameters)
    need = optimizer_need(optimizer, alone(parameters))
    step(optimizer, parameters)
    assert dict(need.state) == kept(optimizer)


def test_groups_options_and_layouts_count_by_parameter():
    parameters = [nn.Parameter(torch.randn(8, 6).t()), nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}])
    need = optimizer_need(optimizer, [[Updated(p, TensorSpec.of(p)) for p in parameters]])
    assert dict(need.state) == {"momentum_buffer": 192}


def test_parameters_of_others_are_passed_over_and_state_of_others_counts():
    mine, other, untrained = parameters_of(((4,), (5,), (6,)))
    optimizer = torch.optim.Adagrad([mine, untrained])
    need = optimizer_need(optimizer, alone([mine, other]))
    assert dict(need.state) == {"step": 8, "sum": 40}


def test_state_counts_as_it_is_also_where_the_step_would_make_another():
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.AdamW([parameter])
    halves = {"exp_avg": torch.zeros(10, dtype=torch.bfloat16), "exp_avg_sq": torch.zeros(10, dtype=torch.bfloat16)}
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **halves}
    assert dict(optimizer_need(optimizer, alone([parameter])).state) == {"step": 4, "exp_avg": 20, "exp_avg_sq": 20}


def test_scratch_is_what_the_update_of_the_largest_block_drops():
    small, large = parameters_of(((100,), (1000,)))
    alone_at_a_time = optimizer_need(torch.optim.AdamW([small, large]), alone([small, large]))
    assert alone_at_a_time.scratch_bytes == 2 * 4000
    assert optimizer_need(torch.optim.AdamW([small, large], fused=True), alone([small, large])).scratch_bytes == 0
    together = [[Updated(p, TensorSpec.of(p)) for p in (small, large)]]
    foreach = optimizer_need(torch.optim.AdamW([small, large], foreach=True), together)
    assert foreach.scratch_bytes == 4400


def test_halves_are_joined_unless_the_update_is_one_pass():
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    blocks = [[Updated(parameter, TensorSpec((1000,), torch.float32), SplitMaster)]]
    one_pass = optimizer_need(torch.optim.AdamW([parameter]), blocks)
    assert (one_pass.scratch_bytes, one_pass.state["exp_avg"]) == (0, 4000)
    by_code = optimizer_need(torch.optim.AdamW([parameter], amsgrad=True), blocks)
    assert by_code.scratch_bytes == 2 * 4000 + 8000
    assert optimizer_need(torch.optim.SGD([parameter]), blocks).scratch_bytes == 8000


@pytest.mark.parametrize("reason", [None, "no compiler"])
def test_what_is_kept_to_undo_an_update_counts_where_one_may_fail(reason: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatrain.optim.fast.adamw.native_reason", lambda: reason)
    narrow = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    halves = [[Updated(narrow, TensorSpec((1000,), torch.float32), SplitMaster)]]
    in_one_pass = optimizer_need(torch.optim.AdamW([narrow]), halves, undoes=True, scales=True)
    assert in_one_pass.scratch_bytes == (0 if reason is None else 4000 + 8004)
    wide = nn.Parameter(torch.zeros(1000))
    fused = optimizer_need(torch.optim.AdamW([wide], fused=True), alone([wide]), undoes=True, scales=True)
    assert fused.scratch_bytes == in_one_pass.scratch_bytes
    by_code = torch.optim.AdamW([wide])
    assert optimizer_need(by_code, alone([wide])).scratch_bytes == 8000
    assert optimizer_need(by_code, alone([wide]), scales=True).scratch_bytes == 8000 + 4000
    assert optimizer_need(by_code, alone([wide]), undoes=True).scratch_bytes == 8000 + 4000 + 8004


@register
class OverMemory(torch.optim.Optimizer):
    """Hands addresses to code of C, as fused kernels of other libraries do."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                state["mean"], state["count"] = torch.zeros_like(parameter), torch.zeros(())
            ctypes.memset(state["mean"].data_ptr(), 1, state["mean"].nbytes)


def test_code_that_needs_memory_is_tried_on_corners_and_says_so():
    parameters = parameters_of(SHAPES, torch.bfloat16)
    optimizer = OverMemory(parameters)
    need = optimizer_need(optimizer, alone(parameters))
    assert need.is_estimate
    step(optimizer, parameters)
    assert dict(need.state) == kept(optimizer)


def test_code_that_takes_only_sparse_gradients_is_tried_on_those():
    parameter = nn.Parameter(torch.zeros(30, 5))
    need = optimizer_need(torch.optim.SparseAdam([parameter]), alone([parameter]))
    assert {name: need.state[name] for name in ("exp_avg", "exp_avg_sq")} == {"exp_avg": 600, "exp_avg_sq": 600}


@register
class Counting(torch.optim.Optimizer):
    """Keeps a count that belongs to no parameter."""

    def __init__(self, params: Any):
        super().__init__(params, {})
        self.counts: Any = self.state  # torch types its keys as tensors
        self.counts["all"] = {"count": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["all"]["count"] += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)


def test_state_that_belongs_to_no_parameter_is_there_and_stays_as_it_is():
    parameters = parameters_of(SHAPES)
    optimizer = Counting(parameters)
    need = optimizer_need(optimizer, alone(parameters))
    assert not need.is_estimate
    assert optimizer.counts["all"]["count"] == 0
    step(optimizer, parameters)
    assert dict(need.state) == kept(optimizer)


def test_code_that_may_do_anything_is_not_run():
    class Any(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise AssertionError("run")

    parameters = parameters_of(((30,), (5, 4)))
    optimizer = Any(parameters)
    optimizer.state[parameters[0]] = {"mean": torch.zeros(30)}
    need = optimizer_need(optimizer, alone(parameters), undoes=True)
    assert need.is_estimate
    assert dict(need.state) == {"mean": 120, "state": 160}
    assert need.undo_bytes == 200 + 280
    assert need.scratch_bytes == need.undo_bytes + 200 + 2 * 120


def test_code_that_runs_on_nothing_is_refused():
    @register
    class Broken(OverMemory):
        def step(self, closure: Any = None) -> None:
            raise KeyError("no such device")

    (parameter,) = parameters_of(((3,),))
    with pytest.raises(OptimizerError, match=r"the state of Broken can't be found out.*no such device") as caught:
        optimizer_need(Broken([parameter]), alone([parameter]))
    assert "existing state is counted as it is" in str(caught.value)


def test_what_needs_all_parameters_at_once_is_refused():
    (parameter,) = parameters_of(((3,),))
    with pytest.raises(OptimizerError, match="LBFGS can't update in a training step"):
        optimizer_need(torch.optim.LBFGS([parameter]), alone([parameter]))


def test_a_class_is_made_over_parameters_without_memory():
    specs = {"a": TensorSpec((1 << 20, 1 << 20), torch.float32), "b": TensorSpec((3,), torch.bfloat16)}
    optimizer, parameters = made_over("Adagrad", specs)
    assert step_code(type(optimizer)) is step_code(torch.optim.Adagrad)
    need = optimizer_need(optimizer, [[Updated(parameters[key], spec)] for key, spec in specs.items()])
    assert dict(need.state) == {"step": 8, "sum": 4 * (1 << 40) + 6}


def test_what_is_no_optimizer_or_takes_other_parameters_is_refused():
    for unknown in ("Adamw", "Optimizers", nn.Linear, 3):
        with pytest.raises(OptionError, match=r"optimizer=.* is not known"):
            OPTIMIZER.check("optimizer", unknown)
    with pytest.raises(OptionError, match="optimizer=Muon can't be made over all trained parameters"):
        made_over("Muon", {"a": TensorSpec((3,), torch.float32)})
