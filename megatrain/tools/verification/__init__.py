"""verify: compares a model with itself, compiled and eager, and finds the first difference."""

from megatrain.tools.verification.report import Difference, FirstDifference, Report
from megatrain.tools.verification.side_by_side import verify

__all__ = ["Difference", "FirstDifference", "Report", "verify"]
