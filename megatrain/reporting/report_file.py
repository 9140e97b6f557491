"""write_report(): the text of a report as a file."""

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
        raise OptionError(
            f'path="{os.fspath(path)}" can\'t be written: {error.strerror or error}.\n'
            "  A report is one file in a folder that exists.\n  Give another path, or make room."
        ) from error
