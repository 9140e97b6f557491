"""Marks cases that `make nightly` runs and `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(case: Any) -> Any:
    """A case of `pytest.mark.parametrize`, marked; a tuple is a case of several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
