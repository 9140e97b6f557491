"""A fast path that a user writes: Lion has the bits of its own code in eager PyTorch, in fp32 and with bf16 masters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.optim.fast import FastPath, ParameterUpdate, register, unregister
from tests.comparing import assert_same, assert_same_bits
from tests.optim.reference import Reference

PAGE = (Path(__file__).parents[2] / "docs" / "fast_paths.md").read_text()
OPTIMIZER, PATH, USE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675): steps by the sign of an average of gradients."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    lion_(parameter, parameter.grad, state["exp_avg"], group)


def lion_(values, gradient, mean, group):
    (beta1, beta2), lr = group["betas"], group["lr"]
    values.mul_(1 - lr * group["weight_decay"])
    values.add_(mean.lerp(gradient, 1 - beta1).sign_(), alpha=-lr)
    mean.lerp_(gradient, 1 - beta2)


class LionInOnePass(FastPath):
    moments = ("exp_avg",)

    def matches(self, optimizer, group):
        return type(optimizer) is Lion

    def update(self, given):
        for values, gradient, (mean,) in given.pieces():
            lion_(values, gradient, mean, given.options)


class Counted(LionInOnePass):
    def __init__(self):
        self.count = 0

    def update(self, given: ParameterUpdate) -> None:
        self.count += 1
        super().update(given)


@pytest.fixture
def path() -> Iterator[Counted]:
    counted = Counted()
    register(counted)
    yield counted
    unregister(counted)


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.GELU()) for _ in range(4))
    return torch.nn.Sequential(*blocks)


def lion(parameters: Any) -> Lion:
    return Lion(parameters, lr=1e-3, weight_decay=0.1)


def loss_of(result: torch.Tensor, _: Any = None) -> torch.Tensor:
    return result.float().square().mean()


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 48, generator=torch.Generator().manual_seed(1)))


def state_of(optimizer: torch.optim.Optimizer) -> list[Mapping[str, torch.Tensor]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def test_fp32_training_has_the_bits_of_eager_lion(path: Counted):
    eager, max_norm = build(), 1e-4
    expected = lion(eager.parameters())
    compiled = megatrain.compile(build(), device="cpu")
    optimizer = lion(compiled.parameters())
    step = megatrain.TrainStep(compiled, optimizer, loss=loss_of, max_grad_norm=max_norm)
    for batch in batches(6):
        expected.zero_grad()
        loss = loss_of(eager(batch))
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(eager.parameters(), max_norm) > max_norm
        expected.step()
        assert_same_bits(loss.detach(), step(batch).detach(), "loss")
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert_same_bits(one, other, name)
    assert_same(state_of(expected), state_of(optimizer), "optimizer")
    assert path.count == 6 * 8, "each update of each parameter took the fast path"


def test_bf16_training_has_the_bits_of_eager_lion_over_fp32_masters(path: Counted):
    reference = Reference(build(), lion)
    compiled = megatrain.compile(build(), device="cpu", precision="bf16")
    optimizer = lion(compiled.parameters())
    step = megatrain.TrainStep(compiled, optimizer, loss=loss_of)
    for batch in batches(6):
        expected = reference.step((batch,), {})
        assert float(step(batch)) == expected
    for name, source in compiled.master_state_dict().items():
        found = torch.cat([piece.flatten().clone() for piece in source.pieces()])
        assert_same_bits(reference.masters[name].flatten(), found, name)
    assert_same(state_of(reference.optimizer), state_of(optimizer), "optimizer")
    assert path.count == 6 * 8


def test_the_same_training_goes_on_with_the_same_bits_when_the_path_is_unregistered():
    def run(after: Callable[[int], None]) -> tuple[list[float], list[torch.Tensor]]:
        compiled = megatrain.compile(build(), device="cpu", precision="bf16")
        step = megatrain.TrainStep(compiled, lion(compiled.parameters()), loss=loss_of)
        losses: list[float] = []
        for index, batch in enumerate(batches(6)):
            losses.append(float(step(batch)))
            after(index)
        pieces = [piece.clone() for source in compiled.master_state_dict().values() for piece in source.pieces()]
        return losses, pieces

    counted = Counted()
    register(counted)
    mixed = run(lambda index: unregister(counted) if index == 2 else None)
    assert counted.count == 3 * 8, "no update since it was unregistered"
    plain = run(lambda index: None)
    assert mixed[0] == plain[0]
    for one, other in zip(plain[1], mixed[1], strict=True):
        assert_same_bits(one, other, "master")
    assert counted.count == 3 * 8


def test_a_plan_asks_the_path_what_it_keeps(path: Counted):
    model = build()
    plan = megatrain.plan(
        model, *batches(1), device_memory="1GiB", optimizer=lion(model.parameters()), precision="bf16"
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert plan.host.bytes_of("Lion.exp_avg") == 4 * num_parameters
    assert path.count == 0, "nothing is updated"


def test_the_code_of_the_page_is_the_code_that_is_tested():
    assert OPTIMIZER.strip().endswith("\n\n\n".join(inspect.getsource(part).strip() for part in (Lion, lion_)))
    assert PATH.strip().endswith(inspect.getsource(LionInOnePass).strip())


def test_the_page_runs():
    found: dict[str, Any] = {}
    exec(compile(OPTIMIZER + PATH, "fast_paths.md", "exec"), found)
    updated: list[tuple[int, ...]] = []
    update = found["LionInOnePass"].update

    def counting(self: Any, given: ParameterUpdate) -> None:
        updated.append(tuple(given.master.shape))
        update(self, given)

    found["LionInOnePass"].update = counting
    exec(compile(USE, "fast_paths.md", "exec"), found)
    assert updated.count((64, 64)) == updated.count((64,)) == 3 * 4
    with pytest.raises(megatrain.OptimizerError, match="is not registered"):
        unregister(found["path"])
