"""Rewrites of captured graphs that save memory of the device."""
