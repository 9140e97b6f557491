"""A rank that fails, ends or differs is named by an error on every other rank, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatrain
from megatrain.optim import per_parameter
from megatrain.optim.block_update import MasterStep
from megatrain.ranks import processes, rank_exchange
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same
from tests.models import Stack
from tests.nightly import nightly
from tests.ranks.processes import Processes, processes_fixture, refused
from tests.ranks.sides import Case, begin, eager_drawn, train_drawn
from tests.strategies import Branch, Start, WritesInput
from tests.training.parity import seeded_stack, square, stack_batch

CASE = Case("stack", "overlap", [(1, 1, 1)] * 4)


def batch(step: int, rank: int) -> Any:
    return CASE.batches(step)[rank]


def differing(rank: int, what: str) -> str:
    """Rank 1 has something else than the others."""
    is_odd = rank == 1
    model: Any = seeded_stack(4) if what != "width" or not is_odd else Stack(4, 6)
    if what == "value" and is_odd:
        model.head.bias.data[0] += 1
    compiled = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if what != "lr" or not is_odd else 0.2)
    clip = 1.0 if what == "clip" and is_odd else None
    step = megatrain.TrainStep(compiled, optimizer, loss=square, max_grad_norm=clip)
    text = refused(lambda: step(stack_batch(rank, 2)))
    # Nothing has happened, so that ranks which are made alike can go on.
    assert step.progress.count == 0
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.1
        step(stack_batch(rank, 2))
        assert step.progress.count == 1
    return text


def failing_early(rank: int) -> tuple[list[str], int]:
    """Rank 1 gives a bad batch once; then all go on."""
    step = begin(CASE, dist.group.WORLD)[2]
    texts = []
    for number in range(3):
        given = [] if number == 1 and rank == 1 else batch(number, rank)
        texts.append(refused(lambda given=given: step(given)))
    return texts, step.progress.count


def failing_late(rank: int) -> list[str]:
    """The second loss of rank 1 raises."""
    step = begin(CASE, dist.group.WORLD)[2]
    own = step._run._rules.loss

    def loss(result: Any, given: Any) -> torch.Tensor:
        if rank == 1 and step.progress.count == 1:
            raise ValueError("no loss today")
        assert own is not None
        return own(result, given)

    step._run._rules = replace(step._run._rules, loss=loss)
    return [refused(lambda number=number: step(batch(number, rank))) for number in range(3)]


def dying(rank: int, when: str) -> str:
    """Rank 1 is killed at some place."""
    case = replace(CASE, mode="spread" if when == "update" else "overlap")
    if when == "opening":
        if rank == 1:
            die: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            processes.SharedMemory.opened = die
        return refused(lambda: begin(case, dist.group.WORLD))
    step = begin(case, dist.group.WORLD)[2]
    step(case.batches(0)[rank])
    if rank == 1:
        if when == "loss":
            kill: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            step._run._rules = replace(step._run._rules, loss=kill)
        elif when == "update":
            killed: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            MasterStep.__call__ = MasterStep.run = killed
        elif when == "between":
            os.kill(os.getpid(), signal.SIGKILL)
    return refused(lambda: step(case.batches(1)[rank]))


class Counted(torch.optim.SGD):
    """Its state has a number of Python for each parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = 1 + self.state[parameter].get("count", 0)


def counting(rank: int, is_known: bool) -> str:
    """Trains with it."""
    if is_known:
        per_parameter.register(Counted)
    compiled = megatrain.compile(model := seeded_stack(4), device="cpu", process_group=dist.group.WORLD)
    step = megatrain.TrainStep(compiled, Counted(model.parameters(), lr=0.1), loss=square)
    return refused(lambda: step(stack_batch(rank, 2)))


