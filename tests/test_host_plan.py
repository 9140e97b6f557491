"""The figures of a host plan are those of the tensors that a step then makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.masters.registry import Kind
from megatrain.optim.need import names
from megatrain.optim.trained_model import TrainedModel
from megatrain.planning.host_plan import HostPlan, HostRow, host_plan
from tests.models import MODELS, Gpt
from tests.runtime.parity import loss_of

ROOT = Path(__file__).parent.parent
# Buffers that the forward writes, ties, parameters that nothing uses, and weights in one storage.
NAMES = ("cnn", "tied_blocks", "unused_parameter", "lstm")


def bytes_of(tensors: Any) -> int:
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def step(compiled: megatrain.CompiledModule, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    loss = loss_of(compiled(*args, **kwargs))
    assert loss is not None
    loss.backward()
    blocks = BlockOptimizer(optimizer, [list(compiled.parameters())])
    blocks.begin()
    blocks.update(0)
    blocks.finish()


def check_figures(model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, **options: Any) -> None:
    compiled = megatrain.compile(model, device="cpu", **options)
    variant = compiled.prepare(*args, **kwargs)
    plan = host_plan(variant.program, variant.schedule, TrainedModel.of(model, optimizer=optimizer))
    step(compiled, optimizer, args, kwargs)
    store = compiled.megatrain.engine.store
    assert store is not None
    assert plan.bytes_of("parameters") + plan.bytes_of("buffers") == store.nbytes
    arenas = [(arena.tensor.data_ptr(), arena.tensor.data_ptr() + arena.nbytes) for arena in store._arenas]
    state = [*model.parameters(), *model.buffers()]
    outside = [t for t in state if not any(start <= t.data_ptr() < end for start, end in arenas)]
    assert 0 <= plan.bytes_of("state of no block") - bytes_of(outside) < 64 * (len(outside) + 1)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert (
        0 <= plan.bytes_of("gradients") - bytes_of(gradients) < 64 * (len(gradients) + 1)
    )  # each in a room of its own
    exact = host_plan(variant.program, variant.schedule, TrainedModel.of(model, optimizer=optimizer), on_host=True)
    assert exact.bytes_of("gradients") == bytes_of(gradients)
    kept = [t for state in optimizer.state.values() for t in state.values()]
    assert plan.bytes_of(type(optimizer).__name__) == bytes_of(kept)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert not plan.is_estimate
    again = host_plan(variant.program, variant.schedule, TrainedModel.of(model, optimizer=optimizer))
    assert again.rows == plan.rows
    held = (
        plan.total_bytes
        - plan.bytes_of("update scratch")
        - plan.bytes_of("parks")
        - (plan.bytes_of("slab") + plan.bytes_of("constants") + plan.bytes_of("state of no block") - bytes_of(outside))
    )
    # What lies between two tensors of the store, or two rooms of gradients, belongs to neither.
    assert 0 <= held - again.held_bytes < 64 * (len(state) + len(gradients))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_a_step_leaves(name: str):
    model, args, kwargs = MODELS[name]()
    check_figures(model, torch.optim.AdamW(model.parameters()), args, kwargs)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("gpt", "SGD"),
        ("frozen_bias", "Adafactor"),
        ("gpt", "Muon"),
        ("frozen_bias", "Adagrad"),
        ("frozen_bias", "AdamW8bit"),
    ],
)
def test_rows_of_other_optimizers_too(name: str, optimizer: str):
    model, args, kwargs = MODELS[name]()
    chosen = [p for p in model.parameters() if p.dim() == 2] if optimizer == "Muon" else model.parameters()
    options = {"momentum": 0.9} if optimizer == "SGD" and name == "gpt" else {}
    made: Any = names()[optimizer]
    check_figures(model, made(chosen, **options), args, kwargs)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.up, self.down = nn.Parameter(torch.randn(6, 8, 16)), nn.Parameter(torch.randn(6, 16, 8))

    def forward(self, ids):
        x = self.table(ids)[None].expand(6, -1, -1)
        return torch.bmm(torch.bmm(x, self.up).relu(), self.down).sum()


def test_parts_of_parameters_count_as_their_wholes():
    model, ids = Stacked(), torch.randint(0, 40, (5,))
    check_figures(model, torch.optim.AdamW(model.parameters()), (ids,), {}, block_bytes=1024, memory="20KB")


def whole_step(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, megatrain.Schedule]:
    program = megatrain.lower(megatrain.trace(model, args))
    return program, megatrain.schedule(program, outputs="release", **options)


@pytest.mark.parametrize(
    ("updates", "clip", "transfer"), [("overlap", False, "copy"), ("serial", True, "bind"), ("deferred", True, "copy")]
)
def test_what_waits_and_what_is_parked_is_what_the_schedule_says(updates: str, clip: bool, transfer: str):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    options = {"updates": updates, "clip": clip, "micro_batches": 3, "keep": 1, "transfer": transfer}
    program, schedule = whole_step(model, torch.ones(8, 64), **options)
    plan = host_plan(program, schedule, TrainedModel.of(model))
    assert plan.bytes_of("slab") == 0, "gradients land where they wait"
    assert plan.bytes_of("gradients") + plan.bytes_of("parks") == schedule.host_bytes
    assert plan.bytes_of("parks") == (3 * 4 * 8 * 64 * 4 if transfer == "copy" else 0)


# -- bf16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "masters"), [("AdamW", "exact"), ("AdamW8bit", "exact"), ("SGD", "rounded")])
def test_rows_in_bf16_are_what_a_step_leaves(name: str, masters: Kind):
    model, ids = Gpt(width=64), torch.randint(0, 32, (2, 8))
    model.positions.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(10)))
    compiled = megatrain.compile(model, device="cpu", precision="bf16", masters=masters)
    made: Any = names()[name]
    optimizer = made(model.parameters(), **({"momentum": 0.9} if name == "SGD" else {}))
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda logits, _: logits.square().mean())
    schedule = step.prepare(ids)

    def planned() -> HostPlan:
        trained, held_bytes = TrainedModel.of(model, masters, optimizer), compiled.masters.held_bytes
        return host_plan(compiled.program, schedule, trained, held_bytes=held_bytes)

    plan = planned()
    step(ids)
    assert compiled.megatrain.engine.store is not None
    assert plan.bytes_of("parameters") + plan.bytes_of("buffers") == compiled.megatrain.engine.store.nbytes
    assert plan.bytes_of("state of no block") == 64
    assert plan.bytes_of("low halves") == compiled.masters.low_bytes
    assert plan.bytes_of(name) == bytes_of(t for state in optimizer.state.values() for t in state.values())
    undo = step._setup.updates._undo._memory.numel()
    num_tensors = 4 * len(list(model.parameters()))  # each copy begins at a multiple of 64 bytes
    assert undo <= plan.bytes_of("update scratch") + 64 * num_tensors
    again = planned()
    assert again.rows == plan.rows
    lasting = ("parameters", "low halves", name)
    assert 0 <= sum(map(plan.bytes_of, lasting)) - again.held_bytes + 20 < 64 * len(list(model.parameters()))


# -- text and refusal --------------------------------------------------------------------------------------------


def small() -> HostPlan:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    program, schedule = whole_step(model, torch.ones(8, 64), keep=1)
    return host_plan(program, schedule, TrainedModel.of(model, optimizer="AdamW"))


def test_an_estimate_says_so():
    plan = HostPlan((HostRow("parameters", 4),), 1, is_estimate=True)
    assert str(plan).endswith(
        "\nnote: the optimizer's rows are estimates: its code wasn't run on tensors without memory"
    )


def test_what_does_not_fit_is_refused_with_numbers_and_ways_out():
    plan = small()
    plan.check(plan.total_bytes)
    with pytest.raises(ExecuteError) as caught:
        plan.check(200_000)
    assert_expected_inline(
        str(caught.value),
        """\
