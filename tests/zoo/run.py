"""Trains a case eagerly and compiled, side by side, and says how the two compare."""

from __future__ import annotations

import importlib.util
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import megatrain
from megatrain.passes.program import Program
from megatrain.planning.step_programs import lowered
from megatrain.tracer.arguments import Structure
from tests.captures import lowered_once
from tests.comparing import difference
from tests.host_updates import HostUpdates
from tests.runtime.parity import loss_of
from tests.zoo.case import Case

STEPS = 2
CLOSE = 1e-4
# From best to worst; a case is as good as the worst of its runs.
RESULTS = ("exact", "close", "skipped", "refused", "error", "WRONG")


@dataclass(frozen=True)
class Row:
    """How one case went.

    Args:
        case: Its name.
        family: The file it is in.
        result: One of `RESULTS`.
        detail: The worst tensor with its error, or the first lines of the refusal or of the exception.
        capture_seconds: Time to capture, cut and schedule, with default options.
        blocks: Blocks of the program, with default options.
        templates: Templates they share.
        opaque: Blocks that run as modules, not as a graph.
        seconds: Time of everything.
    """

    case: str
    family: str
    result: str
    detail: str = ""
    capture_seconds: float = 0.0
    blocks: int = 0
    templates: int = 0
    opaque: int = 0
    seconds: float = 0.0


@dataclass
class Trained:
    """Everything that a run left behind, by name; tensors of a kind share one scale."""

    tensors: dict[tuple[int, str, str], torch.Tensor | None]
    kinds: list[type]
    rng: tuple[Any, ...]