def impossible(rank: int) -> list[str]:
    group = dist.group.WORLD
    compiled, _, step = begin(CASE, group)
    given = batch(0, rank)[0]
    normed = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    writes = megatrain.TrainStep(
        megatrain.compile(normed, device="cpu", process_group=group),
        torch.optim.SGD(normed.parameters(), lr=0.1),
        loss=square,
    )
    _, hooked, watched = begin(CASE, group)
    hooked.register_step_post_hook(lambda *_: None)
    inductor = {"kernels": "inductor", "process_group": group}
    rounded = {"precision": "bf16", "masters": "rounded", "process_group": group}

    def on_two_hosts() -> None:
        usual = processes.SharedMemory.opened

        def opened(address: Any) -> Any:
            return usual([*address[:-1], "of another host"] if rank == 2 else address)

        processes.SharedMemory.opened = opened
        try:
            megatrain.compile(seeded_stack(1), device="cpu", process_group=group)
        finally:
            processes.SharedMemory.opened = usual

    return [
        refused(lambda: compiled(given).sum().backward()),
        refused(lambda: step.measure([given])),
        refused(lambda: writes(stack_batch(rank, 2))),
        refused(lambda: watched([given])),
        refused(lambda: megatrain.compile(seeded_stack(1), device="cpu", **inductor)),
        refused(lambda: megatrain.compile(seeded_stack(1), device="cpu", **rounded)),
        counting(rank, is_known=False),
        refused(on_two_hosts),
    ]


def without_room(rank: int) -> list[str]:
    """The host has no memory for the ranks, and then it has."""
    step, usual = begin(CASE, dist.group.WORLD)[2], rank_exchange.available_bytes
    rank_exchange.available_bytes = lambda: -(1 << 30)
    try:
        texts = [refused(lambda: step(batch(0, rank)))]
    finally:
        rank_exchange.available_bytes = usual
    return [*texts, refused(lambda: step(batch(0, rank)))]


def saving_alone(rank: int, folder: str) -> tuple[list[str], bool]:
    """Rank 0 saves where the others take a step; then all do the same again."""
    _, _, step = begin(CASE, dist.group.WORLD)
    step(batch(0, rank))
    texts = [refused(lambda: step.save(folder) if rank == 0 else step(batch(1, rank)))]
    existed = os.path.exists(folder)
    texts += [refused(lambda: step(batch(1, rank))), refused(lambda: step.save(folder))]
    return texts, existed


def failing_op(rank: int, op: str) -> tuple[str, str]:
    """An op of rank 1 fails; then there is another step."""
    chaos = Chaos(max_delay_s=0, fail=op) if rank == 1 else None
    case = replace(CASE, compile={"chaos": chaos, "transfer": "copy", "block_bytes": "100B"})
    _, _, step = begin(case, dist.group.WORLD)
    steps = [case.batches(number)[rank] for number in range(2)]
    return refused(lambda: step(steps[0])), refused(lambda: step(steps[1]))


three_to_kill = processes_fixture(3, "function")


# -- what differs --------------------------------------------------------------------------------------------


