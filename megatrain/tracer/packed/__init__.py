"""Packed state: parameters that consist of several tensors, as quantized weights do; see `packing.py`."""
