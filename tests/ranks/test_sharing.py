"""Ranks of one host have one store: what is in it, what that saves, who waits for whom, and what users may write."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatrain
from megatrain.base.host_limits import return_free_memory
from megatrain.optim.block_update import MasterStep
from megatrain.ranks.processes import Ranks
from megatrain.ranks.shared_memory import PAGE, SharedMemory, can_tell_copies
from megatrain.ranks.shared_store import STATE, Name
from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import SHARED, Processes, refused
from tests.ranks.sides import Case, begin, take
from tests.training.parity import square

CASE = Case("tied", "overlap", [(1, 1, 1)] * 4, compile={"precision": "bf16"})


def held(rank: int, case: Case) -> dict[str, Any]:
    """What of a rank is in shared memory after two steps."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    step.flush()
    shared = compiled.megatrain.ranks.store
    twins, names = shared.twins, dict(compiled.megatrain.model.named_parameters())
    moments = [(name, what) for name, p in names.items() for what in optimizer.state.get(p, {})]
    return {
        "parameters": all(shared.holds(Name(STATE, key), p) for key, p in names.items()),
        "moments": bool(moments)
        and all(shared.holds(Name("0", key, what), optimizer.state[names[key]][what]) for key, what in moments),
        "lows": sum(name.kind == "low" for name in twins),
        "updated": sorted(name for name, owner in shared.owners.items() if owner == rank),
    }


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


def meeting(rank: int, count: int) -> list[Any]:
    """Meets often, each rank at its own pace and with values of other lengths; returns what wasn't heard right."""
    ranks, draw, wrong = Ranks(dist.group.WORLD), random.Random(rank), list[Any]()  # pyright: ignore
    for number in range(count):
        time.sleep(draw.choice([0, 0, 0, 1e-3]))
        found = ranks.exchange([number, rank, "x" * draw.randrange(3000)])
        time.sleep(draw.choice([0, 0, 0, 1e-3]))
        wrong += [found] if [each[:2] for each in found] != [[number, other] for other in range(ranks.size)] else []
    return wrong


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


SERIAL_CLIPPED: dict[str, object] = {"max_grad_norm": 1.0, "overlap": False}
needs_files = pytest.mark.skipif(not can_tell_copies(), reason="the system has no such memory")
pytestmark = needs_files


def test_shared_memory_is_one_with_copies_of_what_each_writes_on_its_own():
    one = SharedMemory.made()
    other = SharedMemory.opened(one.address)
    with one.locked():
        region, start = one.take(PAGE + 1)
        one.post({"at": [region.offset, start]})
    with other.locked():
        assert [list(other.news()), list(other.news())] == [[{"at": [region.offset, start]}], []]
        assert other.take(1)[0].offset != region.offset
    mine, theirs = (each.region(region.offset, len(region.shared)) for each in (one, other))
    mine.shared[start] = 7
    assert theirs.private[start] == theirs.shared[start] == 7
    theirs.private[start + PAGE] = 9
    assert (mine.private[start + PAGE], theirs.is_written(start, PAGE), theirs.is_written(start, PAGE + 1)) == (0, 0, 1)
    theirs.drop(start, PAGE + 1)
    assert (theirs.private[start + PAGE], theirs.is_written(start, PAGE + 1)) == (0, 0)


@pytest.mark.nightly
def test_ranks_hear_all_in_each_meeting(three: Processes):
    assert three.run(meeting, 400) == [[], [], []]


@pytest.mark.nightly
def test_ranks_of_one_host_share_parameters_moments_and_masters(three: Processes):
    found = three.run(held, CASE)
    for each in found:
        assert (each["parameters"], each["moments"]) == (True, True)
        assert each["lows"] > 0
    updated = [name for each in found for name in each["updated"]]
    assert len(updated) == len(set(updated)), "each parameter is updated by one rank"
    assert all(each["updated"] for each in found), "each rank updates some"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["overlap", "spread", nightly("serial"), nightly("deferred")])
def test_ranks_wait_for_a_slow_update_of_another(mode: str, three: Processes):
    case = Case("tied", mode, [(1, 1, 1)] * 3)
    expected = take(case, None, begin(case)[2], range(3))["losses"]
    for found in three.run(slow, mode):
        assert_same(expected, found, "losses")


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_what_one_rank_alone_writes_is_refused_and_named(what: str, three: Processes):
    for first, then in three.run(writing_alone, what):
        name = "`embedding.weight`" if what == "parameter" else "`exp_avg` of `embedding.weight` in optimizer 0"
        assert first.startswith(f"RanksError: the ranks differ: the value of {name} is as it was on rank 0, but "), (
            first
        )
        assert then == ""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transfer", "options"),
    [("auto", {}), ("copy", SERIAL_CLIPPED)],
    ids=["overlap", "serial-clipped-copied"],
)
def test_host_memory_of_three_ranks_is_that_of_one_and_their_landed_gradients(
    transfer: str, options: dict[str, object], three_anew: Callable[[], Processes]
):
    num, size = 256, 3  # what the C library keeps of freed memory, some MB more or less, is far below 3 % of that
    totals: dict[bool, int] = {}
    for is_apart in (True, False):
        processes = three_anew()
        found = processes.run(measured, num, transfer, options, is_apart)
        totals[is_apart], shared = (sum(each) for each in zip(*found, strict=True))
    state = 3 * sum(p.nbytes for p in Wide(num).parameters())
    gradients = state // 3
    # A process alone has its gradients where they land, if copies bring them there; else they go as they are used.
    per_device = (totals[True] - size * state) / size - gradients * (transfer == "copy")
    expected = state + size * (per_device + gradients)
    print(f"state {state}, per device {per_device:.0f}; {totals}, of which {shared} shared; expected {expected:.0f}")
    assert abs(shared - state) <= 0.03 * state
    assert abs(totals[False] - expected) <= 0.03 * expected
