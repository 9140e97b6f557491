"""The table of machines: published figures, and what layers reach of them. Nothing here was measured on your machine.

Rates of products are what users of torch measured for large matrices ("got"), or else the maker's figure for dense
tensor cores ("spec"). Layers reach a part of that, which whole published steps show where there are some: by
`tests/hardware/published.py`, whose other kernels count by their bytes. Memory and links are the maker's figures or
what benchmarks of copies show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

OF_MEMORY = 0.85
"""Of a memory's rate on paper, the part that kernels reach."""

DISK = 3.5e9
"""Bytes per second of a disk that nobody has measured, an assumption."""

_ZZC = "users' torch products, github.com/zzc0721/torch-performance-test-data"
_MAMF = "achievable products, github.com/stas00/ml-engineering"
_BLACKWELL = "spec, NVIDIA's papers on the architecture of RTX Blackwell"
_PCIE4 = "page-locked copies over PCIe 4 x16"
_PCIE5 = "page-locked copies over PCIe 5 x16, nvbandwidth"
_MAKER = "the maker's figure"
_LLMQ = "of LLMQ (github.com/IST-DASLab/llmq)"
_STEPS_H100 = f"whole steps {_LLMQ} on an H100: 0.85 to 0.89"


@dataclass(frozen=True, slots=True)
class _Host:
    """The processor of a machine, in microseconds and GB/s.

    Args:
        memory: Its memory: what updates read and write alone, and what they share with copies.
        memory_of: Where that is from.
        issue: Python for each kernel.
        op: Python for each op besides.
        update: An update for each parameter, besides the bytes.
        of: Where these times are from.
    """

    memory: float
    memory_of: str = "assumed: a half to two thirds of the memory on paper"
    issue: float = 21
    op: float = 60
    update: float = 30
    of: str = "a layer of width 64 on a core of an AMD EPYC (benchmarks.launch, 2026-11-29); assumed of others"


@dataclass(frozen=True, slots=True)
class _Machine:
    """A row of the table, in TFLOP/s, GB/s and GiB.

    Args:
        bf16: Products of bf16 and fp16.
        tf32: Products of fp32 in tensor cores.
        fp32: Products of fp32.
        of: Where products are from.
        layers: The part of them that products in layers reach.
        layers_of: Where that part is from.
        gib: Size of the device's memory.
        memory: Its rate on paper, or as measured if `memory_of` says so.
        link: Copies to the device and to the host, alone.
        both: The same while both are under way.
        link_of: Where copies are from.
        both_of: Where copies both ways are from.
        host: The processor and its memory.
        memory_of: Where the device's memory is from.
        is_unified: Whether the device shares the host's memory.
        is_pcie: Whether copies go over PCIe.
    """

    bf16: float
    tf32: float
    fp32: float
    of: str
    layers: float
    layers_of: str
    gib: float
    memory: float
    link: tuple[float, float]
    both: tuple[float, float]
    link_of: str
    host: _Host
    both_of: str = "assumed: three quarters of both rates together"
    memory_of: str = ""
    is_unified: bool = False
    is_pcie: bool = True


def _both(one: float, share: float = 0.75) -> tuple[float, float]:
    return one * share, one * share


# A layer's forward and backward took Python 8.2 ms in a step, for 109 kernels. Updates of 40 GB and copies of 9 GB took
# 0.43 to 0.5 s, of which the memory's rate leaves 0.07 to 0.14 s for 252 parameters: 500 us each. Updates are prepared
# since, which took a tenth of the time on an EPYC.
_OF_STEPS = "steps of 1.5B on an H100's host on 2026-11-26 (docs/benchmarks.md), updates a tenth of theirs"
_H100_HOST = _Host(137, "updates alone on an H100's host, of 16 virtual processors (docs/benchmarks.md)",
                   75, 400, 50, _OF_STEPS)  # fmt: skip


def _like_it(memory: float, of: str = "assumed: a half to two thirds of the memory on paper") -> _Host:
    """Another server's: its memory, and Python as on the H100's host."""
    of_python = f"{_OF_STEPS}; assumed of other servers"
    return _Host(memory, of, _H100_HOST.issue, _H100_HOST.op, _H100_HOST.update, of_python)


_RENTED = _like_it(137, "assumed: as measured on an H100's host")
_GRACE = "0.8 of STREAM, which NVIDIA gives as 486"
_SERVER: dict[str, Any] = {"both_of": "89 to 99 GB/s measured on an H100 (docs/gpu.md)"}
_BOTH5: dict[str, Any] = {"both_of": "an RTX 5090's 50.9 GB/s each way (nvbandwidth, tinygrad modules#29)"}
_UNIFIED: dict[str, Any] = {"both_of": "assumed: copies share the memory", "is_unified": True, "is_pcie": False}
_GEFORCE = "assumed: GeForce cards whose whole steps are published reach 0.83 to 1.04"
_HOPPER = f"assumed: {_STEPS_H100}"
_OF_HBM = f"assumed: between an H100's and an RTX PRO 6000's, by whole steps {_LLMQ}"
_NO_BUS = "no bus: each byte is read and written in memory"

