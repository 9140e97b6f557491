"""Passes over captures: rewrites of a graph, and what turns a capture into blocks over shared templates."""

from megatrain.passes.check_rewrite import Deviation, RewriteReport, check_rewrite
from megatrain.passes.pattern import Match
from megatrain.passes.rewriter import Rewriter

__all__ = ["Deviation", "Match", "RewriteReport", "Rewriter", "check_rewrite"]
