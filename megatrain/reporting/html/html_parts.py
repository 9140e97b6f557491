"""page(): a page of HTML from its files, with texts without marks of their own, data within a script, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def page(
    body: str,
    parts: Mapping[str, str],
    *,
    title: str,
    kind: str,
    verdict: Iterable[str],
    figures: Iterable[tuple[str, str]],
    data: Any,
) -> str:
    """A page that needs nothing else: everything that a browser runs or shows is in the text.

    Args:
        body: The file of what stands below the figures.
        parts: HTML by mark of `body`, besides `tools`.
        title: Of the page: the model's name.
        kind: What the step is, in a line.
        verdict: What it says, a sentence each.
        figures: The most important ones, with their names.
        data: What the script draws.
    """
    frame = {
        "style": asset("page.css"),
        "script": asset("page.js"),
        "data": embedded(data),
        "title": html_text(title),
        "kind": html_text(kind),
        "verdict": "".join(f"<p>{html_text(line[:1].upper() + line[1:])}.</p>" for line in verdict),
        "figures": "".join(
            f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in figures
        ),
        "body": filled(body, {"tools": asset("tools.html"), **parts}),
    }
    return filled("frame.html", frame)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A template with its marks `{{...}}` replaced.

    Args:
        name: Of the file.
        parts: HTML by mark.
    """
    pieces = asset(name).split("{{")
    # One pass: what is filled in may contain such marks itself.
    return pieces[0] + "".join(parts[mark] + rest for mark, _, rest in (p.partition("}}") for p in pieces[1:]))


def html_text(text: str) -> str:
    """A name for HTML: without marks of its own, and without characters that no page may have."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), quote=True)


def embedded(data: Any) -> str:
    """JSON within a script element, which no name can end."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 1) -> str:
    """A table whose first columns are words, and all others numbers."""

    def cell(tag: str, index: int, text: str, scope: str = "") -> str:
        kind = "" if index < num_words else ' class="n"'
        return f"<{tag}{scope}{kind}>{html_text(text)}</{tag}>"

    head = "".join(cell("th", index, name, ' scope="col"') for index, name in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(cell("td" if i else "th", i, text, "" if i else ' scope="row"') for i, text in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><caption>{html_text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