PRESETS: Mapping[str, _Machine] = {
    "rtx-3080": _Machine(59.5, 29.8, 24, f"bf16 and tf32 spec; fp32 of a 3080 Ti, {_ZZC}", 0.9, _GEFORCE, 10, 760,
                         (24, 24), _both(24), _PCIE4, _Host(30)),
    "rtx-3090": _Machine(76.5, 35.6, 24.6, f"{_ZZC}; tf32 spec", 0.9, _GEFORCE, 24, 936, (25, 25), _both(25), _PCIE4,
                         _Host(30)),
    "rtx-4090": _Machine(165, 82.6, 50, f"{_ZZC}; tf32 spec", 0.95,
                         f"whole steps {_LLMQ} 0.94 to 1.0, of ZeRO-3 0.80 to 0.97", 24, 1008, (25, 25), _both(25),
                         _PCIE4, _Host(50)),
    "rtx-5060-ti": _Machine(47.4, 23.7, 14, f"{_BLACKWELL}; fp32 by the part that {_ZZC} has of a 5090", 1.04,
                            f"whole steps {_LLMQ} 1.04 to 1.07: cards run above the clock of the spec", 16, 448,
                            (27, 27), _both(27, 0.9), "half of what PCIe 5 x16 gives, as the slot has 8 lanes",
                            _Host(50), **_BOTH5),
    "rtx-5080": _Machine(112.6, 56.3, 35.4, f"{_BLACKWELL}; fp32 by the part that {_ZZC} has of a 5090", 0.9, _GEFORCE,
                         16, 960, (56, 56), _both(56, 0.9), _PCIE5, _Host(60), **_BOTH5),
    "rtx-5090": _Machine(237, 117, 66, _ZZC, 0.83, f"whole steps {_LLMQ}: 0.93 to 0.96 of 1.5B and 3B, 0.73 of 7B", 32,
                         1792, (56, 57), (50.9, 50.9), _PCIE5, _Host(60), **_BOTH5),
    "rtx-pro-6000": _Machine(503.8, 251.9, 79, f"{_BLACKWELL}; fp32 by the part that {_ZZC} has of a 5090", 0.77,
                             f"whole steps {_LLMQ}: 0.77 to 0.78", 95, 1792, (56, 56), _both(56, 0.9), _PCIE5,
                             _Host(100), **_BOTH5),
    "l40s": _Machine(362, 183, 55, f"spec, L40S data sheet; fp32 by the part that {_ZZC} has of a 4090", 0.57,
                     f"whole steps {_LLMQ}: 0.53 to 0.58", 45, 864, (25, 25), _both(25), _PCIE4, _like_it(100)),
    "a100": _Machine(271, 135, 18.5, f"{_MAMF}; tf32 spec by bf16's part", 0.87, _HOPPER, 80, 2039, (24.8, 24.8),
                     (11, 24), f"{_PCIE4}, nvbandwidth#53", _like_it(150),
                     both_of="nvbandwidth#53: 11 GB/s beside 24"),
    "h100-pcie": _Machine(605, 302, 51, f"spec by the part that {_MAMF} has for SXM; fp32 spec", 0.87, _HOPPER, 80,
                          2000, (55.6, 55.6), _both(55.6, 0.86), _PCIE5, _RENTED, **_SERVER),
    "h100-sxm": _Machine(794, 397, 51.5, f"{_MAMF}; tf32 spec by bf16's part", 0.87, _STEPS_H100, 80, 3350,
                         (54.7, 54.9), (47, 47), "measured on an H100 (docs/gpu.md)", _H100_HOST, **_SERVER),
    "h20": _Machine(148, 74, 44, "spec, H20 data sheet", 0.87, _HOPPER, 95, 4000, (55, 55), _both(55, 0.86), _PCIE5,
                    _RENTED, **_SERVER),
    "h200": _Machine(787, 397, 51.5, f"{_MAMF}, {_ZZC}; tf32 spec by bf16's part", 0.87, _HOPPER, 141, 4800, (55, 55),
                     _both(55, 0.86), _PCIE5, _RENTED, **_SERVER),
    "gh200": _Machine(829, 414, 60, f"{_MAMF}; tf32 spec by bf16's part; fp32 spec", 0.87, _HOPPER, 96, 4000,
                      (346, 300), (242, 210), "NVLink-C2C, nvbandwidth#23", _like_it(390, _GRACE),
                      both_of="assumed: 0.7 of both rates together", is_pcie=False),
    "b200": _Machine(1745, 872, 80, f"{_MAMF}; tf32 spec by bf16's part; fp32 spec", 0.82, _OF_HBM, 180, 8000, (55, 55),
                     _both(55, 0.86), _PCIE5, _like_it(300), **_SERVER),
    "b300": _Machine(1745, 872, 75, f"spec, HGX B300 data sheet, by the part that {_MAMF} has of a B200; fp32 spec",
                     0.82, _OF_HBM, 268, 8000, (55, 55), _both(55, 0.86), _PCIE5, _like_it(300), **_SERVER),
    "gb200": _Machine(1939, 969, 80, f"spec, GB200 data sheet, by the part that {_MAMF} has of a B200; fp32 spec", 0.82,
                      _OF_HBM, 185, 8000, (173, 150), (121, 105),
                      "NVLink-C2C, assumed: half of a GH200's, as two share a host", _like_it(195, f"half of {_GRACE}"),
                      both_of="assumed: 0.7 of both rates together", is_pcie=False),
    "mi300x": _Machine(620, 310, 80, "products of torch, SemiAnalysis 2024-12; tf32 and fp32 assumed: half of the spec",
                       0.82, _OF_HBM, 192, 5300, (55, 55), _both(55, 0.86), _PCIE5, _like_it(300), **_SERVER),
    "mi355x": _Machine(1115, 557, 78,
                       "1,022 of torch 2.9 on an MI350X, by the maker's figures; others assumed: half of the spec",
                       0.82, _OF_HBM, 288, 8000, (55, 55), _both(55, 0.86), _PCIE5, _like_it(300), **_SERVER),
    "gb10": _Machine(91.5, 45, 30, "huggingface/kernels#283; tf32 assumed half of bf16; fp32 spec", 0.87, _HOPPER,
                     111.5, 218, (109, 109), _both(109, 0.5), _NO_BUS, _Host(150),
                     memory_of="huggingface/kernels#283, measured", **_UNIFIED),
    "m3-max": _Machine(12, 11.5, 11.5, _ZZC, 0.7, "assumed", 128, 400, (170, 170), _both(170, 0.5), _NO_BUS, _Host(200),
                       **_UNIFIED),
    "m4-max": _Machine(18.4, 18.4, 18.4, "spec, skorppio.com", 0.7, "assumed", 128, 546, (232, 232), _both(232, 0.5),
                       _NO_BUS, _Host(250), **_UNIFIED),
}  # fmt: skip
"""By name."""


