"""Ranks' room: before the first step, whether the memory of a host has room for what its ranks take together."""

from __future__ import annotations

from megatrain.memory.available import available_bytes
from megatrain.planning.across_devices import Agree
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.what_if.devices_host import DevicesHost, largest_room, own_bytes, sent_bytes
from megatrain.ranks.ranks import Ranks
from megatrain.training.setup import Setting


def check_room(ranks: Ranks, setting: Setting, plan: HostPlan, agree: Agree, *, is_shared: bool) -> None:
    """Refuses a step before any rank has allocated something for it; all ranks call it at the same time.

    Each rank by itself would find that its own part fits, and the system would end processes when all have begun.

    Args:
        ranks: The processes that train together.
        setting: Of this rank's step.
        plan: The memory that this rank's steps take.
        agree: Tells all ranks something, and returns what all tell.
        is_shared: The ranks of this host share the model already: what each of them holds is the same memory.

    Raises:
        ExecuteError: If the ranks of this host need more than there is.
        RanksError: If another rank fails.
    """
    state = own_bytes(plan, setting.kind)
    own = state + sent_bytes(0 if ranks.host is None else ranks.host.index, setting.schedule)
    held = min(plan.held_bytes, plan.total_bytes)
    words = agree(
        {"own": own, "shared": plan.total_bytes - state, "room": largest_room(setting.schedule), "held": held}
    )
    assert words is not None
    if ranks.host is not None:
        mates = [words[rank] for rank in ranks.host.ranks]
        shared, room = (max(int(word[name]) for word in mates) for name in ("shared", "room"))
        needed = DevicesHost.made(shared, [int(word["own"]) for word in mates], room, setting.kind)
        held_by_all = [int(word["held"]) for word in mates]
        needed.check(available_bytes() + (max(held_by_all) if is_shared else sum(held_by_all)))
    agree({})  # nobody allocates before all have looked
