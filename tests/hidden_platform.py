"""Hides what Linux has and Windows hasn't, in a process of its own, and trains there.

    python -m tests.hidden_platform FOLDER

`tests/test_hidden_platform.py` runs this. What other libraries do isn't hidden: each is imported before.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import mmap
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
_OF_OS = (
    "O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW O_NONBLOCK fork forkpty getgid getloadavg getuid killpg memfd_create "
    "mkfifo pidfd_open posix_fadvise posix_fallocate pread preadv pwrite pwritev register_at_fork sched_getaffinity "
    "sched_setaffinity sysconf uname"
)
_OF_SIGNAL = "SIGALRM SIGHUP SIGKILL SIGUSR1 SIGUSR2 pthread_sigmask sigwait"
_OF_MMAP = "MAP_ MADV_ PROT_"


class Map(mmap.mmap):
    """`mmap.mmap` with the arguments that Windows takes; it advises nothing."""

    def __new__(cls, fileno: int, length: int, tagname: str | None = None, offset: int = 0) -> Map:
        # What no other process may see, as it has no name.
        return super().__new__(cls, fileno, length, flags=_PRIVATE, offset=offset)

    @property
    def madvise(self) -> Any:
        raise AttributeError("madvise")


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def hide() -> None:
    """Hides it from whatever is imported from now on, for the rest of the process."""
    for name in _MODULES:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    for name in [*_OF_OS.split(), *(name for name in dir(os) if name.startswith("SCHED_"))]:
        delattr(os, name)
    for name in _OF_SIGNAL.split():
        delattr(signal, name)
    for name in [name for name in dir(mmap) if name.startswith(tuple(_OF_MMAP.split()))]:
        delattr(mmap, name)
    mmap.mmap = Map  # pyright: ignore[reportAttributeAccessIssue]
    shutil.which = lambda *_, **__: None
    _hide_files()
    _hide_c_library()
    # Windows reads text in an encoding of its own, unless it is given.
    warnings.filterwarnings("error", category=EncodingWarning, module="megatrain")


def _hide_files() -> None:
    open_file, open_descriptor = io.open, os.open

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and str(file).startswith(("/proc", "/sys")) and _asks_megatrain():
            raise FileNotFoundError(2, "no such file", str(file))
        return open_file(file, *args, **kwargs)

    def descriptor(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Windows opens no folders", str(path))
        return open_descriptor(path, *args, **kwargs)

    io.open = builtins.open = opened
    os.open = descriptor


def _asks_megatrain() -> bool:
    """Whether the library asks for a file, itself or by pathlib, and not psutil for it."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("pathlib", "io")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("megatrain")


def _hide_c_library() -> None:
    load = ctypes.CDLL.__init__

    def loaded(self: ctypes.CDLL, name: Any, *args: Any, **kwargs: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        load(self, name, *args, **kwargs)

    ctypes.CDLL.__init__ = loaded


def train(folder: Path) -> None:
    """Trains a model as eager does, saves it, and goes on from the checkpoint."""
    import torch

    import megatrain
    from megatrain.base import host_limits
    from megatrain.base.native.native_kernel import ADAMW

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(3)
        ]
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def stepped(step: megatrain.TrainStep, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step([batch[:4], batch[4:]])

    batches = list(torch.randn(4, 8, 64))
    eager, optimizer = made()
    torch.manual_seed(1)
    for batch in batches:
        torch.stack([eager(part).square().mean() for part in (batch[:4], batch[4:])]).mean().backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    options: Any = {"loss": lambda out, _: out.square().mean(), "max_grad_norm": 0.1}

    def compiled() -> tuple[megatrain.CompiledModel, torch.optim.Optimizer]:
        model, optimizer = made()
        return megatrain.compile(model, memory="1MiB", block_bytes=1), optimizer

    streamed = compiled()
    step = megatrain.TrainStep(*streamed, **options)
    torch.manual_seed(1)
    stepped(step, batches[:2])
    for _ in range(2):  # the second replaces the first
        step.save(folder / "run")
    saved = {name: value.clone() for name, value in streamed[0].state_dict().items()}
    stepped(step, batches[2:])
    resumed = compiled()
    stepped(megatrain.TrainStep.load(folder / "run", *resumed, **options), batches[2:])
    for trained, _ in (streamed, resumed):
        for (name, value), expected in zip(trained.state_dict().items(), eager.state_dict().values(), strict=True):
            assert torch.equal(value, expected), name
    # Without such maps of files, frozen weights are read although the host is said to have no room for them.
    frozen = made()[0].requires_grad_(False).eval()
    read: Any = megatrain.compile(frozen, memory="1MiB", block_bytes=1, weights=folder / "run")
    assert read.megatrain.engine.leave_in_files()
    assert torch.equal(read(batches[0]), frozen(batches[0]))
    assert all(torch.equal(value, saved[name]) for name, value in frozen.state_dict().items())
    assert read.megatrain.engine.in_files == frozenset()
    assert sorted(path.name for path in folder.iterdir()) == ["run"]
    assert host_limits.update_threads() >= 1
    assert host_limits.cache_bytes() == 0
    assert host_limits.locked_bytes() is None  # without /proc nothing says that this is WSL2
    sys.platform = "win32"
    locked = host_limits.locked_bytes()
    assert locked is not None
    assert locked[1] == "half of the memory, as Windows has it"
    host_limits.return_free_memory()
    assert ADAMW.fault() is not None
    print("trained")


if __name__ == "__main__":
    # What other libraries take of the system is their own business.
    for library in ("concurrent.futures.thread", "networkx", "numpy", "psutil", "random", "subprocess", "torch"):
        importlib.import_module(library)
    hide()
    train(Path(sys.argv[1]))
