"""Bounds: seconds and bytes that no plan takes less of."""
