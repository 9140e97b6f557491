"""The table of results as text: lines while it runs, and the page in docs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.zoo.run import RESULTS, Row

INTRO = """\
# Models

Every case of the zoo (`tests/zoo`), trained for two steps with AdamW by eager PyTorch and by megatrain on the CPU in
fp32, from the same seeds and with dropout on, and compared: outputs, every gradient (and which parameters have none),
buffers, parameters and the random generators of torch, numpy and Python. Each case runs twice: with the default
options, and streamed (small blocks, a budget just above the least possible, `activations="recompute"`). The worse of
the two counts. Models have a few thousand random weights, so this says nothing about speed.

| result | meaning |
| --- | --- |
| exact | equal, bit for bit |
| close | outputs equal, bit for bit; gradients within 1e-4 of the largest, where the order of a sum differs |
| refused | megatrain refuses the model, with the reason that is shown |
| skipped | nothing to compare with: a package isn't installed, or the model fails in eager with its version |
| error | an exception that isn't megatrain's own |
| WRONG | anything else; no result of this kind is acceptable |

Blocks, templates (and blocks that run as modules, where there are any) and seconds to capture are those of the default
options. Made by `make zoo`; to measure two environments, run `python -m tests.zoo --json FILE` in each, then
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
    """The page: one column of results for each run, blocks and times of the first."""
    runs = [{row["case"]: Row(**row) for row in run["rows"]} for run in measured]
    names = list(dict.fromkeys(name for run in runs for name in run))
    lines = [INTRO]
    for run, entry in zip(runs, measured, strict=True):
        versions = ", ".join(f"{k} {v}" for k, v in entry["versions"].items())
        lines.append(f"* {versions}: {summary(list(run.values()))}")
    heads = [f"torch {entry['versions']['torch'].split('+')[0]}" for entry in measured]
    lines += ["", f"| case | family | {' | '.join(heads)} | blocks | templates | capture, s |"]
    lines.append("| --- " * (5 + len(heads)) + "|")
    for name in names:
        present = [run[name] for run in runs if name in run]
        row = next((r for r in present if r.blocks), present[0])
        results = " | ".join(run[name].result if name in run else "" for run in runs)
        blocks = f"{row.blocks}" + (f" ({row.opaque} as modules)" if row.opaque else "") if row.blocks else ""
        seconds = f"{row.capture_seconds:.1f}" if row.blocks else ""
        lines.append(f"| {name} | {row.family} | {results} | {blocks} | {row.templates or ''} | {seconds} |")
    return "\n".join(lines) + "\n" + _details(names, runs)


def _details(names: list[str], runs: list[dict[str, Row]]) -> str:
    lines = ["", "## Details", ""]
    for name in names:
        told = dict.fromkeys(_shown(run[name]) for run in runs if name in run and run[name].detail)
        lines += [f"* **{name}**: {text}" for text in told]
    return "\n".join(lines) + "\n" if len(lines) > 3 else ""


def _shown(row: Row) -> str:
    return f"{row.result}, {' '.join(row.detail.split())}".replace("|", "\\|").replace("<", "\\<")
