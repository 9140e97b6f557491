"""Ops in rows: those of all micro-batches of a block are worked out at once."""
