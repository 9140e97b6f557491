"""Attempts at a step: what a capture that fails repeats, and what several ranks agree on around each."""
