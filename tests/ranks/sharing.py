"""What ranks of one host do that share a store: functions that processes run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import megatrain
from megatrain.checks.several_optimizers import parameters_of
from megatrain.memory.host_limits import return_free_memory
from megatrain.optim.block_update import MasterStep
from megatrain.ranks.shared_store import STATE, Name
from tests.ranks.failing import refused
from tests.ranks.sides import OURS, Case, begin, state_of, take
from tests.training.parity import MODES, square

SHARED = "memfd:megatrain-store"
CASE = Case("tied", "overlap", [(1, 1, 1)] * 4, compile={"precision": "bf16"})


def held(rank: int, case: Case) -> dict[str, Any]:
    """What of a rank is in shared memory after two steps."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    step.flush()
    shared = compiled.megatrain.ranks.store
    if not shared.twins:
        return {"shares": step._exchange.shares}
    twins, names = shared.twins, dict(compiled.megatrain.model.named_parameters())
    moments = [(name, what) for name, p in names.items() for what in optimizer.state.get(p, {})]
    return {
        "shares": step._exchange.shares,
        "parameters": all(twins[Name(STATE, key)].holds(p) for key, p in names.items()),
        "moments": bool(moments)
        and all(twins[Name("0", key, what)].holds(optimizer.state[names[key]][what]) for key, what in moments),
        "lows": sum(name.kind == "low" for name in twins),
        "updated": sorted(name for name, owner in shared.owners.items() if owner == rank),
    }


def planned(rank: int, case: Case) -> list[Any]:
    """Losses and the end of a training without a plan, with that of these ranks, and with that of a process alone."""
    apart = dist.new_subgroups(1)[0]
    plans: list[Any] = [None]
    for group in (dist.group.WORLD, apart):
        _, _, step = begin(case, group)
        take(case, rank, step, range(2))
        plans.append(step.plan)
    found: list[Any] = []
    for plan in plans:
        torch.manual_seed(5)
        compiled, optimizer, step = begin(case, dist.group.WORLD, plan=plan)
        found.append({**take(case, rank, step, range(3)), **state_of(compiled, optimizer, step)})
        del found[-1]["generator"]
    return found


def slow(rank: int, mode: str) -> list[torch.Tensor]:
    """Rank 1 takes its time for each update; the losses tell whether others waited for it."""
    case = Case("tied", mode, [(1, 1, 1)] * 3)
    _, _, step = begin(case, dist.group.WORLD)

    def slowly(own: Any, step: MasterStep, optimizer: Any) -> None:
        if rank == 1:
            time.sleep(0.1)
        own(step, optimizer)

    with updating_by(slowly):
        return take(case, rank, step, range(3))["losses"]


@contextmanager
def updating_by(code: Callable[[Any, MasterStep, Any], None]) -> Generator[None]:
    """Has other code run each update of a block in the body, prepared ones too; it gets the own code first."""
    own, run, anew = MasterStep.__call__, MasterStep.run, cast(Any, lambda *_: False)

    def call(self: MasterStep, optimizer: Any) -> None:
        code(own, self, optimizer)

    MasterStep.__call__, MasterStep.run = call, anew
    try:
        yield
    finally:
        MasterStep.__call__, MasterStep.run = own, run


UPDATED = Case("tied", "spread", [(1, 1, 1)] * 3)


def failing_update(rank: int, times: int) -> tuple[str, dict[str, Any]]:
    """An update of rank 1 at the head of a step fails once it has written; all try again."""
    compiled, optimizer, step = begin(UPDATED, dist.group.WORLD)
    take(UPDATED, rank, step, [0])
    left = [times if rank == 1 else 0]

    def failing(own: Any, step: MasterStep, optimizer: Any) -> None:
        own(step, optimizer)
        if left[0] and any(step._gradient_of(p) is not None for p in parameters_of(optimizer)):
            left[0] -= 1
            raise ValueError("no update today")

    with updating_by(failing):
        text = refused(lambda: take(UPDATED, rank, step, [1]))
    taken = take(UPDATED, rank, step, [1, 2])
    found = {**taken, **state_of(compiled, optimizer, step)}
    del found["generator"]
    return text, found


