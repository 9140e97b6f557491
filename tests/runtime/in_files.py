"""What the tests of weights that stay in their files share: a frozen model with adapters, its file, its training."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.host_limits import control_groups
from tests.runtime.saved import save

WIDTH, DEPTH = 48, 6


class Layer(nn.Module):
    """A frozen layer with an adapter, whose buffer is in the file as well."""

    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x))) * self.scale


def net(width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    return nn.Sequential(*(Layer(width) for _ in range(depth)))


def saved(folder: Path, width: int = WIDTH, depth: int = DEPTH) -> Path:
    """The file of a net's weights."""
    torch.manual_seed(0)
    return save(folder / "model.safetensors", net(width, depth).state_dict())


def compiled(file: Path, *, stay: bool, width: int = WIDTH, depth: int = DEPTH, **options: Any) -> Any:
    """A net on meta with its weights in a file, which stay there, or are decided over as always."""
    with torch.device("meta"):
        model = net(width, depth)
    made = megatrain.compile(model, **{"device": "cpu", "memory": "1MiB", "weights": file, **options})
    if stay:
        assert made.megatrain.engine.leave_in_files()
    return made


def stepping(made: Any) -> megatrain.TrainStep:
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    return megatrain.TrainStep(made, torch.optim.AdamW(trained, lr=1e-2), loss=lambda out, _: out.square().mean())


def batch(number: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(number))


def losses(step: megatrain.TrainStep, numbers: range = range(4), width: int = WIDTH) -> list[float]:
    return [float(step([batch(number, width)])) for number in numbers]


def frozen(made: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in made.named_parameters() if not parameter.requires_grad}


def is_in(file: Path, tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a map of this file, as the system says."""
    start = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found and int(found[1], 16) <= start < int(found[2], 16):
            return line.endswith((str(file), f"{file} (deleted)"))
    return False


def written_bytes(file: Path) -> int:
    """Bytes of the maps of a file that this process has written, and so holds in memory of its own."""
    found = re.findall(
        rf"{re.escape(str(file))}(?: \(deleted\))?\n(?:(?!Anonymous).*\n)*Anonymous: *(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    return 1024 * sum(map(int, found))


@contextmanager
def control_group(nbytes: int) -> Generator[Path]:
    """A control group below this process's own that allows so much memory; skips the test where none can be made."""
    version, own = next(control_groups("memory", Path("/")), (0, Path("/")))
    limit = {1: "memory.limit_in_bytes", 2: "memory.max"}.get(version)
    group = own / f"megatrain-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this process may make no control groups: {error}")
    try:
        # RLIMIT_DATA is no way out: it counts private maps that may be written, also while nobody has written them.
        if limit is None or not (group / limit).exists():
            pytest.skip("this process's control group bounds no memory of others below it")
        (group / limit).write_text(str(nbytes))
        yield group
    finally:
        for _ in range(100):  # the group is busy until its processes are gone
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


HAS_MAPS = hasattr(mmap, "MAP_PRIVATE") and Path("/proc/self/smaps").exists()
