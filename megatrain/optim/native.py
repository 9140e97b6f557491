"""The update of split masters in one pass, built from C by the machine's own compiler when it is first wanted."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("split_adamw.c")
LANES = 16
"""The kernel takes multiples of this many elements."""

_COMPILERS = ("cc", "gcc", "clang")
# No contraction and no reassociation: the bits are torch's.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-std=c11", "-shared", "-fPIC")


@dataclass(frozen=True, slots=True, eq=False)
class NativeKernel:
    """The compiled function."""

    function: Callable[..., None]

    def __call__(
        self,
        high: torch.Tensor,
        low: torch.Tensor,
        gradient: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        scalars: tuple[float, ...],
        *,
        threads: int,
    ) -> None:
        """Updates contiguous tensors of equal length in place, with the interpreter's lock released.

        Args:
            high: bf16.
            low: int16.
            gradient: fp32 or bf16.
            moments: First and second, fp32.
            scalars: As `split_adamw.c` lists them.
            threads: How many threads work on it.
        """
        assert high.numel() % LANES == 0
        self.function(
            high.data_ptr(),
            low.data_ptr(),
            gradient.data_ptr(),
            int(gradient.dtype == torch.bfloat16),
            moments[0].data_ptr(),
            moments[1].data_ptr(),
            (ctypes.c_float * len(scalars))(*scalars),
            high.numel(),
            threads,
        )


@functools.cache
def build(source: Path = SOURCE, compilers: tuple[str, ...] = _COMPILERS) -> NativeKernel | str:
    """Compiles the kernel once per process, in well below a second.

    Returns:
        The kernel, or why there is none.
    """
    compiler = next((path for path in map(shutil.which, compilers) if path), None)
    if compiler is None:
        return f"no C compiler: none of {', '.join(compilers)} is on the path"
    with tempfile.TemporaryDirectory(prefix="megatrain-") as folder:
        library = f"{folder}/split_adamw.so"
        command = [compiler, *_FLAGS, str(source), "-o", library, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            loaded = ctypes.CDLL(library)
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed: {error.stderr.strip()[:500]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"
    function = loaded.split_adamw
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, pointer, pointer, number, pointer, pointer, pointer, ctypes.c_int64, number]
    function.restype = None
    return NativeKernel(function)
