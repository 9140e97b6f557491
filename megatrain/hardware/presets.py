"""The table of machines: published figures, and what layers reach of them. Nothing here was measured on your machine.

Rates of products are what users of torch measured for large matrices ("got"), or else the maker's figure for dense
tensor cores ("spec"). Layers reach less: their products are smaller, and run between other kernels. Memory and
links are the maker's figures or what benchmarks of copies show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

IN_LAYERS = 0.7
"""Of what a large product alone reaches, the part that products in layers reach (0.65 to 0.75). On an H100 the kernels
of a step of 1.5 billion parameters took 0.25 s; with this part the sum of their products and bytes is 0.23 s."""
OF_MEMORY = 0.85
"""Of a memory's rate on paper, the part that kernels reach."""

_ZZC = "users' torch products, github.com/zzc0721/torch-performance-test-data"
_MAMF = "achievable products, github.com/stas00/ml-engineering"
_BLACKWELL = "spec, NVIDIA's papers on the architecture of RTX Blackwell"
_PCIE4 = "page-locked copies over PCIe 4 x16"
_PCIE5 = "page-locked copies over PCIe 5 x16, nvbandwidth"
_MAKER = "the maker's figure"


@dataclass(frozen=True, slots=True)
class _Machine:
    """A row of the table, in TFLOP/s, GB/s and GiB.

    Args:
        bf16: Products of bf16 and fp16.
        tf32: Products of fp32 in tensor cores.
        fp32: Products of fp32.
        of: Where products are from.
        gib: Size of the device's memory.
        memory: Its rate on paper, or as measured if `memory_of` says so.
        link: Copies to the device and to the host, alone.
        both: The same while both are under way.
        link_of: Where copies are from.
        both_of: Where copies both ways are from.
        host: What updates read and write in host memory.
        memory_of: Where the device's memory is from.
        issue: Microseconds of Python for each kernel.
        is_unified: Whether the device shares the host's memory.
        is_pcie: Whether copies go over PCIe.
    """

    bf16: float
    tf32: float
    fp32: float
    of: str
    gib: float
    memory: float
    link: tuple[float, float]
    both: tuple[float, float]
    link_of: str
    host: float
    both_of: str = "assumed: three quarters of both rates together"
    memory_of: str = ""
    issue: float = 6.0
    is_unified: bool = False
    is_pcie: bool = True


def _both(one: float, share: float = 0.75) -> tuple[float, float]:
    return one * share, one * share


_SERVER: dict[str, Any] = {"issue": 8.0, "both_of": "89 to 99 GB/s measured on an H100 (docs/gpu.md)"}
_UNIFIED: dict[str, Any] = {"both_of": "assumed: copies share the memory", "is_unified": True, "is_pcie": False}

