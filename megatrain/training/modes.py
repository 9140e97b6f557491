"""Due updates run as on their usual thread, in any mode of the caller."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from megatrain.runtime.engine import ordinary_tensors
from megatrain.torch_private import (
    disable_current_modes,
    function_modes,
    pop_function_mode,
    preserve_dispatch_keys,
    send_to_meta_kernels,
)


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors, function modes and another default device (one of these).

    A dropped step is completed when Python collects it, perhaps while another model is made on meta, or in the middle
    of a fake tensor's kernel.
    """
    with ordinary_tensors(), ExitStack() as function_modes_left, disable_current_modes(), preserve_dispatch_keys():
        for _ in function_modes():
            function_modes_left.enter_context(pop_function_mode())
        send_to_meta_kernels(False)
        yield
