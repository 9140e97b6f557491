"""`python -m tests.zoo`: runs the zoo, prints the table, writes it down."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatrain.device.kinds import fault
from tests.zoo.collect import cases
from tests.zoo.run import Row
from tests.zoo.table import markdown, summary, text_line
from tests.zoo.workers import rows


def main() -> int:
    """Returns 1 if a case is wrong or fails with an error that isn't megatrain's."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name or family contains one of these, by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--device", default="cpu", help="where both sides compute: cpu (default), cuda, sim")
    parser.add_argument("--kernels", help="as for megatrain.compile")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--merge", type=Path, nargs="+", help="run nothing, read these files instead")
    parser.add_argument("--markdown", type=Path, help="write the table, a column for each environment, to this file")
    options = parser.parse_args()
    if options.merge:
        measured = [json.loads(path.read_text()) for path in options.merge]
    else:
        measured = [_measure(options.only.split(","), options.jobs, options.device, options.kernels)]
        if options.json:
            options.json.write_text(json.dumps(measured[0], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(measured))
    found = [Row(**row) for run in measured for row in run["rows"]]
    return int(any(row.result in ("WRONG", "error") for row in found))


def _measure(only: list[str], jobs: int, device: str, kernels: str | None) -> dict[str, Any]:
    if device != "sim" and (reason := fault(device)) is not None:
        sys.exit(f"--device {device} {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that run the cases
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products; also theirs
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    chosen = [(c.name, c.family) for c in cases().values() if any(o in c.name or o == c.family for o in only)]
    order = {name: index for index, (name, _) in enumerate(chosen)}
    found: list[Row] = []
    start = time.perf_counter()
    for row in rows(chosen, jobs, device, kernels):
        found.append(row)
        print(text_line(row), flush=True)
    found.sort(key=lambda row: order[row.case])
    minutes = (time.perf_counter() - start) / 60
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if device != "cpu":
        versions["device"] = "simulated" if device == "sim" else torch.get_device_module(device).get_device_name()
    if kernels is not None:
        versions["kernels"] = kernels
    print(f"{summary(found)}; {minutes:.1f} min; {_named(versions)}")
    return {"versions": versions | {"python": platform.python_version()}, "rows": [asdict(row) for row in found]}


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in (versions | {"python": platform.python_version()}).items())


if __name__ == "__main__":
    sys.exit(main())
