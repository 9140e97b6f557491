"""Host updates: what a fused update reads and writes in host memory, alone and beside other work."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.device.kinds import HOST
from megatrain.hardware.measuring.timing import seconds_of
from megatrain.memory.available import available_bytes
from megatrain.memory.processor_caches import cache_bytes
from megatrain.native.adamw_kernels import LANES, WHOLE

_LEAST, _MOST = 256 << 20, 4 << 30
_BEYOND_CACHES = 4
# Parameter, gradient and two moments, in fp32.
_HELD = 4 * 4
# AdamW reads them, and writes three of them.
_TOUCHED = 7 * 4
# Those of a step with a small learning rate; see `adamw.c`.
_SCALARS = (1.0, 1.0 - 1e-6, 0.1, 0.999, 1e-3, 0.05, 1e-8, -1e-3)


def elements_beyond(caches: int, available: int) -> int:
    """How many parameters an update has so that their memory is far larger than the caches, as a model's is.

    A server's caches hold 300 MiB and more, and are three times as fast as its memory.

    Args:
        caches: Bytes of the caches.
        available: Bytes of free memory, of which at most an eighth is taken.
    """
    nbytes = min(max(_LEAST, _BEYOND_CACHES * caches), _MOST, max(_LEAST, available // 8))
    return nbytes // (_HELD * LANES) * LANES


class Update:
    """An update of the host: megatrain's own AdamW, or torch's where there is no C compiler.

    Args:
        threads: How many it takes.
    """

    def __init__(self, threads: int) -> None:
        number = elements_beyond(cache_bytes(), available_bytes())
        values, gradient, *moments = (torch.full((number,), 1e-3) for _ in range(4))
        self._nbytes = _TOUCHED * number
        self._run = _torchs(values, gradient, moments)
        if WHOLE.fault() is None:
            self._run = lambda: WHOLE(values, gradient, 0, *moments, _SCALARS, number, threads)

    def __call__(self) -> None:
        """One update."""
        self._run()

    def rate(self, least_s: float) -> float:
        """Bytes per second that it reads and writes."""
        return self._nbytes / seconds_of(HOST, self._run, least_s=least_s)


def _torchs(values: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor]) -> Callable[[], None]:
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    names = ("exp_avg", "exp_avg_sq")
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **dict(zip(names, moments, strict=True))}

    def run() -> None:
        optimizer.step()

    return run
