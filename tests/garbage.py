"""Keeps what imports made, most of all objects, out of each collection of garbage."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

IMPORTS_OF_NOTE = 100
"""Modules; transformers imports hundreds of its own when a test first needs them."""


class Frozen:
    """The plugin of pytest: freezes what is alive after the collection of tests, and again after many imports.

    What is frozen is never collected, so that it happens only between two files, when the fixtures of both are gone.
    """

    def __init__(self) -> None:
        self.num_modules = 0
        self.path: Path | None = None

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self.num_modules = len(sys.modules)

    def pytest_collection_finish(self) -> None:
        self.freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if item.path != self.path and len(sys.modules) >= self.num_modules + IMPORTS_OF_NOTE:
            self.freeze()
        self.path = item.path
