"""Updates that are due run as on the thread that usually takes them, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from megatrain.runtime.engine import ordinary_tensors


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors and another default device.

    A step that is dropped is completed where Python collects it: that may be while another model is made on meta.
    """
    with ordinary_tensors(), torch.device("cpu"), _disable_current_modes():
        yield