def run(case: Case, device: str = "cpu", kernels: str | None = None) -> Row:
    """Compares a case with eager on a device: once with default options, once in small blocks and recomputed.

    Args:
        case: The case.
        device: Where both sides compute.
        kernels: See `megatrain.compile`; None is its default.
    """
    start = time.perf_counter()
    missing = [p for p in case.needs if importlib.util.find_spec(p) is None]
    if missing:
        return Row(case.name, case.family, "skipped", f"needs {', '.join(missing)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device != "cpu", warn_only=True)
    row = Row(case.name, case.family, "exact")
    try:
        expected = eager(case, device)
    except Exception as error:
        result = "error" if isinstance(error, AssertionError) else "skipped"  # the case is at fault, or its package
        return replace(row, result=result, detail=f"eager fails: {_brief(error)}")
    options: dict[str, Any] = {"device": device} | ({} if kernels is None else {"kernels": kernels})
    with lowered_once():
        row, compiled = _compare(case, expected, row, options)
        if compiled is not None:
            streamed, _ = _compare(case, expected, row, options | _streamed(compiled))
            row = max(row, streamed, key=lambda r: RESULTS.index(r.result))
    if row.result in ("close", "WRONG") and judge(expected, eager(case, device))[0] != "exact":
        result = "error" if device == "cpu" else "skipped"  # some kernels of an accelerator sum in any order
        row = replace(row, result=result, detail="eager differs from eager with equal seeds")
    return replace(row, seconds=round(time.perf_counter() - start, 1))


def eager(case: Case, device: str = "cpu") -> Trained:
    """Trains the case without megatrain; what it finds must be finite, or equality would mean nothing."""
    model = fresh(case).to(device)
    found = train(model, model, case, device)
    assert any(kind == "gradient" and t is not None for (_, kind, _), t in found.tensors.items()), "no gradients"
    for key, tensor in found.tensors.items():
        is_finite = tensor is None or not tensor.is_floating_point() or bool(_dense(tensor).isfinite().all())
        assert is_finite or key[1] == "output", f"{key} isn't finite"
    return found


def _compare(case: Case, expected: Trained, row: Row, options: dict[str, Any]) -> tuple[Row, Any]:
    is_streamed = "memory" in options
    label = "streamed: " if is_streamed else ""
    compiled = None
    try:
        model = fresh(case)
        compiled = megatrain.compile(model, opaque="allow", **options)
        started = time.perf_counter()
        args, kwargs = moved(sample(case, 0), options["device"])
        seed()
        compiled.prepare(*args, **kwargs)
        if not is_streamed:
            seconds = round(time.perf_counter() - started, 2)
            row = replace(row, capture_seconds=seconds)
        found = train(compiled, model, case, options["device"])
        if not is_streamed:
            row = replace(row, **measure(compiled.program))
    except megatrain.MegatrainError as error:
        return replace(row, result="refused", detail=label + " ".join(str(error).split("\n")[:2])), None
    except Exception as error:
        return replace(row, result="error", detail=label + _brief(error)), None
    result, detail = judge(expected, found)
    return replace(row, result=result, detail=detail and label + detail), compiled


def measure(program: Program) -> dict[str, int]:
    """Counts the blocks of a program, its templates, and the blocks that no graph stands for."""
    opaque = [block for block in program.blocks if program.opaque(block)]
    return {"blocks": len(program.blocks), "templates": len(program.templates), "opaque": len(opaque)}


def _streamed(compiled: Any) -> dict[str, Any]:
    """Options that cut the model into small blocks and give it hardly more memory than it needs."""
    block_bytes = max(1, sum(e.spec.nbytes for e in compiled.program.state.values()) // 8)
    options = {"activations": "recompute", "transfer": "copy"}
    known = compiled.megatrain._variants
    cut = replace(known._options, block_bytes=block_bytes)
    least = max(_least_memory(lowered(variant.traced, cut), options) for variant in known)
    return options | {"block_bytes": block_bytes, "memory": least * 21 // 20 + 1024}


def _least_memory(program: Program, options: dict[str, Any]) -> int:
    with pytest.raises(megatrain.ScheduleError) as refusal:
        megatrain.schedule(program, memory=1, **options)
    told = re.search(r"at least (\d+) B", str(refusal.value))
    assert told is not None
    return int(told.group(1))


# -- one run -------------------------------------------------------------------------------------------------


def seed(value: int = 5) -> None:
    """Seeds every generator that a model may draw from."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def sample(case: Case, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step."""
    seed(100 + step)
    return case.inputs(step)


def moved(given: Any, device: str) -> Any:
    """The same arguments on a device; leaves stay leaves."""
    if device == "cpu":
        return given
    known: dict[torch.Tensor, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in known:
            known[tensor] = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        return known[tensor]

    return pytree.tree_map_only(torch.Tensor, move, given)


def fresh(case: Case) -> nn.Module:
    """Builds the model; parameters that start as zeros are moved, or half of the model would have no gradient."""
    seed(1234)
    model = case.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.05)
    return model


def train(call: Callable[..., Any], model: nn.Module, case: Case, device: str = "cpu") -> Trained:
    """Trains `model` through `call` for a few steps; updates run on the host, as a compiled model's do."""
    found = Trained({}, [], ())
    # A large eps: otherwise Adam makes full steps out of gradients that are zero but for rounding.
    settings = {"lr": 1e-2} | ({"eps": 1e-3} if case.optimizer == "AdamW" else {})
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = HostUpdates(trained, lambda copies: getattr(torch.optim, case.optimizer)(copies, **settings))
    samples = [moved(sample(case, step), device) for step in range(STEPS)]
    seed()
    for step, (args, kwargs) in enumerate(samples):
        model.zero_grad()
        result = call(*args, **kwargs)
        loss = loss_of(result)
        assert loss is not None, "nothing to train"
        loss.backward()
        found.kinds.append(type(result))
        for kind, name, tensor in _left_behind(model, result, (args, kwargs)):
            found.tensors[step, kind, name] = None if tensor is None else tensor.detach().cpu().clone()
        updates.step()
    for name, parameter in model.named_parameters():
        found.tensors[STEPS, "parameter", name] = parameter.detach().cpu().clone()
    there = () if device == "cpu" else torch.get_device_module(device).get_rng_state().tolist()
    found.rng = (torch.get_rng_state().tolist(), there, random.getstate(), str(np.random.get_state()))
    return found


def _left_behind(model: nn.Module, result: Any, given: Any) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    for index, tensor in enumerate(Structure.of(result).placeholders):
        yield "output", str(index), tensor
    for name, parameter in model.named_parameters():
        yield "gradient", name, parameter.grad
    for index, tensor in enumerate(Structure.of(given).placeholders):
        if tensor.requires_grad:
            yield "input gradient", str(index), tensor.grad
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(expected: Trained, found: Trained) -> tuple[str, str]:
    """Returns the result and the worst tensor. Before the first backward nothing may differ at all."""
    if expected.kinds != found.kinds:
        return "WRONG", f"returns {found.kinds[0].__name__}, not {expected.kinds[0].__name__}"
    if expected.rng != found.rng:
        return "WRONG", "a random generator ended elsewhere"
    if expected.tensors.keys() != found.tensors.keys():
        return "WRONG", f"other tensors: {sorted(map(str, expected.tensors.keys() ^ found.tensors.keys()))[:3]}"
    scales: dict[tuple[int, str], float] = {}
    for (step, kind, _), tensor in expected.tensors.items():
        if tensor is not None and tensor.numel() and tensor.is_floating_point():
            largest = float(_dense(tensor).nan_to_num(0, 0, 0).abs().max())
            scales[step, kind] = max(scales.get((step, kind), 0.0), largest)
    worst, detail, is_wrong = 0.0, "", False
    for key, tensor in expected.tensors.items():
        error = relative_error(tensor, found.tensors[key], scales.get(key[:2], 0.0))
        is_forward = key[0] == 0 and key[1] in ("output", "buffer")
        is_wrong |= error > (0 if is_forward else CLOSE)
        if error > worst:
            worst, detail = error, f"{key[1]} {key[2]} of step {key[0]} off by {error:.1e}"
    if not worst:
        return "exact", ""
    return ("WRONG" if is_wrong else "close"), detail


def relative_error(a: torch.Tensor | None, b: torch.Tensor | None, scale: float) -> float:
    """Largest difference over `scale`; 0 only for equal bits, inf where the tensors aren't of one kind."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return float("inf")
    a, b = _dense(a), _dense(b)
    if difference(a, b) is None:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    error = float((a.to(wide) - b.to(wide)).abs().max()) / (scale or 1.0)
    return error if error < float("inf") else float("inf")  # a NaN that only one of them has compares with nothing


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _brief(error: BaseException) -> str:
    where = [f for f in traceback.extract_tb(error.__traceback__) if "megatrain/" in f.filename]
    at = f" (at {where[-1].filename.split('megatrain/')[-1]}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}{at}"
