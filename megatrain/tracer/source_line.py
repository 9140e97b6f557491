"""Whose code runs: the user's source line behind a torch call, and whose a file is."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from megatrain.base.patches import original_of, replaced_here


class StandIn(nn.Module):
    """Another object over a model's own `__dict__`; the model itself is what is captured."""

    @property
    def __original__(self) -> nn.Module:
        raise NotImplementedError


def original(module: nn.Module) -> nn.Module:
    """Returns the model that `module` stands for, or `module` itself."""
    if not isinstance(module, StandIn):
        return module
    # Past the hook that records which attributes a forward reads.
    return object.__getattribute__(module, "__original__")


_running = threading.local()


@contextmanager
def own_code() -> Generator[None]:
    """Marks the body as a run of a model's own code, by a capture or an opaque module.

    A tool that replaces a compiled model's `forward` by a function around the former one (autocast, a fused head) has
    that former one called here: the model's own forward is meant then, and not another call of the compiled model.
    """
    depth = getattr(_running, "depth", 0)
    _running.depth = depth + 1
    try:
        with (
            replaced_here(nn.RNNBase, "flatten_parameters", _keep_layout),
            replaced_here(
                torch.utils, "swap_tensors", functools.partial(_swap, original_of(torch.utils, "swap_tensors"))
            ),
        ):
            yield
    finally:
        _running.depth = depth


def _keep_layout(module: nn.RNNBase) -> None:
    """Leaves the weights of an RNN where they are: the layout of a slot is the schedule's.

    An RNN that finds other weights than in its last call moves these on CUDA into one piece of memory, in cuDNN's
    order. The results are the same without; cuDNN then makes such a piece for each call.
    """


def _swap(swap: Callable[[torch.Tensor, torch.Tensor], None], one: torch.Tensor, other: torch.Tensor) -> None:
    """Leaves a tensor that is swapped with itself: torch refuses that for stand-ins, to which weak references exist.

    `torch.nn.utils.parametrize` does so if `torch.__future__.set_swap_module_params_on_conversion` was called.
    """
    if one is not other:
        swap(one, other)


def runs_own_code() -> bool:
    """Tells whether a model's own code runs on this thread."""
    return getattr(_running, "depth", 0) > 0


TORCH = os.path.dirname(torch.__file__) + os.sep
"""How the paths of torch's own files begin."""
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""How the paths of this package's own files begin."""
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_MADE = ("<frozen ", "<eval_with_key>")
"""How Python names its own modules, and torch.fx the code that it writes."""
_CELL = re.compile(r"<ipython-input-(\d+)-\w+>")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while the program runs, as a class statement does
_is_users: dict[CodeType, bool] = {}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A place in the user's code; prints as `` model.py:41: `if scores.max() > 0:` ``, a cell's as IPython says it."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself, stripped."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        cell = _cell(self.file)
        place = f"{os.path.basename(self.file)}:{self.line}" if cell is None else f"{cell}, line {self.line}"
        return f"{place}: `{self.text}`" if self.text else f"{place} in {self.function}"


def _cell(file: str) -> str | None:
    """Returns IPython's name of a cell: only its shell knows the numbers of cells in a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    if known is not None:
        return " ".join(known)
    found = _CELL.fullmatch(file)
    return None if found is None else f"Cell In[{found[1]}]"


def user_line() -> SourceLine | None:
    """Returns the innermost line of the call stack that is neither torch's, Triton's nor megatrain's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack reads files and is 1000 times slower
    while frame is not None:
        code = frame.f_code
        users = _is_users.get(code)
        if users is None:
            module = str(frame.f_globals.get("__name__"))
            is_triton = module.startswith("triton.")  # `kernel[grid]` is a call in it
            file = _file_of_code(code, module)
            users = not is_triton and not file.startswith((TORCH, OURS)) and not code.co_filename.startswith(_MADE)
            _is_users[code] = users
        if users:
            return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None


def file_of_function(function: FunctionType) -> str:
    """Returns the file that a function is written in; `""` if there is none, as in an interactive session."""
    return _file_of_code(function.__code__, function.__globals__.get("__name__"))


def _file_of_code(code: CodeType, module: Any) -> str:
    # A name such as `<string>` is no file's: the code is of the module that it runs in.
    return file_of_module(module) if code.co_filename.startswith("<") else code.co_filename


def file_of_module(name: Any) -> str:
    """Returns the file of an imported module, or of its package; `"<"` for what is built in, `""` if nobody knows.

    Nobody knows what runs as `__main__`, where a profiler or a notebook's kernel may be instead, nor what was run
    without being imported.
    """
    if not isinstance(name, str) or name == "__main__":
        return ""
    module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])
    return getattr(module, "__file__", None) or ("<" if name in sys.builtin_module_names else "")


def file_of(kind: type) -> str:
    """Returns the file that defines a class; `""` if there is none, `"<"` for what is built in."""
    name = kind.__module__
    file = file_of_module(name)
    if name == "builtins" and kind.__flags__ & _HEAP_TYPE:  # what exec() makes in an empty namespace has this name
        file = ""
    if file:
        return file
    own = [each for each in vars(kind).values() if isinstance(each, FunctionType) and each.__module__ == name]
    return next((code.co_filename for each in own if not (code := each.__code__).co_filename.startswith("<")), "")


def package_of(file: str) -> str | None:
    """Returns the top folder of an installed package's file."""
    return file[len(_PACKAGES) :].partition(os.sep)[0] if file.startswith(_PACKAGES) else None


def is_library(file: str) -> bool:
    """Tells whether a file is torch's or of the standard library, in whose folder packages may lie."""
    return file.startswith(TORCH) or (file.startswith(_STANDARD) and not file.startswith(_PACKAGES))