PRESETS: Mapping[str, _Machine] = {
    "rtx-3080": _Machine(59.5, 29.8, 24, f"bf16 and tf32 spec; fp32 of a 3080 Ti, {_ZZC}", 10, 760, (24, 24), _both(24),
                         _PCIE4, 30),
    "rtx-3090": _Machine(76.5, 35.6, 24.6, f"{_ZZC}; tf32 spec", 24, 936, (25, 25), _both(25), _PCIE4, 30),
    "rtx-4090": _Machine(165, 82.6, 50, f"{_ZZC}; tf32 spec", 24, 1008, (25, 25), _both(25), _PCIE4, 50),
    "rtx-5080": _Machine(112.6, 56.3, 35.4, f"{_BLACKWELL}; fp32 by the part that {_ZZC} has of a 5090", 16, 960,
                         (54, 54), _both(54), _PCIE5, 60),
    "rtx-5090": _Machine(237, 117, 66, _ZZC, 32, 1792, (54, 54), _both(54), _PCIE5, 60),
    "rtx-pro-6000": _Machine(503.8, 251.9, 79, f"{_BLACKWELL}; fp32 by the part that {_ZZC} has of a 5090", 95, 1792,
                             (54, 54), _both(54), _PCIE5, 100),
    "l40s": _Machine(362, 183, 55, f"spec, L40S data sheet; fp32 by the part that {_ZZC} has of a 4090", 45, 864,
                     (25, 25), _both(25), _PCIE4, 100),
    "a100": _Machine(271, 135, 18.5, f"{_MAMF}; tf32 spec by bf16's part", 80, 2039, (24.8, 24.8), (11, 24),
                     f"{_PCIE4}, nvbandwidth#53", 150, both_of="nvbandwidth#53: 11 GB/s beside 24", issue=8.0),
    "h100-pcie": _Machine(605, 302, 51, f"spec by the part that {_MAMF} has for SXM; fp32 spec", 80, 2000, (55.6, 55.6),
                          _both(55.6, 0.86), _PCIE5, 200, **_SERVER),
    "h100-sxm": _Machine(794, 397, 51.5, f"{_MAMF}; tf32 spec by bf16's part", 80, 3350, (54.7, 54.9), (47, 47),
                         "measured on an H100 (docs/gpu.md)", 200, **_SERVER),
    "h20": _Machine(148, 74, 44, "spec, H20 data sheet", 95, 4000, (55, 55), _both(55, 0.86), _PCIE5, 200, **_SERVER),
    "h200": _Machine(787, 397, 51.5, f"{_MAMF}, {_ZZC}; tf32 spec by bf16's part", 141, 4800, (55, 55), _both(55, 0.86),
                     _PCIE5, 200, **_SERVER),
    "gh200": _Machine(829, 414, 60, f"{_MAMF}; tf32 spec by bf16's part; fp32 spec", 96, 4000, (346, 300), (242, 210),
                      "NVLink-C2C, nvbandwidth#23", 300, both_of="assumed: 0.7 of both rates together", issue=8.0,
                      is_pcie=False),
    "b200": _Machine(1745, 872, 80, f"{_MAMF}; tf32 spec by bf16's part; fp32 spec", 180, 8000, (55, 55),
                     _both(55, 0.86), _PCIE5, 300, **_SERVER),
    "b300": _Machine(1745, 872, 75, f"spec, HGX B300 data sheet, by the part that {_MAMF} has of a B200; fp32 spec",
                     268, 8000, (55, 55), _both(55, 0.86), _PCIE5, 300, **_SERVER),
    "gb200": _Machine(1939, 969, 80, f"spec, GB200 data sheet, by the part that {_MAMF} has of a B200; fp32 spec", 185,
                      8000, (173, 150), (121, 105), "NVLink-C2C, assumed: half of a GH200's, as two share a host", 150,
                      both_of="assumed: 0.7 of both rates together", issue=8.0, is_pcie=False),
    "gb10": _Machine(91.5, 45, 30, "huggingface/kernels#283; tf32 assumed half of bf16; fp32 spec", 111.5, 218,
                     (109, 109), _both(109, 0.5), "no bus: each byte is read and written in memory", 150,
                     memory_of="huggingface/kernels#283, measured", **_UNIFIED),
    "m3-max": _Machine(12, 11.5, 11.5, _ZZC, 128, 400, (170, 170), _both(170, 0.5),
                       "no bus: each byte is read and written in memory", 200, **_UNIFIED),
    "m4-max": _Machine(18.4, 18.4, 18.4, "spec, skorppio.com", 128, 546, (232, 232), _both(232, 0.5),
                       "no bus: each byte is read and written in memory", 250, **_UNIFIED),
}  # fmt: skip
"""By name."""


def preset_figures(name: str) -> dict[str, Any]:
    """The figures of a machine of the table, as `Hardware` takes them."""
    row = PRESETS[name]
    products = {"bf16": row.bf16, "tf32": row.tf32, "fp32": row.fp32}
    (h2d, d2h), (h2d_both, d2h_both) = row.link, row.both
    part = 1.0 if row.memory_of else OF_MEMORY
    memory_of = row.memory_of or f"{OF_MEMORY} of {row.memory:g}, {_MAKER}"
    origins = {f"flops_per_s {kind}": f"{IN_LAYERS} of {rate:g}; {row.of}" for kind, rate in products.items()}
    origins |= {
        "memory_bytes_per_s": memory_of,
        "memory_bytes": _MAKER,
        "h2d_bytes_per_s": row.link_of,
        "d2h_bytes_per_s": row.link_of,
        "h2d_beside": row.both_of,
        "d2h_beside": row.both_of,
        "host_bytes_per_s": "assumed: a half to two thirds of the memory on paper",
        "launch_s": "assumed",
        "op_s": "assumed: half of what a slow processor takes for F and B on average",
        "issue_s": "12 us measured on an H100's host (docs/gpu.md), a third less since"
        if row.issue > 6
        else "assumed: PyTorch on a fast processor",
    }
    return {
        "name": name,
        "flops_per_s": {kind: IN_LAYERS * rate * 1e12 for kind, rate in products.items()},
        "memory_bytes_per_s": part * row.memory * 1e9,
        "memory_bytes": int(row.gib * GIB),
        "h2d_bytes_per_s": h2d * 1e9,
        "d2h_bytes_per_s": d2h * 1e9,
        "h2d_beside": h2d_both / h2d,
        "d2h_beside": d2h_both / d2h,
        "host_bytes_per_s": row.host * 1e9,
        "launch_s": 2e-6,
        "issue_s": row.issue * 1e-6,
        "op_s": 60e-6,
        "origins": {figure: f"preset: {origin}" for figure, origin in origins.items()},
    }
