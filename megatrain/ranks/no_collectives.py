"""NoCollectives: code that must not wait for other processes, because they may wait for this one."""

from __future__ import annotations

from typing import Any

from megatrain.errors import ExecuteError
from megatrain.torch_private import TorchDispatchMode


class NoCollectives(TorchDispatchMode):
    """Refuses collectives of `torch.distributed` in the body, on this thread.

    The losses of a step are such code: a rank computes its own when the sum of the rank before has come, which that
    rank hands on after its own losses.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            raise ExecuteError(
                f"the loss exchanges values with other processes ({name}), within a training step of all.\n"
                "  A rank computes its loss when the sums of the rank before have come, so that one waits for this "
                "rank's loss\n"
                "  here, and would wait for ever.\n"
                "  Exchange them ahead of the model's call or behind the step: in a callback, or where they are logged."
            )
        return func(*args, **(kwargs or {}))
