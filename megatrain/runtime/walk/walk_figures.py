"""WalkFigures: what a walk has moved and held."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.counts import counted


@dataclass(frozen=True, slots=True)
class WalkFigures:
    """What a walk did.

    Args:
        what: The call that walked.
        num_prefetches: Copies of state to the device.
        h2d_bytes: Their bytes.
        budget_bytes: The bound of device memory; None if the state is used in place.
        peak_bytes: Most bytes of the device that state, results and caches held.
    """

    what: str
    num_prefetches: int = 0
    h2d_bytes: int = 0
    budget_bytes: int | None = None
    peak_bytes: int = 0

    def __str__(self) -> str:
        if self.budget_bytes is None:
            return f"walk of {self.what}: the state is used in place"
        prefetches = counted(self.num_prefetches, "prefetch")
        return f"walk of {self.what}: {prefetches}, h2d {self.h2d_bytes} B, peak {self.peak_bytes} B"
