"""Checks: what each option of a public function may be, declared beside the function and refused where it enters."""

from megatrain.checks.checked import checked
from megatrain.checks.paths import PATH, PATHS
from megatrain.checks.rules import (
    FLAG,
    TEXT,
    Rule,
    count,
    function,
    instance_of,
    mapping_of,
    named,
    number,
    one_of,
    optional,
    sequence_of,
    shown,
)

__all__ = [
    "FLAG",
    "PATH",
    "PATHS",
    "TEXT",
    "Rule",
    "checked",
    "count",
    "function",
    "instance_of",
    "mapping_of",
    "named",
    "number",
    "one_of",
    "optional",
    "sequence_of",
    "shown",
]
