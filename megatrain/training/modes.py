"""Due updates run as on their usual thread, in any mode of the caller."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from megatrain.runtime.engine import ordinary_tensors
from megatrain.torch_private import disable_current_modes, preserve_dispatch_keys, send_to_meta_kernels


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors and another default device.

    A dropped step is completed when Python collects it, perhaps while another model is made on meta, or in the middle
    of a fake tensor's kernel.
    """
    with ordinary_tensors(), torch.device("cpu"), disable_current_modes(), preserve_dispatch_keys():
        send_to_meta_kernels(False)
        yield
