"""Captures what `torch.compile` has wrapped by the Python code inside: two compilers can't both own one forward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled() -> Generator[None]:
    """Has modules and functions that `torch.compile` made run their own Python code meanwhile.

    Otherwise kernels would be compiled for fake tensors, and the capture would see none of the calls in them.
    """
    if "torch._dynamo" not in sys.modules:
        yield  # nothing was compiled yet, and importing it takes a second
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # The hooks for all modules that it warns of are those of the capture.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        yield
