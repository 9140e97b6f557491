"""The modules of megatrain as text and as syntax trees, for tests that read the house and don't run it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "megatrain").rglob("*.py"))


@functools.cache  # several tests go through all modules
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a module's syntax tree."""
    return tuple(ast.walk(parsed(source)))
