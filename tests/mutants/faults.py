"""All planted faults: the lists `FAULTS` of the files `faults_*.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.mutants.fault import Fault

FAULTS: list[Fault] = [
    fault
    for path in sorted(Path(__file__).parent.glob("faults_*.py"))
    for fault in import_module(f"tests.mutants.{path.stem}").FAULTS
]