a step needs 446.30 KiB of host memory, 195.31 KiB are available.
  host: 457008 B for 24960 parameters
  what               bytes        size  B/parameter
  parameters         99840   97.50 KiB         4.00
  AdamW.step            48        48 B         0.00
  AdamW.exp_avg      99840   97.50 KiB         4.00
  AdamW.exp_avg_sq   99840   97.50 KiB         4.00
  gradients          99840   97.50 KiB         4.00
  slab               16640   16.25 KiB         0.67
  parks               8192    8.00 KiB         0.33
  update scratch     32768   32.00 KiB         1.31
  total             457008  446.30 KiB        18.31
  250.98 KiB are missing. What helps:
    precision="bf16": gradients and parks (105.50 KiB) take half
    fewer or smaller micro-batches, or more device memory: less is parked (8.00 KiB)
    an optimizer with less state (195.05 KiB), such as AdamW8bit, Adafactor or SGD
    training fewer parameters: requires_grad_(False), adapters
    a machine with more memory""",
    )


def test_without_a_figure_the_machine_is_asked_and_what_is_there_counts(monkeypatch: pytest.MonkeyPatch):
    plan = small()
    held = sum(p.nbytes for p in nn.Linear(64, 64).parameters()) * 6
    assert plan.held_bytes == held
    monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: plan.total_bytes - held)
    plan.check()
    monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: plan.total_bytes - held - 1)
    with pytest.raises(ExecuteError, match="of host memory"):
        plan.check()


# -- measured ----------------------------------------------------------------------------------------------------

# A process of its own, because memory belongs to a process; a small step first, so that what torch, the compiler and
# threads keep for themselves is there before.
SCRIPT = """
import ctypes, gc, json, sys
import psutil, torch
from torch import nn
import megatrain
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def net(width, depth, vocabulary):
    layers = (Layer(width) for _ in range(depth))
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))