def writing_alone(rank: int, what: str) -> list[str]:
    """Rank 1 alone writes a parameter, or a moment; the next step of all is refused until it is undone."""
    compiled, optimizer, step = begin(CASE, dist.group.WORLD)
    take(CASE, rank, step, range(1))
    parameter = compiled.megatrain.model.embedding.weight
    tensor = parameter.data if what == "parameter" else optimizer.state[parameter]["exp_avg"]
    before = tensor.clone()
    if rank == 1:
        tensor.add_(1)
    found = [refused(lambda: take(CASE, rank, step, [1]))]
    if rank == 1:
        tensor.copy_(before)
    return [*found, refused(lambda: take(CASE, rank, step, [1]))]


def forking(rank: int) -> list[tuple[str, int]]:
    """Forked children read a parameter, once its update is due and once it is made; how each of them ended."""
    case = Case("tied", "spread", [(1, 1, 1)] * 3)
    compiled, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(1))
    parameter = compiled.megatrain.model.embedding.weight

    def read_in_child() -> tuple[str, int]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, refused(lambda: parameter.sum()).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        return os.read(reading, 1 << 16).decode(), status

    found = [read_in_child()]
    step.flush()
    found.append(read_in_child())
    take(case, rank, step, [1])
    return found


class Wide(nn.Module):
    """Parameters enough that they can be measured."""

    def __init__(self, num: int, width: int = 512):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def measured(rank: int, num: int, transfer: str, options: dict[str, Any], is_apart: bool) -> tuple[int, int]:
    """Takes steps; returns the bytes that they added to this process, and those of them in shared memory."""
    groups: list[Any] = [dist.new_group([each]) for each in range(dist.get_world_size())] if is_apart else []
    group = groups[rank] if is_apart else dist.group.WORLD

    def trained(number: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Wide(number)
        compiled = megatrain.compile(model, device="cpu", transfer=transfer, process_group=group)
        step = megatrain.TrainStep(compiled, torch.optim.AdamW(model.parameters()), loss=square, **options)
        for _ in range(2):
            step(torch.ones(2, 512))
        step.flush()
        return compiled, step

    def together(work: Callable[[], Any]) -> Any:
        # Of pages that several have, each counts a share; so all must stand still. What the C library keeps of tensors
        # that are gone differs from run to run.
        return_free_memory()
        dist.barrier()
        found = work()
        dist.barrier()
        return found

    trained(2)
    before = together(pss)
    kept = trained(num)
    after, shared = together(lambda: (pss(), pss(SHARED)))
    del kept
    return after - before, shared


def pss(name: str = "") -> int:
    """The bytes of this process's memory; of what it shares with others its share."""
    if not name:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(re.search(r"^Pss: *(\d+) kB", text, re.M)[1]) << 10  # type: ignore
    total, is_mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_mine = name in line
        elif is_mine and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def until_killed(rank: int, case: Case, folder: str) -> int:
    """Goes on from the latest checkpoint, saves after each second step; returns how many steps were taken in all."""
    step = resumed(case, dist.group.WORLD, folder)[2]
    while (number := step.progress.count) < len(case.deal):
        take(case, rank, step, [number])
        if number % 2:
            step.save(folder)
    return step.progress.count


def to_the_end(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Takes what is left of the steps in one process; returns everything that training has changed."""
    compiled, optimizer, step = resumed(case, None, folder)
    first = step.progress.count
    take(case, None, step, range(first, len(case.deal)))
    return {"first": first, **state_of(compiled, optimizer, step)}


def resumed(case: Case, group: Any, folder: str) -> tuple[Any, Any, megatrain.TrainStep]:
    """The training of a case from its latest checkpoint, or from its beginning."""
    torch.manual_seed(6)
    compiled, optimizer, step = begin(case, group)
    if not os.path.exists(folder):
        return compiled, optimizer, step
    del step
    options = {**MODES[case.mode], **case.options}
    step = megatrain.TrainStep.load(folder, compiled, optimizer, loss=OURS[case.task].loss, **options)
    return compiled, optimizer, step
