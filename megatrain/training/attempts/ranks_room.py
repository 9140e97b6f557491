"""Ranks' room: before the first step, whether the host has room for what its ranks take together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatrain.counts import counted
from megatrain.errors import ExecuteError
from megatrain.memory.available import available_bytes
from megatrain.planning.host_plan import HostPlan
from megatrain.ranks.channels.host_channel import NUM_ROOMS
from megatrain.ranks.ranks import Ranks
from megatrain.sizes import format_bytes
from megatrain.training.setup import Setting

Agree = Callable[[Mapping[str, Any]], "list[dict[str, Any]] | None"]
"""Tells all ranks something, and returns what all tell."""
# Rows of a host plan that each process has for itself; of the others the ranks share one copy.
_OWN = ("state of no block", "constants", "slab", "parks", "values on the host", "device memory", "update scratch")


def check_room(ranks: Ranks, setting: Setting, plan: HostPlan, agree: Agree, *, is_shared: bool) -> None:
    """Refuses a step before any rank has allocated something for it; all ranks call it at the same time.

    Each rank by itself would find that its own part fits, and the system would end processes when all have begun.

    Args:
        ranks: The processes that train together.
        setting: Of this rank's step.
        plan: The memory that this rank's steps take.
        agree: See `Agree`.
        is_shared: The ranks share the model already: what each of them holds is the same memory.

    Raises:
        ExecuteError: If the ranks need more than there is.
        RanksError: If another rank fails.
    """
    kind = setting.kind
    # Gradients that wait for a norm or for serial updates are there once.
    names = _OWN if kind.keeps_totals else (*_OWN, "gradients")
    own = sum(map(plan.bytes_of, names)) if kind.is_shared else plan.total_bytes
    room = max((block.landing_bytes for block in setting.schedule.known_workload().blocks), default=0)
    held = min(plan.held_bytes, plan.total_bytes)
    words = agree({"own": own, "shared": plan.total_bytes - own, "room": room, "held": held})
    assert words is not None
    shared, room = (max(int(word[name]) for word in words) for name in ("shared", "room"))
    each, held_by_all = ([int(word[name]) for word in words] for name in ("own", "held"))
    # From each rank to the next, and back from the last one, unless totals stay where they come.
    rooms = (ranks.size - 1 + (not kind.keeps_totals)) * NUM_ROOMS * room
    needed = shared + sum(each) + rooms
    available = available_bytes() + (max(held_by_all) if is_shared else sum(held_by_all))
    if needed > available:
        parts = f"All share {format_bytes(shared)}, each" if shared else "They share nothing, each"
        further = "" if shared else '; or masters="exact", of which ranks share one copy'
        raise ExecuteError(
            f"{counted(ranks.size, 'rank')} of one host need {format_bytes(needed)} of its memory, "
            f"{format_bytes(available)} are available.\n"
            f"  {parts} has up to {format_bytes(max(each))}, and {format_bytes(rooms)} are between them; "
            f"{format_bytes(needed - available)} are missing.\n"
            f"  Use fewer devices, or smaller or fewer micro-batches, of which less is parked{further}."
        )
    agree({})  # nobody allocates before all have looked
