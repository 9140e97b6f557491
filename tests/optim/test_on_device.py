"""The kernel of updates on the device, compiled for the processor: the bits of the host's, from the same source."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatrain.device import Device
from megatrain.optim.fast import on_device
from megatrain.optim.fast.adamw import native_reason
from megatrain.optim.fast.on_device import kernel_on, why_not

# What CUDA has, and one thread that works on each element in turn.
_BEFORE = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
static struct { long long x; } blockIdx, blockDim, threadIdx;
static inline float __uint_as_float(unsigned bits) { float found; std::memcpy(&found, &bits, 4); return found; }
static inline unsigned __float_as_uint(float value) { unsigned found; std::memcpy(&found, &value, 4); return found; }
"""
_AFTER = """
extern "C" void run(void *first, int16_t *low, const void *gradient, float *mean, float *square, int n, int is_split,
                    int is_narrow, double a, double b, double c, double d, double e, double f, double g, double h) {
    for (threadIdx.x = 0; threadIdx.x <= n; threadIdx.x++)  // one more than there are elements
        adamw(first, low, gradient, mean, square, n, is_split, is_narrow, a, b, c, d, e, f, g, h);
}
"""


class Processor(Device):
    """A device with the processor's memory, for which it compiles kernels, perhaps with a fault."""

    is_host = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, folder: Path, old: str = "", new: str = "") -> None:
        super().__init__(torch.device("cpu"))
        self.folder, self.fault, self.launched = folder, (old, new), 0

    def kernel(self, source: str, function: str) -> Callable[..., None] | None:
        path, compiler = self.folder / "kernel.cpp", shutil.which("c++")
        if compiler is None:
            pytest.skip("no compiler of C++")
        path.write_text(_BEFORE + (source.replace(*self.fault) if self.fault[0] else source) + _AFTER)
        command = [compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", str(path), "-o", f"{path}.so"]
        subprocess.run(command, check=True)
        run = ctypes.CDLL(f"{path}.so").run

        def launch(number: int, *arguments: torch.Tensor | int | float) -> None:
            self.launched += 1
            run(*map(_as_c, arguments))

        return launch


def _as_c(value: torch.Tensor | int | float) -> object:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_double(value)


@pytest.mark.skipif(native_reason() is not None, reason="no kernel of the host")
def test_the_source_for_cuda_has_the_bits_of_the_host_or_is_not_used(tmp_path: Path):
    device = Processor(tmp_path)
    assert kernel_on(device) is not on_device._by_torch
    assert device.launched == 18  # three steps of each kind
    for number, (old, new) in enumerate(
        [
            ("fmaf(rest2 * g, g, square[i] * beta2)", "rest2 * g * g + square[i] * beta2"),
            ("0x8000u", "0x7fffu"),
            ("(float)scale_", "(scale_ < 0 ? -1 : 1)"),  # what clipping takes
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        # Torch's kernel has the bits of the host on the processor, but not on any card.
        assert kernel_on(Processor(folder, old, new)) is on_device._by_torch


def test_what_no_device_updates_is_named():
    model = torch.nn.Linear(16, 16)
    known = [
        (torch.optim.AdamW(model.parameters(), fused=True), ""),
        (torch.optim.AdamW(model.parameters()), "AdamW isn't torch's AdamW with fused=True"),
        (torch.optim.AdamW(model.parameters(), fused=True, amsgrad=True), "AdamW isn't torch's AdamW"),
        (torch.optim.SGD(model.parameters()), "SGD isn't torch's AdamW"),
        (torch.optim.AdamW([model.weight], fused=True), "a trained parameter isn't one of exactly one group"),
    ]
    for optimizer, why in known:
        assert why_not([optimizer], model.parameters()).startswith(why)
        assert bool(why) == bool(why_not([optimizer], model.parameters()))
    assert why_not([known[1][0]], model.parameters(), is_narrow=True) == ""
    assert kernel_on(Device(torch.device("cpu"))) is None