def train(model, options, step_options):
    compiled = megatrain.compile(model, device="cpu", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result.square().mean(), **step_options)
    for _ in range(3):
        step([(IDS,), (IDS,)])
    return compiled, optimizer, step.host_plan


def now():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_full_info().uss


def most():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
IDS = torch.randint(0, 4000, (2, 8))
train(net(32, 2, 4000), *options)
now()
open("/proc/self/clear_refs", "w").write("5")
resident = most()
compiled, optimizer, plan = train(net(**json.loads(sys.argv[3])), *options)
peak = most() - resident
print(json.dumps({"peak": peak, "total": plan.total_bytes}))
"""


def measured(options: dict[str, Any], step_options: dict[str, Any] | None = None, **sizes: int) -> Any:
    arguments = [json.dumps(options), json.dumps(step_options), json.dumps(sizes)]
    # One heap for all threads: of others than the first, malloc_trim leaves the end, tens of megabytes by chance.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return json.loads(done.stdout)


on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")


@on_linux
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "step_options", "depth"),
    [
        ({}, {}, 2),
        ({"memory": "250MB"}, {"max_grad_norm": 1.0}, 2),
        ({"precision": "bf16"}, {"overlap": False}, 2),
        ({"precision": "bf16"}, {"overlap": False, "offload": str(ROOT)}, 2),
        ({"precision": "bf16"}, {"overlap": False, "offload": str(ROOT), "host_memory": "1300MiB"}, 6),
    ],
    ids=["overlap", "deferred", "bf16", "state in a file", "half of the state in a file"],
)
def test_whole_steps_never_take_more_than_the_plan(options: dict[str, Any], step_options: dict[str, Any], depth: int):
    """With matrices of 36 MiB. Smaller ones, that an optimizer's own code makes and drops, leave holes in the heap."""
    found = measured(options, step_options, width=1536, depth=depth, vocabulary=4000)
    # A processor without instructions for bf16 makes a gradient in bf16 in a buffer of fp32.
    has_bf16 = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512bw", "asimd"))
    buffer = 0 if has_bf16 or "precision" not in options else 4 * 1536 * 4 * 1536
    assert 0.85 * found["total"] < found["peak"] < 1.03 * found["total"] + buffer, found
