"""Masks of attention that are functions of positions: found, replaced by causality, or made where they are read."""
