"""find_way(): plans a step in each way in which its work can be divided among the devices of a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatrain.compiled.inside import Compiled
from megatrain.errors import MegatrainError
from megatrain.hardware.machine import usual_machine
from megatrain.options import REPLICATE, ROUND, SHARD
from megatrain.passes.interpret import reads_values
from megatrain.planning.across_devices import AcrossDevices, Agree, Tables, choose
from megatrain.planning.dealt_tables import DealtTables
from megatrain.ranks.chain import column
from megatrain.runtime.dealt_values import check_dense
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import RANKS
from megatrain.training.attempts.dealing import check_dealt, packed
from megatrain.training.setup import Setting, Setup
from megatrain.training.step_tables import StepTables
from megatrain.training.updating.update_times import has_gradient_hooks


def find_way(
    compiled: Compiled,
    setup: Setup,
    setting: Setting,
    agree: Agree,
    *,
    has_loss: bool,
) -> AcrossDevices:
    """Predicts a step like this rank's in each way; all ranks call it at the same time, and find the same.

    Args:
        compiled: The model, with its ranks; each shares its host with others.
        setup: Plans steps.
        setting: Of this rank's step, with whole weights.
        agree: See `Agree`.
        has_loss: Whether the caller's function makes the loss. Where blocks are dealt one rank makes the losses of all,
            and a function may use values of its own rank: nobody but the caller can tell.

    Raises:
        ScheduleError: If a step with whole weights doesn't fit.
        RanksError: If another rank fails.
    """
    ranks, link = compiled.ranks, None if compiled.ranks is None else compiled.ranks.link_bytes_per_s
    assert ranks is not None
    assert ranks.host is not None
    size = ranks.host.size
    machine = compiled.options.hardware or usual_machine(compiled.options.device)
    if link is not None:
        machine = replace(machine, further_rates={**machine.further_rates, Stream.GATHER: link})

    def streamed(shards: int) -> list[Schedule]:
        places = ["first", *["middle"] * (size - 2), "last"]
        kinds = {place: replace(setting.kind, ranks=place, shards=shards) for place in dict.fromkeys(places)}
        captures, loss_bytes = setting.captures, _loss_bytes(setting)
        divides = partial(setup.divides, captures)
        made = {place: setup.tables.predicted(captures, kind, loss_bytes, divides)[1] for place, kind in kinds.items()}
        return [made[place] for place in places]

    ways: dict[str, Tables | str] = {
        REPLICATE: lambda: streamed(1),
        SHARD: _no_shards(setting, link) or (lambda: streamed(size)),
        ROUND: _no_dealing(compiled, setup, setting, has_loss=has_loss)
        or (lambda: [_dealt(compiled, setup, setting, device, size) for device in range(size)]),
    }
    return choose(machine, ways, agree, link)


def _dealt(compiled: Compiled, setup: Setup, setting: Setting, device: int, size: int) -> Schedule:
    """The schedule of one of a host's devices to which blocks are dealt, with as many micro-batches of each rank."""
    captures, kind = [*setting.captures] * size, setting.kind
    tables = StepTables(compiled.options, compiled.budget)
    tables.deal_blocks(DealtTables(device, size), RANKS[0])
    dealt = tables.kind(len(captures), kind.updates, clip=kind.clip, reports_norm=kind.reports_norm)
    divides = partial(setup.divides, setting.captures)
    programs, schedule = tables.predicted(captures, dealt, _loss_bytes(setting), divides)
    check_dense(programs, compiled.options.device)
    return schedule


def _loss_bytes(setting: Setting) -> Callable[[], int]:
    return lambda: setting.schedule.known_workload().loss_bytes


def _no_shards(setting: Setting, link: float | None) -> str:
    """Why weights can't come in shards: a rank that runs its forward again needs the others."""
    if link is None:
        return "nothing moves them"
    if any(reads_values(template.graph) for program in setting.programs for template in program.templates.values()):
        return "Python code reads values of the forward, which may have to run again"
    return ""


def _no_dealing(compiled: Compiled, setup: Setup, setting: Setting, *, has_loss: bool) -> str:
    """Why blocks aren't dealt unless the caller asks for it."""
    ranks: Any = compiled.ranks
    if has_loss:
        return "loss= would make the losses of all ranks on one of them"
    if has_gradient_hooks(compiled.model):
        return "hooks on parameters would run on one rank"
    try:
        column(ranks.rank, ranks.hosts)
        check_dealt(setting, setup.optimizers)
        packed(setting.batches)
    except MegatrainError as error:
        return str(error).splitlines()[0].rstrip(".")
    return ""
