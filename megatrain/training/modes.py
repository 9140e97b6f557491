"""Updates that are due run as on the thread that usually takes them, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from megatrain.runtime.engine import ordinary_tensors
from megatrain.torch_private import disable_current_modes


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors and another default device.

    A step that is dropped is completed where Python collects it: that may be while another model is made on meta.
    """
    with ordinary_tensors(), torch.device("cpu"), disable_current_modes():
        yield
