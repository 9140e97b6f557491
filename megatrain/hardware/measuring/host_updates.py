"""Host updates: what a fused update reads and writes in host memory, alone and beside other work."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.device.kinds import HOST
from megatrain.hardware.measuring.timing import seconds_of
from megatrain.native.adamw_kernels import LANES, WHOLE

_ELEMENTS = LANES << 20  # 256 MiB in all, more than caches hold
# AdamW over fp32 reads parameter, gradient and two moments, and writes three of them.
_BYTES = 7 * 4 * _ELEMENTS
# Those of a step with a small learning rate; see `adamw.c`.
_SCALARS = (1.0, 1.0 - 1e-6, 0.1, 0.999, 1e-3, 0.05, 1e-8, -1e-3)


class Update:
    """An update of the host: megatrain's own AdamW, or torch's where there is no C compiler.

    Args:
        threads: How many it takes.
    """

    def __init__(self, threads: int) -> None:
        values, gradient, *moments = (torch.full((_ELEMENTS,), 1e-3) for _ in range(4))
        self._run = _torchs(values, gradient, moments)
        if WHOLE.fault() is None:
            self._run = lambda: WHOLE(values, gradient, 0, *moments, _SCALARS, _ELEMENTS, threads)

    def __call__(self) -> None:
        """One update."""
        self._run()

    def rate(self, least_s: float) -> float:
        """Bytes per second that it reads and writes."""
        return _BYTES / seconds_of(HOST, self._run, least_s=least_s)


def _torchs(values: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor]) -> Callable[[], None]:
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    names = ("exp_avg", "exp_avg_sq")
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **dict(zip(names, moments, strict=True))}

    def run() -> None:
        optimizer.step()

    return run
