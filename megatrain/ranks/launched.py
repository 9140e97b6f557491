"""launched_group(): joins the processes that torchrun has started for a command, of which the first one prints."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatrain.progress import quiet

_WAITS = timedelta(days=1)
"""For the first process, which reads or copies large files alone; if one ends, its connections break at once."""


@contextmanager
def launched_group(backend: str | None = None) -> Generator[Any]:
    """Joins the processes that torchrun has started, for the time of the body; all but the first print nothing.

    Args:
        backend: Of the process group; None takes Gloo for the host, and for an accelerator what torch has for its kind.

    Yields:
        The process group; None for a process that torchrun hasn't started.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield None
        return
    dist.init_process_group(backend, timeout=_WAITS)
    with ExitStack() as silent:
        if dist.get_rank() > 0:
            silent.enter_context(redirect_stdout(io.StringIO()))
            silent.enter_context(quiet())
        yield dist.group.WORLD
    # Only where the body ended well: the end of a group whose processes have failed may wait for them.
    dist.destroy_process_group()
