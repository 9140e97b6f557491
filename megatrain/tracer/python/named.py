"""Named: a variable that isn't an attribute of a module, as code names it."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType
from typing import Any

from megatrain.tracer.python.contents import MISSING, Holder, put_into
from megatrain.tracer.source_line import SourceLine


@dataclass(frozen=True, slots=True, eq=False)
class Named(Holder):
    """A variable that isn't an attribute of a module, as code names it.

    Args:
        path: Its name: `SCALE`, `settings.SCALE`, `Settings.SCALE`.
        holder: The namespace it lives in, or a closure's cell.
        name: Its name there.
        code: The code that names it.
    """

    path: str
    holder: dict[str, Any] | type | CellType
    name: str
    code: CodeType

    @property
    def key(self) -> tuple[int, str]:
        """Tells variables apart while their namespaces are alive."""
        return id(self.holder), self.name

    def now(self) -> Any:
        """Returns what it holds now."""
        if not isinstance(self.holder, CellType):
            return _parts(self.holder).get(self.name, MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # nothing was assigned yet
            return MISSING

    def held(self) -> dict[str, Any]:
        """See `Holder.held`."""
        value = self.now()
        return {} if value is MISSING else {self.name: value}

    def put(self, changed: Mapping[str, Any], removed: Iterable[Any] = ()) -> None:
        """See `Holder.put`."""
        holder: Any = self.holder
        if isinstance(holder, dict):
            put_into(holder, changed, removed)
        elif isinstance(holder, type):
            for name in removed:
                delattr(holder, name)
            for name, value in changed.items():
                setattr(holder, name, value)
        elif changed:
            holder.cell_contents = changed[self.name]
        elif self.held():
            del holder.cell_contents

    @property
    def source(self) -> SourceLine:
        """The first line that names it."""
        return SourceLine(self.code.co_filename, _line_of(self.code, self.name), self.code.co_qualname)


def _parts(holder: dict[str, Any] | type) -> Mapping[str, Any]:
    return vars(holder) if isinstance(holder, type) else holder


@functools.lru_cache(maxsize=4096)
def _line_of(code: CodeType, name: str) -> int:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = (instruction.starts_line or line) if sys.version_info < (3, 13) else (instruction.line_number or line)
        if instruction.argval == name:
            return line
    return code.co_firstlineno
