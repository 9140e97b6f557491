"""Between devices: the ticks of the ops that bring values and their gradients from one device to another.

Where several hosts deal the blocks, sums of gradients go from host to host on the same streams; see `place_sum`.
"""

from __future__ import annotations

from megatrain.scheduler.kinds.crossing_effects import Crossings

_Ticks = dict[int, list[int]]
"""Of each block the ticks of all micro-batches."""


class CrossingTicks:
    """Places the `X` and `D` of a device where blocks are dealt to several.

    What comes is there one compute step before it is needed, and so comes beside the one before: as little of it as can
    be takes memory at the same time. What goes leaves beside the next compute step. So each stream keeps to the order
    of compute, which is one order on all devices: that of one process.

    Args:
        crossings: What crosses.
        come: Gets the ticks of each `X` from another device.
        go: Gets those of each `X` to another device.
        gradients_come: Gets those of each `D` from another device.
        gradients_go: Gets those of each `D` to another device.
        sums_come: Gets the tick of each `R`.
        sums_go: Gets the tick of each `P`.
    """

    def __init__(
        self,
        crossings: Crossings,
        come: _Ticks,
        go: _Ticks,
        gradients_come: _Ticks,
        gradients_go: _Ticks,
        sums_come: dict[int, int],
        sums_go: dict[int, int],
    ) -> None:
        self._coming = {"F": (crossings.come, come), "B": (crossings.gradients_come, gradients_come)}
        self._going = {"F": (crossings.go, go), "B": (crossings.gradients_go, gradients_go)}
        self._receive = self._send = -1
        self._sums_come, self._sums_go = sums_come, sums_go
        self._leaving: list[tuple[_Ticks | None, int]] = []  # None is a sum

    def place_coming(self, what: str, block: int, earliest: int) -> int:
        """Places what a compute step needs from other devices; returns its tick, or -1 if that is nothing.

        Args:
            what: `"F"` or `"B"`.
            block: Its block.
            earliest: The tick from which on it may come.
        """
        moved, ticks = self._coming[what]
        if not moved[block]:
            return -1
        self._receive = max(self._receive + 1, earliest)
        ticks.setdefault(block, []).append(self._receive)
        return self._receive

    def place_sum(self, block: int, earliest: int) -> int:
        """Places the sum of the host before, which a compute step needs; returns its tick.

        It comes behind all that the step needs from other devices: these are sooner there, and don't wait for a host.

        Args:
            block: Whose gradients.
            earliest: As in `place_coming`.
        """
        self._receive = self._sums_come[block] = max(self._receive + 1, earliest)
        return self._receive

    def leave(self, what: str, block: int) -> None:
        """Notes what goes to other devices after a compute step."""
        moved, ticks = self._going[what]
        if moved[block]:
            self._leaving.append((ticks, block))

    def leave_sum(self, block: int) -> None:
        """Notes the sum that goes to the next host, behind all that goes to other devices: these wait for it."""
        self._leaving.append((None, block))

    def place_leaving(self, after: int) -> None:
        """Places what was noted, in later ticks than `after`."""
        for ticks, block in self._leaving:
            self._send = max(self._send, after) + 1
            if ticks is None:
                self._sums_go[block] = self._send
            else:
                ticks.setdefault(block, []).append(self._send)
        self._leaving.clear()

    @property
    def num_ticks(self) -> int:
        """Rows that they take."""
        return max(self._receive, self._send) + 1
