"""Bad input and failures: one specific error on the caller's thread, and an engine that goes on working."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same_state
from tests.models import Gpt
from tests.training.test_lifetimes import living

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def compiled_gpt(**options):
    torch.manual_seed(0)
    return megatrain.compile(Gpt(depth=2), **{"device": "cpu", "transfer": "copy", "activations": "offload", **options})


def test_parameter_without_values() -> None:
    with torch.device("meta"):
        model = Gpt()
    compiled = megatrain.compile(model, device="cpu", example_args=(IDS,))
    assert "W0@0" in str(compiled.schedule)
    with pytest.raises(ExecuteError, match=r"parameter `embed.weight` is on the meta device and has no values"):
        compiled(IDS)


def test_input_on_another_device() -> None:
    with pytest.raises(ExecuteError, match=r"input `ids` is on meta, the compute device is cpu"):
        compiled_gpt()(IDS.to("meta"))


def tokens(compiled) -> list[str]:
    """Every operation of the schedule as `stream:token`, each once."""
    schedule = compiled.prepare(IDS, targets=IDS).schedule
    return list(dict.fromkeys(f"{p.stream}:{op}" for p, op in schedule.positions()))


def test_a_failure_in_an_operation_surfaces_once_and_the_engine_recovers() -> None:
    compiled = compiled_gpt()
    eager = copy.deepcopy(compiled.megatrain.model)
    for number, token in enumerate(tokens(compiled)[::2]):
        compiled.megatrain.engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        with pytest.raises((ExecuteError, RuntimeError), match=token.split(":")[1]):
            compiled(IDS, targets=IDS)[1].backward()
        compiled.megatrain.engine.set_chaos(None)
        for call in (eager, compiled):
            call.zero_grad()
            torch.manual_seed(number)
            call(IDS, targets=IDS)[1].backward()
        assert_same_state(eager, compiled)


def test_nothing_leaks_over_twenty_failures_of_one_engine() -> None:
    compiled = compiled_gpt()
    compiled(IDS, targets=IDS)[1].backward()
    gc.collect()
    held, threads = compiled.megatrain.engine.meter.current, set(threading.enumerate())
    tensors, names = _num_tensors(), tokens(compiled)
    for number in range(20):
        compiled.megatrain.engine.set_chaos(Chaos(fail=names[number % len(names)], max_delay_s=0))
        with pytest.raises((ExecuteError, RuntimeError)):
            compiled(IDS, targets=IDS)[1].backward()
    compiled.megatrain.engine.set_chaos(None)
    gc.collect()
    assert compiled.megatrain.engine.meter.current == held
    assert not living(threads)
    assert _num_tensors() <= tensors + 2


def _num_tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_reentrant_call_is_refused() -> None:
    """A hook that runs inside the backward calls the model again."""

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            outer(torch.ones(2, 4))
            return gradient

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return Calls.apply(self.layer(x))

    outer = megatrain.compile(Outer(), device="cpu")
    with pytest.raises(ExecuteError, match="the model was called while it runs"):
        outer(torch.ones(2, 4)).sum().backward()
    outer(torch.ones(2, 4))


def test_state_that_turns_into_another_dtype_is_taken_in() -> None:
    compiled = compiled_gpt()
    compiled(IDS)
    compiled.megatrain.model.double()
    eager = copy.deepcopy(compiled.megatrain.model)
    results = []
    for model in (eager, compiled):
        torch.manual_seed(0)
        logits, _ = model(IDS)
        logits.sum().backward()
        results.append(logits)
    assert results[0].dtype == torch.float64
    assert torch.equal(*results)
    assert_same_state(eager, compiled)
