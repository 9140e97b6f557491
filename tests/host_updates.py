"""An optimizer on the host for a model that computes elsewhere: the eager reference of a run that updates on the host.

An accelerator's update rounds otherwise than the host's. Where a gradient is zero but for rounding, AdamW makes whole
steps of the difference, so runs whose gradients have equal bits would part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def is_away(parameter: nn.Parameter) -> bool:
    """Whether a parameter's values are on an accelerator."""
    return parameter.device.type not in ("cpu", "meta")


class HostUpdates:
    """Updates copies of parameters on the host; parameters on the host are their own copies.

    Args:
        parameters: What is trained.
        make: Makes the optimizer over the copies.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
        # A parameter on meta stands for one that a compiled model keeps on the host.
        self._pairs = [(p, nn.Parameter(p.detach().cpu()) if is_away(p) else p) for p in parameters]
        self._optimizer = make([master for _, master in self._pairs])

    def step(self) -> None:
        """Takes the parameters' gradients to the host, updates there, and brings the values back."""
        away = [(parameter, master) for parameter, master in self._pairs if master is not parameter]
        for parameter, master in away:
            master.grad = None if parameter.grad is None else parameter.grad.cpu()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in away:
                parameter.copy_(master)
