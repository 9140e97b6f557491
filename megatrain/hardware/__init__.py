"""Machines: their rates, from a table or measured, and the work of kernels that takes time on them."""
