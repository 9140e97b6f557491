"""Doctests become listings: Markdown would take their `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)


class DoctestsAsCode(griffe.Extension):
    """Puts a fence around each doctest at the end of a docstring; `mkdocs.yml` names this extension."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of an object, once it is read."""
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
