"""Which ranks can train together: each with a card of its own, and kernels with the bits of one process."""

from __future__ import annotations

from megatrain.device import Device
from megatrain.errors import OptionError, RanksError
from megatrain.ranks.ranks import ProcessGroup, Ranks


def check_cards(ranks: Ranks, device: Device) -> None:
    """Refuses ranks that compute on one card, each of which would plan with all of its memory. All ranks call it.

    Raises:
        RanksError: Naming them.
    """
    cards = ranks.exchange(device.identity())
    for card in filter(None, dict.fromkeys(cards)):
        found = [str(rank) for rank, other in enumerate(cards) if other == card]
        if len(found) > 1:
            raise RanksError(
                f"ranks {', '.join(found)} compute on the same device, {device} {device.card()}.\n"
                "  Each rank has a device of its own, whose memory it plans.\n"
                '  Give it one before compile: torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"])).'
            )


def check_ranks(group: ProcessGroup | None, kernels: str) -> None:
    """Refuses what several ranks can't do yet.

    Raises:
        OptionError: Naming the option.
    """
    if group is None or group.size() == 1:
        return
    if kernels == "inductor":
        raise OptionError(
            f'process_group= has {group.size()} ranks, but kernels="{kernels}".\n'
            "  Each rank would compile kernels of its own, whose bits may differ.\n"
            '  Leave kernels out: "eager" has the bits of one process.'
        )
