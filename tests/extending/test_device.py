"""A kind of device that a user writes: a toy in host memory, whose transfers run as late as the waits allow.

Its code is that of docs/extending.md. Nothing here reaches into the library but through `megatrain.device`.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Accelerator, Cpu, Device, find, register, unregister
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same
from tests.models import MODELS
from tests.runtime.parity import train
from tests.training.parity import MODES, TASKS, SideBySide, adamw

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
SECTION = PAGE.split("\n## A kind of device\n")[1].split("\n## ")[0]
CODE, _ = re.findall(r"^```python\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
PARTS: dict[str, Any] = {"__name__": "toy"}
exec(compile(CODE, "extending.md", "exec"), PARTS)
Toy, LateStream, PromptStream = PARTS["Toy"], PARTS["LateStream"], PARTS["PromptStream"]


@pytest.fixture
def named() -> Iterator[None]:
    register("toy", Toy)
    yield
    unregister("toy")


@pytest.mark.parametrize(("name", "chaos"), [("cnn", None), ("tied_blocks", None), ("gpt_loss", Chaos(0))])
def test_calls_on_the_toy_have_the_bits_of_eager(name: str, chaos: Chaos | None):
    model, args, kwargs = MODELS[name]()
    toy, eager = Toy(), copy.deepcopy(model)
    compiled = megatrain.compile(model, device=toy, activations="offload", chaos=chaos)
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
    assert toy.copied_bytes >= 2 * 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert toy.locked_bytes >= sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("mode", "name", "micro_batches"), [("overlap", "gpt", 1), ("deferred", "stack", 3)])
def test_training_steps_on_the_toy_have_the_bits_of_eager(mode: str, name: str, micro_batches: int):
    toy, task = Toy(), TASKS[name]
    model, eager = task.build(), task.build()
    compiled = megatrain.compile(model, device=toy, activations="offload")
    own, clip = adamw(model), MODES[mode].get("max_grad_norm")
    step = megatrain.TrainStep(compiled, own, loss=task.loss, **MODES[mode])
    sides = SideBySide(eager, model, compiled, [adamw(eager)], [own], step, task.loss, clip)
    for seed in range(4):
        before = toy.copied_bytes
        sides.take([task.batch(10 * seed + number, 2) for number in range(micro_batches)], seed=seed)
        planned = step.schedule.h2d_bytes + step.schedule.d2h_bytes
        # The schedule counts the gaps behind tensors that don't end at a multiple of 64 bytes; only `stack` has such.
        assert planned == toy.copied_bytes - before if name == "gpt" else 0 < toy.copied_bytes - before < planned
    sides.assert_same()


class Careless(PromptStream):
    """Doesn't wait for the transfers."""

    def wait_event(self, event: Any) -> None:
        pass


def test_a_toy_that_forgets_to_wait_computes_something_else():
    model, args, kwargs = MODELS["gpt_loss"]()
    toy, eager = Toy(), copy.deepcopy(model)
    toy.compute = Careless()
    compiled = megatrain.compile(model, device=toy)
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))


def test_the_budget_is_what_the_device_has():
    model, args, kwargs = MODELS["gpt_loss"]()
    small = megatrain.compile(copy.deepcopy(model), device=Toy(capacity=75_000))
    large = megatrain.compile(model, device=Toy())
    for compiled in (small, large):
        compiled(*args, **kwargs)[1].backward()
    assert small.schedule.device_bytes <= 0.9 * 75_000 < large.schedule.device_bytes


def test_memory_that_the_device_lacks_is_its_own_error_and_the_next_call_runs():
    model, args, kwargs = MODELS["gpt_loss"]()
    toy = Toy()
    compiled = megatrain.compile(model, device=toy, memory="1GiB", example_args=args, example_kwargs=kwargs)
    toy.capacity = 1000
    with pytest.raises(torch.OutOfMemoryError, match="the toy has 1000 B"):
        compiled(*args, **kwargs)
    toy.capacity, eager = 1 << 30, copy.deepcopy(model)
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))


def test_all_that_was_locked_is_unlocked_when_the_model_goes():
    model, args, kwargs = MODELS["tied_blocks"]()
    toy = Toy()
    compiled = megatrain.compile(model, device=toy, activations="offload")
    compiled(*args, **kwargs).sum().backward()
    assert toy.locked_bytes
    del compiled, model
    gc.collect()
    assert toy.locked_bytes == 0


@pytest.mark.usefixtures("named")
def test_a_registered_kind_is_known_by_its_name():
    assert type(find("toy")) is type(find("toy:1")) is Toy
    compiled = megatrain.compile(nn.Linear(3, 3), device="toy")
    assert str(compiled.megatrain).startswith("compiled by megatrain for toy, memory what is free")
    assert megatrain.trace(nn.Linear(3, 3), (torch.ones(2, 3),), device="toy").device == torch.device("cpu")
    assert compiled(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(megatrain.OptionError, match='the kind of device "toy" is registered already'):
        register("toy", Toy)
    for wrong in ("toy:one", "toys"):
        with pytest.raises(megatrain.OptionError, match=f"^device='{wrong}' is not a device"):
            megatrain.compile(nn.Linear(3, 3), device=wrong)
    kind: Any
    for kind in ("", "toy:1", 3, None):
        with pytest.raises(
            megatrain.OptionError, match=r"^kind(=| ).*(can't name a kind of device|is not text|is None)"
        ):
            register(kind, Toy)
    toy = Toy()
    assert find(toy) is toy
    assert (repr(toy), str(find("cpu:0")), str(find(torch.device("xpu", 3)))) == ("<Toy toy>", "cpu", "xpu:3")


def test_a_kind_of_torch_may_have_another_class():
    class Mine(Cpu):
        pass

    with pytest.raises(megatrain.OptionError, match='the kind of device "cpu" is not registered'):
        unregister("cpu")
    register("xpu", lambda index: Accelerator("xpu", index))  # of torch's own kinds: it still has to be there
    with pytest.raises(megatrain.OptionError, match=r"^device='xpu' is not available here"):
        megatrain.compile(nn.Linear(3, 3), device="xpu")
    unregister("xpu")
    register("cpu", Mine)
    assert type(find("cpu")) is Mine
    unregister("cpu")
    assert type(find("cpu")) is Cpu


def test_weights_can_be_bound_only_where_the_device_says_so():
    with pytest.raises(megatrain.OptionError, match=r'transfer="bind" needs .*, but it is toy'):
        megatrain.compile(nn.Linear(3, 3), device=Toy(), transfer="bind")
    assert megatrain.compile(
        nn.Linear(3, 3), device=Device(torch.device("cpu"), "plain")
    ).megatrain.options.transfer == ("copy")
