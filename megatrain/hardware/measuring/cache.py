"""cached(): what was measured on this machine before, kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import MegatrainError

_FORMAT = 4  # one more whenever a figure means something else than before


def cached(
    folder: Path,
    facts: str,
    measure: Callable[[], Mapping[str, Any]],
    *,
    accept: Callable[..., object],
    fresh: bool = False,
) -> Mapping[str, Any]:
    """What `measure` found under the same facts before, or finds now.

    A file that can't be read, is of other facts or isn't whole counts as none. One that can't be written is none of the
    caller's concern: the next process measures again.

    Args:
        folder: Of the files; made if there is something to write.
        facts: All that the figures depend on: machine, device, driver, versions.
        measure: Measures them.
        accept: Raises an error unless it gets figures by name that are whole and right.
        fresh: Whether to measure anyway.
    """
    file = folder / f"hardware-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    found = None if fresh else _read(file, facts, accept)
    if found is None:
        found = measure()
        with contextlib.suppress(OSError):
            _write(file, {"format": _FORMAT, "facts": facts, "figures": found})
    return found


def _read(file: Path, facts: str, accept: Callable[..., object]) -> dict[str, Any] | None:
    try:
        data: Any = json.loads(file.read_text())
        if data["format"] != _FORMAT or data["facts"] != facts:
            return None
        accept(**data["figures"])
        return data["figures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MegatrainError):
        return None


def _write(file: Path, data: Mapping[str, Any]) -> None:
    """Writes a file that is there whole or not at all, also if another process writes it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w") as part:
            json.dump(data, part, indent=1)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
