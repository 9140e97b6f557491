"""Checks: the allowed values of each option, declared at its public function and checked before any work."""

from megatrain.base.checks.checked import checked
from megatrain.base.checks.rules import (
    FLAG,
    PATH,
    PATHS,
    TEXT,
    Rule,
    count,
    either,
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
    "either",
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
