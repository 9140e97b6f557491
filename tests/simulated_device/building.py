"""Compiles the simulated device with the machine's compiler, once per version of torch and of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "source"
# Torch's headers take most of the time, so many files are compiled as one. The lists of autocast are hundreds of
# templates that take as long as all else to optimise, for nothing.
UNITS = {"unit_device": "-O1", "unit_kernels": "-O1", "unit_autocast": "-O0"}
_FLAGS = ["-std=c++20", "-fPIC", "-w"]


class BuildError(RuntimeError):
    """The compiler refused the sources; its words are in the message."""


def compiler() -> str | None:
    """The path of the C++ compiler, `$CXX` first; None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    return None


def library_path() -> Path:
    """Where the library for this torch and these sources belongs; it may not be there yet."""
    digest = hashlib.sha256(repr((UNITS, _FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatrain-tests" / f"{torch.__version__}-{digest.hexdigest()[:16]}" / "libsimulated.so"


def built_library() -> Path:
    """Returns the library, compiled first if it isn't in the cache. One of several processes compiles, the rest wait.

    Raises:
        BuildError: If the compiler fails.
    """
    path = library_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if not path.exists():
                _build(path)
    return path


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    tool = compiler()
    assert tool is not None
    part = f".{os.getpid()}.part"
    objects = {unit: path.parent / f"{unit}{part}.o" for unit in UNITS}
    made = path.with_suffix(part)
    try:
        commands = [
            [tool, *_FLAGS, UNITS[unit], *includes, "-c", str(SOURCES / f"{unit}.cpp"), "-o", str(out)]
            for unit, out in objects.items()
        ]
        _run(commands)
        libraries = [
            f"-L{torch_folder / 'lib'}",
            f"-Wl,-rpath,{torch_folder / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            "-ltorch",
        ]
        _run([[tool, "-shared", *map(str, objects.values()), "-o", str(made), *libraries]])
        made.rename(path)  # so that nobody finds half a library
    finally:
        for leftover in (*objects.values(), made):
            leftover.unlink(missing_ok=True)


def _run(commands: list[list[str]]) -> None:
    """Runs the commands at the same time."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        if process.returncode != 0:
            raise BuildError(f"the simulated device can't be compiled:\n{error[-8000:]}")