def preset_figures(name: str) -> dict[str, Any]:
    """The figures of a machine of the table, as `Hardware` takes them."""
    row, host = PRESETS[name], PRESETS[name].host
    products = {"bf16": row.bf16, "tf32": row.tf32, "fp32": row.fp32}
    (h2d, d2h), (h2d_both, d2h_both) = row.link, row.both
    part = 1.0 if row.memory_of else OF_MEMORY
    of_layers = {kind: f"{row.layers:g} of {rate:g}; {row.of}; {row.layers_of}" for kind, rate in products.items()}
    origins = {f"flops_per_s {kind}": origin for kind, origin in of_layers.items()}
    origins |= {
        "memory_bytes_per_s": row.memory_of or f"{OF_MEMORY} of {row.memory:g}, {_MAKER}",
        "memory_bytes": _MAKER,
        "h2d_bytes_per_s": row.link_of,
        "d2h_bytes_per_s": row.link_of,
        "h2d_beside": row.both_of,
        "d2h_beside": row.both_of,
        "host_bytes_per_s": host.memory_of,
        "staged_bytes_per_s": "a third of host memory's, as each byte moves there three times",
        "launch_s": "assumed",
        "op_s": host.of,
        "issue_s": host.of,
        "update_s": host.of,
        "disk_bytes_per_s": "assumed: half of the 7 GB/s that a drive on PCIe 4 reads on paper",
    }
    return {
        "name": name,
        "flops_per_s": {kind: row.layers * rate * 1e12 for kind, rate in products.items()},
        "memory_bytes_per_s": part * row.memory * 1e9,
        "memory_bytes": int(row.gib * GIB),
        "h2d_bytes_per_s": h2d * 1e9,
        "d2h_bytes_per_s": d2h * 1e9,
        "h2d_beside": h2d_both / h2d,
        "d2h_beside": d2h_both / d2h,
        "host_bytes_per_s": host.memory * 1e9,
        "staged_bytes_per_s": host.memory / 3 * 1e9,
        "launch_s": 2e-6,
        "issue_s": host.issue * 1e-6,
        "op_s": host.op * 1e-6,
        "update_s": host.update * 1e-6,
        "disk_bytes_per_s": DISK,
        "origins": {figure: f"preset: {origin}" for figure, origin in origins.items()},
    }
