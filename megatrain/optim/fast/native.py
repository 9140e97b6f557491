"""AdamW in one pass over memory, built from C by the machine's own compiler when it is first wanted."""

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

from megatrain.optim.masters.halves import SplitMaster, WholeMaster

SOURCE = Path(__file__).with_name("adamw.c")
LANES = 16
"""The kernel takes multiples of this many elements."""

_COMPILERS = ("cc", "gcc", "clang")
# No contraction and no reassociation: the bits are torch's.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-std=c11", "-shared", "-fPIC")


@dataclass(frozen=True, slots=True, eq=False)
class NativeKernel:
    """The compiled functions."""

    split: Callable[..., None]
    whole: Callable[..., None]

    def __call__(
        self,
        master: WholeMaster | SplitMaster,
        gradient: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        scalars: tuple[float, ...],
        *,
        threads: int,
    ) -> None:
        """Updates contiguous tensors of equal length in place, with the interpreter's lock released.

        Args:
            master: Flat.
            gradient: fp32 or bf16.
            moments: First and second, fp32.
            scalars: As `adamw.c` lists them.
            threads: How many threads work on it.
        """
        assert gradient.numel() % LANES == 0
        is_split = isinstance(master, SplitMaster)
        function = self.split if is_split else self.whole
        held = (master.high, master.low) if is_split else (master.values,)
        function(
            *(tensor.data_ptr() for tensor in held),
            gradient.data_ptr(),
            int(gradient.dtype == torch.bfloat16),
            *(tensor.data_ptr() for tensor in moments),
            (ctypes.c_float * len(scalars))(*scalars),
            gradient.numel(),
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
        library = f"{folder}/adamw.so"
        command = [compiler, *_FLAGS, str(source), "-o", library, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            loaded = ctypes.CDLL(library)
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed: {error.stderr.strip()[:500]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"
    pointer, number = ctypes.c_void_p, ctypes.c_int
    others = [pointer, number, pointer, pointer, pointer, ctypes.c_int64, number]
    loaded.adamw_split.argtypes = [pointer, pointer, *others]
    loaded.adamw_whole.argtypes = [pointer, *others]
    loaded.adamw_split.restype = loaded.adamw_whole.restype = None
    return NativeKernel(loaded.adamw_split, loaded.adamw_whole)
