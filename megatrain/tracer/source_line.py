"""Whose code runs: the user's source line behind a torch call, and whose a file is."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
"""How the paths of torch's own files begin."""
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""How the paths of this package's own files begin."""
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_is_users: dict[CodeType, bool] = {}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A place in the user's code; prints as `` model.py:41: `if scores.max() > 0:` ``."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself, stripped."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        place = f"{os.path.basename(self.file)}:{self.line}"
        return f"{place}: `{self.text}`" if self.text else f"{place} in {self.function}"


def user_line() -> SourceLine | None:
    """Returns the innermost line of the call stack that is neither torch's, Triton's nor megatrain's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack reads files and is 1000 times slower
    while frame is not None:
        code = frame.f_code
        users = _is_users.get(code)
        if users is None:
            is_triton = str(frame.f_globals.get("__name__")).startswith("triton.")  # `kernel[grid]` is a call in it
            users = not is_triton and not code.co_filename.startswith((TORCH, OURS, "<"))
            _is_users[code] = users
        if users:
            return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None


def file_of(kind: type) -> str:
    """Returns the file that defines a class; `""` in an interactive session, `"<"` for what is built in."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ("<" if kind.__module__ != "__main__" else "")


def package_of(file: str) -> str | None:
    """Returns the top folder of an installed package's file."""
    return file[len(_PACKAGES) :].partition(os.sep)[0] if file.startswith(_PACKAGES) else None


def is_library(file: str) -> bool:
    """Tells whether a file is torch's or of the standard library, in whose folder packages may lie."""
    return file.startswith(TORCH) or (file.startswith(_STANDARD) and not file.startswith(_PACKAGES))
