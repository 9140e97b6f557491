"""The model that a command line names as `module:function`, and failures of the user's own code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import PATH
from megatrain.errors import MegatrainError, OptionError
from megatrain.planning.model_sizes import model_and_inputs

_PACKAGE = Path(__file__).parents[1]
_NOT_THEIRS = (*(str(Path(str(m.__file__)).parent) for m in (importlib, torch)), str(_PACKAGE), "<frozen")


def command_target(target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Calls the function that a target names, `module:function` or `path/to/file.py:function`.

    Raises:
        OptionError: If there is no such function, it fails, or doesn't return `(model, inputs)`.
    """
    function = target_function(target)
    with users_failures(f"`{target}`"):
        made = function()
    return model_and_inputs(made, f"`{target}`")


def target_function(target: str) -> Callable[[], Any]:
    """Finds the function that a target names.

    Raises:
        OptionError: If there is no such function.
    """
    source, _, path = target.rpartition(":")
    if not source or not path:
        raise OptionError(
            f"`{target}` doesn't name a function.\n  A target is a module or a file, a colon, and a function in it.\n"
            "  Write for example models.py:build or package.models:build."
        )
    found: Any = _file(source) if source.endswith(".py") else _module(source)
    for name in path.split("."):
        if not hasattr(found, name):
            known = ", ".join(n for n, v in vars(found).items() if callable(v) and not n.startswith("_"))
            raise OptionError(
                f"`{source}` has no `{path}`.\n  A target ends in a function that returns (model, inputs).\n"
                f"  It has: {known or 'no function at all'}."
            )
        found = getattr(found, name)
    if not callable(found) or isinstance(found, nn.Module):
        raise OptionError(
            f"`{target}` is a {type(found).__qualname__}, not a function.\n"
            "  A target ends in a function without arguments that returns (model, inputs).\n"
            "  Write `def build(): return model, inputs`."
        )
    return found


def _module(name: str) -> ModuleType:
    try:
        missing = importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        missing = True  # its package is missing, or `name` is no name
    except Exception as error:  # a package of the user's is imported to look inside
        raise _failure(f"importing `{name}`", error) from error
    if missing:
        raise OptionError(
            f"there is no module `{name}`.\n  Modules are looked for in the current folder and among installed "
            "packages.\n"
            "  Check the name, or give a path that ends in .py."
        )
    with users_failures(f"importing `{name}`"):
        return importlib.import_module(name)


def _file(text: str) -> ModuleType:
    PATH.check_flag("target", text, has_default=False)
    path = Path(text)
    if not path.is_file():
        raise OptionError(f"there is no file `{text}`.\n  A path is relative to the current folder.\n  Check the path.")
    # A name of its own: a file called json.py must not become the module json.
    name = f"verified_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with users_failures(f"importing `{text}`"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def importable(target: str) -> Generator[None]:
    """Lets the target import its neighbours, as Python lets a script."""
    source = target.rpartition(":")[0]
    is_file = source.endswith(".py") and PATH.fault(source) is None
    folder = str(Path(source).resolve().parent) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def users_failures(doing: str) -> Generator[None]:
    """Turns what the user's code raises into an error that shows their traceback; ours pass unchanged."""
    try:
        yield
    except MegatrainError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(doing, error) from error


def _failure(doing: str, error: BaseException) -> OptionError:
    told = traceback.TracebackException.from_exception(error)
    # What lies between this command and the user's code tells nothing; where none of it is theirs, all of it does.
    theirs = [frame for frame in told.stack if not frame.filename.startswith(_NOT_THEIRS)]
    is_told = isinstance(error, SyntaxError)  # which names its place itself
    told.stack = traceback.StackSummary.from_list(theirs if theirs or is_told else list(told.stack))
    failure = OptionError(
        f"{doing} failed: {type(error).__name__}: {error}.\n  The code must run on its own first.\n"
        "  The traceback below shows where it failed."
    )
    failure.add_note("".join(told.format()).rstrip())
    return failure
