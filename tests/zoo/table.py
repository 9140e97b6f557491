"""The table of results as text: lines while it runs, and the page in docs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.zoo.run import RESULTS, Row

INTRO = """\
# Models

Eager PyTorch and megatrain train each model of the zoo (`tests/zoo`) for two steps with AdamW, on the CPU in fp32, from
the same seeds, with dropout. Outputs, gradients, buffers, parameters and the generators of torch, numpy and Python are
compared. Each case runs twice: with the default options, and streamed in a budget just above the least. The worse of
the two counts. Models have a few thousand random weights.

| result | meaning |
| --- | --- |
| exact | equal, bit for bit |
| close | outputs equal, bit for bit; gradients within 1e-4 of the largest, where the order of a sum differs |
| refused | megatrain refuses the model, with the reason that is shown |
| skipped | a package is missing, or the model fails in eager |
| error, WRONG | a fault: never acceptable |

`make zoo` writes this page. For two environments run `python -m tests.zoo --json FILE` in each, then
`python -m tests.zoo --merge FILE FILE --markdown docs/models.md`.
"""


def text_line(row: Row) -> str:
    """One line for a terminal."""
    size = f"{row.blocks}/{row.templates}" + (f" ({row.opaque} opaque)" if row.opaque else "")
    line = f"{row.family:12} {row.case:26} {row.result:8} {size:7} {row.capture_seconds:6.2f} s  {row.detail}"
    return line.rstrip()


def summary(found: list[Row]) -> str:
    """Counts and percentages of the results that occur, best first."""
    count = Counter(row.result for row in found)
    parts = (f"{count[r]} {r} ({100 * count[r] / len(found):.1f} %)" for r in RESULTS if count[r])
    return f"{len(found)} cases: {', '.join(parts)}" if found else "no cases"


def markdown(measured: list[dict[str, Any]]) -> str:
    """The page: the names of each family that are exact in all runs, and what each other case did in each run."""
    runs = [{row["case"]: Row(**row) for row in run["rows"]} for run in measured]
    names = list(dict.fromkeys(name for run in runs for name in run))
    lines = [INTRO]
    for run, entry in zip(runs, measured, strict=True):
        versions = ", ".join(f"{k} {v}" for k, v in entry["versions"].items())
        lines.append(f"* {versions}: {summary(list(run.values()))}")
    found = {name: [run[name] for run in runs if name in run] for name in names}
    exact = {name: rows[0] for name, rows in found.items() if all(row.result == "exact" for row in rows)}
    lines += ["", "| family | exact | |", "| --- | ---: | --- |"]
    for family in dict.fromkeys(row.family for row in exact.values()):
        members = [name for name, row in exact.items() if row.family == family]
        lines.append(f"| {family} | {len(members)} | {', '.join(members)} |")
    if modules := [name for name, rows in found.items() if any(row.opaque for row in rows)]:
        lines += ["", f"Some blocks run as modules (opaque) in {', '.join(modules)}."]
    if others := {name: rows for name, rows in found.items() if name not in exact}:
        lines += ["", "## Not exact", ""]
        lines += [f"* **{name}**: {told}" for name, rows in others.items() for told in dict.fromkeys(map(_told, rows))]
    return "\n".join(lines) + "\n"


def _told(row: Row) -> str:
    detail = f", {' '.join(row.detail.split())}" if row.detail else ""
    return f"{row.result}{detail}".replace("|", "\\|").replace("<", "\\<")
