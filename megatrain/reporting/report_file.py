"""write_report(): a report's text as a file; check_report_path(): whether that can be, ahead of long work."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.errors import OptionError


def write_report(path: str | os.PathLike[str], text: str) -> None:
    """Writes a page or a trace.

    Raises:
        OptionError: If the file can't be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Refuses a path that can't be that of a file.

    Raises:
        OptionError: If its folder isn't there, or nobody may write to it.
    """
    place = Path(path)
    if not place.parent.is_dir():
        raise _refused(path, "there is no such folder")
    if place.is_dir():
        raise _refused(path, "it is a folder")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise _refused(path, "permission denied")


def _refused(path: str | os.PathLike[str], reason: str) -> OptionError:
    return OptionError(
        f'the report "{os.fspath(path)}" can\'t be written: {reason}.\n'
        "  A report is one file in a folder that exists.\n  Give another path, or make room."
    )
