"""Fast paths of updates, and the memory that an optimizer will keep, found out before it has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.errors import OptimizerError, OptionError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast import FastPath, NativeKernel, ParameterUpdate, fast_path, register, unregister
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.masters.halves import CHUNK, RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.optim.need import OPTIMIZER, Updated, made_over, optimizer_need
from megatrain.optim.proxy import Optimizer, step_code
from megatrain.tracer.spec import TensorSpec


class Descent(FastPath):
    """SGD with a momentum, so that there is one tensor of state."""

    moments = ("momentum_buffer",)

    def matches(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        return type(optimizer) is torch.optim.SGD and group["momentum"] != 0

    def update(self, given: ParameterUpdate) -> None:
        for values, gradient, (buffer,) in given.pieces():
            buffer.mul_(given.options["momentum"]).add_(gradient)
            values.add_(buffer, alpha=-given.options["lr"])


@pytest.fixture
def descent() -> Iterator[Descent]:
    path = Descent()
    register(path)
    yield path
    unregister(path)


def sgd(*parameters: torch.Tensor, momentum: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def test_a_path_is_found_by_class_and_options(descent: Descent):
    parameter = torch.nn.Parameter(torch.ones(1))
    for optimizer, expected in ((sgd(parameter), descent), (sgd(parameter, momentum=0.0), None)):
        assert fast_path(optimizer, optimizer.param_groups[0]) is expected
    for function in (register, unregister):
        with pytest.raises(OptionError, match="path is an object of a subclass of FastPath"):
            function(Descent)  # pyright: ignore[reportArgumentType]


def test_adamw_takes_fp32_parameters_only_where_fused_is_asked_for():
    options: Any
    for options, narrow, wide in (
        ({}, True, False),
        ({"fused": True}, True, True),
        ({"amsgrad": True}, False, False),
        ({"capturable": True}, False, False),
    ):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **options)
        (group,) = optimizer.param_groups
        found = [isinstance(fast_path(optimizer, group, is_whole=w), AdamWInOnePass) for w in (False, True)]
        assert found == [narrow, wide]
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    assert fast_path(adam, adam.param_groups[0]) is None


def test_the_latest_path_comes_first_and_each_is_registered_once(descent: Descent):
    optimizer = sgd(torch.nn.Parameter(torch.ones(1)))
    later = Descent()
    register(later)
    try:
        assert fast_path(optimizer, optimizer.param_groups[0]) is later
        with pytest.raises(OptimizerError, match="Descent is registered already"):
            register(later)
    finally:
        unregister(later)
    assert fast_path(optimizer, optimizer.param_groups[0]) is descent
    with pytest.raises(OptimizerError, match="Descent is not registered"):
        unregister(later)


@pytest.mark.parametrize("kind", [WholeMaster, SplitMaster, RoundedMaster])
def test_pieces_join_to_the_whole_parameter_and_change_all_of_it(kind: type, descent: Descent):
    numel = 2 * CHUNK * torch.get_num_threads() + 37
    start, gradient = torch.randn(numel).bfloat16().float(), torch.randn(numel)
    made = {
        WholeMaster: lambda: WholeMaster(start.clone()),
        SplitMaster: lambda: SplitMaster.of(start),
        RoundedMaster: lambda: RoundedMaster(start.bfloat16(), torch.Generator().manual_seed(0)),
    }
    master, buffer = made[kind](), torch.zeros(numel)
    options = {"momentum": 0.5, "lr": 0.1}
    descent.update(ParameterUpdate(master, gradient, (buffer,), (), options, scale=0.25))
    expected = start.add(gradient.mul(0.25), alpha=-0.1)
    found = read_(torch.empty(numel), master)
    assert torch.equal(buffer, gradient.mul(0.25))
    if kind is RoundedMaster:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, expected)


def test_state_that_is_not_the_paths_is_refused_before_anything_is_written(descent: Descent):
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = sgd(first, second)
    step = MasterStep({p: WholeMaster(p.detach()) for p in (first, second)})
    for p in (first, second):
        p.grad = torch.ones(3)
    for state, message in (
        ({"other": 1}, "has no tensor `momentum_buffer`"),
        ({"momentum_buffer": None}, "has no tensor `momentum_buffer`"),
        ({"momentum_buffer": torch.zeros(3, dtype=torch.float64)}, "moments of a"),
        ({"momentum_buffer": torch.zeros(4)}, r"`momentum_buffer` of a \(3,\) parameter is \(4,\)"),
    ):
        optimizer.state[second] = dict(state)
        with pytest.raises(OptimizerError, match=message):
            step(optimizer)
        assert first not in optimizer.state
        assert torch.equal(first, torch.ones(3))


def test_a_kernel_of_c_is_called_by_its_signature(tmp_path):
    source = tmp_path / "scale.c"
    source.write_text(
        "#include <stdint.h>\n"
        "void scale(float *values, const float *factors, int which, int64_t n) {\n"
        "    for (int64_t i = 0; i < n; i++) values[i] *= factors[which];\n}\n"
    )
    kernel = NativeKernel(source, "scale", ("tensor", "floats", "int32", "int64"))
    if kernel.fault() is not None:
        pytest.skip(str(kernel.fault()))
    values = torch.arange(5.0)
    kernel(values, (2.0, 3.0), 1, 4)
    assert values.tolist() == [0, 3, 6, 9, 4]


SHAPES = ((96, 110), (96,), (3, 4, 5), ())
MATRICES = ((40, 11), (11, 12))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in "AdamW Adam SGD Adafactor RAdam NAdam Adagrad RMSprop Adadelta Adamax ASGD Rprop".split()),
    ("Muon", {}),
    ("SGD", {"momentum": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"lr": torch.tensor(1e-3)}),
]


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


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_optimizer_of_torch_keeps_what_was_found(name: str, options: dict[str, Any]):
    dtype = torch.bfloat16 if options.get("fused") or name == "SGD" else torch.float32
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


def test_scratch_is_what_the_update_of_the_largest_block_drops():
    small, large = parameters_of(((100,), (1000,)))
    alone_at_a_time = optimizer_need(torch.optim.AdamW([small, large]), alone([small, large]))
    assert alone_at_a_time.scratch_bytes == 2 * 4000
    assert optimizer_need(torch.optim.AdamW([small, large], fused=True), alone([small, large])).scratch_bytes == 0
    together = [[Updated(p, TensorSpec.of(p)) for p in (small, large)]]
    foreach = optimizer_need(torch.optim.AdamW([small, large], foreach=True), together)
    assert foreach.scratch_bytes == 4400


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
