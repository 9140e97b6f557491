"""verify: a model against itself, compiled and eager, and where the two part ways."""

from megatrain.verification.report import Difference, FirstDifference, Report
from megatrain.verification.side_by_side import verify

__all__ = ["Difference", "FirstDifference", "Report", "verify"]
