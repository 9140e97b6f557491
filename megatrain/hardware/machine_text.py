"""The figures of a machine as text: each with where it is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isinf
from typing import Any

from megatrain.sizes import format_bytes

_GIVEN = "given"
# Name of the field, its label, its unit, and what one of the unit is.
_FIGURES = (
    ("flops_per_s", "products", "TFLOP/s", 1e12),
    ("memory_bytes_per_s", "device memory", "GB/s", 1e9),
    ("memory_bytes", "device memory, size", "bytes", 1),
    ("h2d_bytes_per_s", "copies to the device", "GB/s", 1e9),
    ("d2h_bytes_per_s", "copies to the host", "GB/s", 1e9),
    ("h2d_beside", "to the device, beside the other way", "of it", 1),
    ("d2h_beside", "to the host, beside the other way", "of it", 1),
    ("pageable_bytes_per_s", "copies, not page-locked", "GB/s", 1e9),
    ("host_bytes_per_s", "updates on the host", "GB/s", 1e9),
    ("host_beside", "updates, beside copies", "of it", 1),
    ("compute_beside", "compute, beside others", "of it", 1),
    ("host_memory_bytes", "host memory", "bytes", 1),
    ("cores", "processors", "", 1),
    ("launch_s", "launch of a kernel, device", "us", 1e-6),
    ("issue_s", "launch of a kernel, Python", "us", 1e-6),
    ("op_s", "an op besides, Python", "us", 1e-6),
    ("wake_s", "waking threads for a kernel", "us", 1e-6),
    ("further_rates", "stream", "GB/s", 1e9),
)
# Figures that mean nothing at these values are left out unless somebody stated them.
_NONE = {
    "h2d_beside": 1.0,
    "d2h_beside": 1.0,
    "host_beside": 1.0,
    "compute_beside": 1.0,
    "launch_s": 0.0,
    "issue_s": 0.0,
    "op_s": 0.0,
    "wake_s": 0.0,
}


def hardware_text(machine: Any) -> str:
    """Prints a figure a line: what it is, how much, and whether it was measured, given, or is from the table."""
    rows = [row for figure in _FIGURES for row in _rows(machine, *figure)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    head = f"hardware: {machine.name}" if machine.name else "hardware"
    lines = [
        f"  {label:<{widths[0]}}  {value:>{widths[1]}}  {unit:<7}  {origin}" for label, value, unit, origin in rows
    ]
    return "\n".join([head, *lines])


def _rows(machine: Any, name: str, label: str, unit: str, one: float) -> Iterator[tuple[str, str, str, str]]:
    value, origins = getattr(machine, name), machine.origins
    if isinstance(value, Mapping):
        for kind, rate in value.items():  # pyright: ignore[reportUnknownVariableType]
            origin = origins.get(f"{name} {kind}", origins.get(name, _GIVEN))
            yield f"{label} {kind}", f"{rate / one:.4g}", unit, origin
    elif value is not None and (name in origins or not (isinf(value) or value == _NONE.get(name))):
        text, unit = (format_bytes(value).rsplit(" ", 1)) if unit == "bytes" else (f"{value / one:.4g}", unit)
        yield label, text, unit, origins.get(name, _GIVEN)
