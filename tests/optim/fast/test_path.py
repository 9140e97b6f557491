"""Fast paths are found by optimizer and group, make their state, and refuse what isn't theirs before they write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatrain.errors import OptimizerError, OptionError
from megatrain.hardware.work import UPDATE_TRAFFIC
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast import FastPath, NativeKernel, ParameterUpdate, fast_path, register, unregister
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.impostor import Optimizer
from megatrain.optim.masters.halves import CHUNK, Master, RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.optim.need import Updated, optimizer_need
from megatrain.optim.updates import Updates
from megatrain.planning.host_plan import MASTER_OF
from megatrain.tracer.spec import TensorSpec


class Descent(FastPath):
    """SGD with a momentum, so that there is one tensor of state."""

    moments = ("momentum_buffer",)
    fails = False

    def matches(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        return type(optimizer) is torch.optim.SGD and group["momentum"] != 0

    def update(self, given: ParameterUpdate) -> None:
        for place, (values, gradient, (buffer,)) in enumerate(given.pieces()):
            if self.fails and place:
                raise MemoryError("in the second piece")
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


def test_a_class_is_no_path():
    for function in (register, unregister):
        with pytest.raises(OptionError, match="path is an object of a subclass of FastPath"):
            function(Descent)  # pyright: ignore[reportArgumentType]


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


def test_a_piece_that_fails_is_not_taken_over(descent: Descent):
    size = CHUNK * torch.get_num_threads()
    parameter = torch.nn.Parameter(torch.zeros(2 * size))
    parameter.grad = torch.ones_like(parameter)
    optimizer = sgd(parameter)
    descent.fails = True
    step = MasterStep({parameter: WholeMaster(parameter.detach())})
    assert not step.cannot_fail(optimizer, [parameter])
    with pytest.raises(MemoryError):
        step(optimizer)
    assert (parameter[:size] != 0).all()
    assert (parameter[size:] == 0).all()


def test_an_update_that_fails_is_put_back_and_taken_again(descent: Descent):
    size = CHUNK * torch.get_num_threads()
    parameter = torch.nn.Parameter(torch.zeros(2 * size))
    optimizer = sgd(parameter)
    masters: dict[torch.Tensor, Master] = {parameter: WholeMaster(parameter.detach())}
    updates = Updates([optimizer], [[parameter]], masters=masters, names={parameter: "weight"})
    updates.receive(parameter, torch.ones(2 * size))
    updates.begin()
    descent.fails = True
    with pytest.raises(MemoryError):
        updates.update(0)
    assert torch.equal(parameter, torch.zeros(2 * size))
    assert parameter not in optimizer.state
    descent.fails = False
    updates.finish()
    assert torch.equal(parameter, torch.full((2 * size,), -0.1))


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


def test_options_that_can_not_be_read_fail_before_anything_is_written():
    groups = [[torch.nn.Parameter(torch.ones(3))] for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    optimizer.param_groups[1]["betas"] = (0.9,)
    for (p,) in groups:
        p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="unpack"):
        MasterStep({p: WholeMaster(p.detach()) for (p,) in groups})(optimizer)
    assert torch.equal(groups[0][0], torch.ones(3))


def test_the_need_of_an_optimizer_is_that_of_its_path(descent: Descent):
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    blocks = [[Updated(parameter, TensorSpec((1000,), torch.float32), SplitMaster)]]
    need = optimizer_need(sgd(parameter), blocks, undoes=True)
    assert dict(need.state) == {"momentum_buffer": 4000}
    assert need.scratch_bytes == 4000 + 4000, "what an update that isn't sure to end writes is copied"
    descent.is_sure = lambda master, gradient: True
    assert optimizer_need(sgd(parameter), blocks, undoes=True).scratch_bytes == 0


def test_traffic_counts_each_byte_that_is_read_or_written():
    adamw = AdamWInOnePass()
    for kind, master in MASTER_OF.items():
        assert adamw.traffic(master) == UPDATE_TRAFFIC[kind]
    assert adamw.traffic(SplitMaster) * 2 == 26
    assert adamw.traffic(RoundedMaster) * 2 == 22
    assert Descent().traffic(WholeMaster) == 5


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