DIFFERENCES = {
    "width": r"what block \d trains is .* on rank 0, but .* on rank 1",
    "value": r"the value of `head.bias` is f32\[2\] with the digest \w+ on rank 0, but f32.* on rank 1",
    "lr": "lr of group 0 of optimizer 0 is 0.1 on rank 0, but 0.2 on rank 1",
    "clip": "max_grad_norm is None on rank 0, but 1.0 on rank 1",
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_refused_on_each_with_the_difference(what: str, three: Processes):
    texts = three.run(differing, what)
    assert len(set(texts)) == 1
    assert re.match(f"RanksError: the ranks differ: {DIFFERENCES[what]}", texts[0]), texts[0]
    assert "call torch.manual_seed first, or load the same checkpoint" in texts[0]


# -- before all have agreed ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_rank_that_fails_before_the_step_leaves_all_as_they_were(three: Processes):
    found = three.run(failing_early)
    assert [count for _, count in found] == [2, 2, 2]
    assert found[1][0][1].startswith("ExecuteError: a step was called with an empty list.")
    for rank in (0, 2):
        first, second, third = found[rank][0]
        assert (first, third) == ("", "")
        assert second.startswith("RanksError: rank 1 failed before the step: ExecuteError: a step was called with")


# -- in the middle -------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_rank_that_fails_in_the_middle_ends_the_training_of_all(three: Processes):
    found = three.run(failing_late)
    assert [texts[0] for texts in found] == ["", "", ""]
    assert found[1][1] == "ValueError: no loss today"
    for rank in (0, 2):
        assert found[rank][1] == "RanksError: rank 1 failed: ValueError: no loss today"
    for texts in found:
        assert texts[2].startswith("ExecuteError: the ranks are no longer at the same step")


@pytest.mark.nightly
@pytest.mark.parametrize("op", ["F1", "T1", *map(nightly, ("B1", "T3", "G0", "G3", "U0", "U2", "V1"))])
def test_an_op_that_fails_is_named_on_all_ranks(op: str, three: Processes):
    found = three.run(failing_op, op)
    assert f"{op} fail" in found[1][0]
    early = "before the step" if op == "F1" else ""  # and the next step fails likewise
    for rank in (0, 2):
        assert found[rank][0].startswith(f"RanksError: rank 1 failed {early}".rstrip()), found[rank]
        assert f"{op} fail" in found[rank][0]
    for _, then in found:
        assert (f"{op} fail" in then) if early else then.startswith("ExecuteError: the ranks are no longer at the same")


@pytest.mark.nightly
@pytest.mark.parametrize("deal", [nightly(((1, 2, 1),)), nightly(((1, 1, 1),))])
def test_a_last_block_that_reads_other_values_than_its_capture_runs_again_by_itself(
    deal: tuple[int, ...], three: Processes
):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Start(Branch(WritesInput()))
    case = Case("drawn", "deferred", [deal] * 3)
    found = three.run(train_drawn, case, model)
    expected = eager_drawn(case, model)
    for each in found:
        assert not isinstance(each, BaseException), each
        names = expected.keys() & each.keys()
        assert_same({name: expected[name] for name in names}, {name: each[name] for name in names})


@pytest.mark.parametrize("when", ["update", *map(nightly, ("opening", "loss", "between"))])
def test_a_rank_that_is_killed_is_named(when: str, three_to_kill: Processes):
    found = three_to_kill.run(dying, when, of=(0, 2))
    for text in found:
        named = "rank 1 ended.", "rank 1 failed: it ended"
        assert text.removeprefix("RanksError: ").startswith(named), text


@pytest.mark.nightly
def test_ranks_in_different_calls_are_refused(three: Processes, tmp_path: Path):
    found = three.run(saving_alone, str(tmp_path / "run"))
    text = "RanksError: the ranks are in different calls: rank 0 in save(), rank 1 in a step, rank 2 in a step."
    for texts, _ in found:
        assert texts[0].partition("\n")[0] == text
        assert texts[1:] == ["", ""]
    assert (tmp_path / "run" / "manifest.json").exists() or any((tmp_path / "run").iterdir())


# -- what isn't possible yet ---------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_several_ranks_cannot_do_is_refused_by_name(three: Processes):
    texts = (
        "ExecuteError: loss.backward() of a model that was compiled with process_group= isn't possible.",
        "ExecuteError: step.measure isn't possible with a process_group of 3 ranks.",
        "ExecuteError: the forward writes the buffer `1.running_mean`, which can't be trained by several ranks.",
        "ExecuteError: a hook on the optimizer's step would see the gradients of this rank's part alone.",
        'OptionError: process_group= has 3 ranks, but kernels="inductor".',
        'OptionError: process_group= has 3 ranks, but masters="rounded".',
        "OptimizerError: Counted may look at all parameters at once, and ranks divide the updates among them.",
        "RanksError: the 3 ranks share no memory: they are on several hosts, or the system has none to share.",
    )
    for found in three.run(impossible):
        assert [text.partition("\n")[0] for text in found] == list(texts)


@pytest.mark.nightly
def test_state_that_ranks_cannot_share_ends_the_first_step_with_its_name(three: Processes):
    for text in three.run(counting, True):
        assert re.search(r"OptimizerError: the state `count` of `.*` in Counted is no plain tensor on the host\.", text)


@pytest.mark.nightly
def test_ranks_that_need_more_of_the_host_than_there_is_are_refused_together(three: Processes):
    for first, then in three.run(without_room):
        assert re.match(r"ExecuteError: 3 ranks of one host need [\d.]+ \w+ of its memory, .*are available\.", first), (
            first
        )
        assert "All share" in first
        assert then == ""


def test_a_group_of_one_rank_is_a_process_alone():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        compiled = megatrain.compile(seeded_stack(2), device="cpu", process_group=dist.group.WORLD)
        assert compiled.megatrain.ranks is None
        compiled(stack_batch(0, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_process_group_is_one():
    with pytest.raises(megatrain.OptionError, match="process_group"):
        megatrain.compile(seeded_stack(2), process_group="gloo")  # pyright: ignore[reportArgumentType]
