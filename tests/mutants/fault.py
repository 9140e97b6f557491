"""A fault that is planted in a copy of the project, and the tests that must see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("megatrain", "tests", "docs", "examples", "benchmarks")
LIMIT_S = 600


@dataclass(frozen=True)
class Fault:
    """A change of one place of megatrain's source.

    Args:
        name: What is then wrong.
        path: The file, below `megatrain/`.
        old: Text that the file has exactly once.
        new: Takes its place.
        seen_by: The tests that must fail, as arguments of pytest.
        on_device: Whether these tests need the simulated device.
    """

    name: str
    path: str
    old: str
    new: str
    seen_by: tuple[str, ...]
    on_device: bool = False

    def planted_in(self, text: str) -> str:
        """Raises ValueError if the place isn't there, or isn't the only one."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times {self.old!r}, the place of: {self.name}")
        return text.replace(self.old, self.new)


def copied(folder: Path) -> Path:
    """A copy of the project that a fault can be planted in."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        ROOT / name for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
    ):
        shutil.copy(path, folder)
    return folder


def tried(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether the tests see a fault, in a copy that is as before afterwards; and what pytest said.

    Seen is only a test that fails: tests that can't be collected, or aren't there, see nothing.
    """
    path = folder / "megatrain" / fault.path
    before = path.read_text()
    path.write_text(fault.planted_in(before))
    plugin = ["-p", "tests.simulated_device.plugin"] if fault.on_device else []
    # Python's own `-m` puts the folder before the installed package.
    # Named tests may be nightly ones: so is a fault of several processes.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "nightly or not nightly"]
    environment = {**os.environ, "CI": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            [*command, *plugin, *fault.seen_by],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return True, f"still running after {LIMIT_S} s"
    finally:
        path.write_text(before)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode == 1, lines[-1] if lines else f"status {done.returncode}"
