"""run_script(): a user's script, as it is, up to the training of its first trainer that streams, which is verified."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megatrain.checks import PATH
from megatrain.errors import OptionError

UPDATES = 3
"""How many are compared if nobody says."""
_WORD = "megatrain"


class TrainerVerdict(Protocol):
    """The report of a trainer."""

    @property
    def ok(self) -> bool:
        """Whether the trainer is right."""
        ...

    def to_json(self) -> str:
        """Returns the report as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the first trainer that a script trains.

    Args:
        updates: How many updates are compared.
        tolerance: See `verify` of the trainer.
        options: Of `megatrain.compile`, in place of the script's.
        folder: In place of the output folder of every trainer of the script.
    """

    updates: int
    tolerance: float | None
    options: Mapping[str, Any]
    folder: Path


class ScriptEndError(BaseException):
    """Ends a script whose trainer is verified. No `Exception`: what a script does about failures must not run."""


# Plain variables, not a context's: a script may train on a thread of its own.
_asked: list[Asked] = []
_reports: list[TrainerVerdict] = []


def asked() -> Asked | None:
    """What is asked of the next trainer; None if nothing runs that asks."""
    return _asked[-1] if _asked else None


@contextmanager
def nothing_asked() -> Generator[None]:
    """Lets trainers train in the body."""
    present = list(_asked)
    _asked.clear()
    try:
        yield
    finally:
        _asked[:] = present


def end_script(report: TrainerVerdict) -> NoReturn:
    """Hands in the report of the script's trainer, and ends the script.

    Raises:
        ScriptEndError: Always.
    """
    _reports.append(report)
    raise ScriptEndError("the trainer is verified, and not trained; the script ends here")


def run_script(
    path: str, arguments: Sequence[str], updates: int, tolerance: float | None, options: Mapping[str, Any]
) -> TrainerVerdict:
    """Runs a script until it trains.

    Args:
        path: Of the script.
        arguments: What it finds in `sys.argv` behind its own name.
        updates: See `Asked`.
        tolerance: See `Asked`.
        options: See `Asked`.

    Returns:
        The report of its trainer.

    Raises:
        OptionError: If there is no such script, it has nothing of megatrain, or it ends without training.
    """
    _check_script(path)
    before = list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        _asked.append(Asked(updates, tolerance, options, Path(folder)))
        sys.argv[:] = [path, *arguments]
        try:
            runpy.run_path(path, run_name="__main__")
        except (ScriptEndError, SystemExit) as end:  # a `finally` of the script's may have made another of the first
            if not _reports and isinstance(end, SystemExit) and end.code not in (None, 0):
                raise
        finally:
            sys.argv[:] = before
            found = _reports[:1]
            _asked.clear()
            _reports.clear()
    if found:
        return found[0]
    raise OptionError(
        f"`{path}` ended, and no trainer that streams was trained in it.\n"
        "  A script is verified where it calls train() of a class with megatrain.integrations.hf.Streamed in front, or "
        "of megatrain.integrations.hf.Trainer.\n"
        "  Use one of them; and give the script the arguments with which it trains, behind its name."
    )


def _check_script(path: str) -> None:
    PATH.check_flag("target", path, has_default=False)
    script = Path(path)
    if not script.is_file():
        raise OptionError(f"there is no file `{path}`.\n  A path is relative to the current folder.\n  Check the path.")
    # A script without megatrain would train to its end, into its own folder.
    if not any(_WORD in _text(each) for each in (script, *sorted(script.parent.glob("*.py")))):
        raise OptionError(
            f"`{path}` has nothing of megatrain, nor has a file next to it, so it wasn't run.\n"
            "  A trainer of another library would train to its end, and write into its own folder.\n"
            "  Put megatrain.integrations.hf.Streamed in front of the trainer's class (docs/trainers.md)."
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
