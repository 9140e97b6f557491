"""NativeKernel: a C function, built by the machine's own compiler on first use."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Argument = Literal["tensor", "floats", "int64s", "int32", "int64"]
"""What a function of C takes: a pointer to a tensor's elements, to fp32 or to whole numbers, or a whole number."""

_TYPES = {
    "tensor": ctypes.c_void_p,
    "floats": ctypes.c_void_p,
    "int64s": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
}
_ELEMENTS = {"floats": ctypes.c_float, "int64s": ctypes.c_int64}
_COMPILERS = ("cc", "gcc", "clang")
# No contraction and no reassociation: the bits follow from the source.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-std=c11", "-shared", "-fPIC")


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """A function of C that returns nothing; calls release the interpreter's lock.

    Args:
        source: The file, C11 with OpenMP; it is compiled once per process.
        function: Its name in the file.
        signature: The types of its arguments.
    """

    source: Path
    function: str
    signature: tuple[Argument, ...]

    def fault(self) -> str | None:
        """Returns why it can't be called here, or None if it can. The first call compiles, in well below a second."""
        library = build(self.source)
        return library if isinstance(library, str) else None

    def __call__(self, *arguments: torch.Tensor | int | Sequence[float]) -> None:
        """Calls the function. Tensors are contiguous and on the host; it writes into them what its source says.

        Sequences of numbers are copied into an array.
        """
        _loaded(self)(*map(_as_c, self.signature, arguments))

    def loaded(self) -> Callable[..., None]:
        """The function itself, for calls that are repeated: it takes numbers, and addresses for all else."""
        return _loaded(self)


def _as_c(kind: Argument, argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous()
        return argument.data_ptr()
    element = _ELEMENTS.get(kind)
    return argument if element is None else (element * len(argument))(*argument)


@functools.cache
def _loaded(kernel: NativeKernel) -> Callable[..., None]:
    library = build(kernel.source)
    assert not isinstance(library, str), library
    function = library[kernel.function]  # not an attribute, which all kernels of this name would share
    function.argtypes, function.restype = [_TYPES[argument] for argument in kernel.signature], None
    return function


@functools.cache
def build(source: Path, compilers: tuple[str, ...] = _COMPILERS) -> ctypes.CDLL | str:
    """Compiles a file of C once per process.

    Returns:
        The loaded library, or the reason why there is none.
    """
    compiler = next((path for path in map(shutil.which, compilers) if path), None)
    if compiler is None:
        return f"no C compiler: none of {', '.join(compilers)} is on the path"
    # Windows doesn't remove a library that is loaded.
    with tempfile.TemporaryDirectory(prefix="megatrain-", ignore_cleanup_errors=True) as folder:
        library = f"{folder}/{source.stem}.so"
        command = [compiler, *_FLAGS, str(source), "-o", library, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            return ctypes.CDLL(library)
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed: {error.stderr.strip()[:500]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"


LANES = 16
"""`adamw.c` takes multiples of this many elements."""

ADAMW = NativeKernel(Path(__file__).with_name("adamw.c"), "adamw", ("int64s", "floats", "int64", "int32"))
ADAMW_8BIT = NativeKernel(Path(__file__).with_name("adamw_8bit.c"), "adamw_8bit", ADAMW.signature)
