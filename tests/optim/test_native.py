"""Kernels of C: a compiler makes vectors of their loops for the processors that people have, not only the newest."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatrain.base.native import native_kernel

FOLDER = Path(native_kernel.__file__).parent


@pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="reads what gcc says on x86-64"
)
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])  # AVX2 since 2013, AVX-512 since 2017
def test_an_update_is_made_of_vectors(processor: str, tmp_path: Path):
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in native_kernel._FLAGS]
    for name, macro in (("adamw.c", "UPDATE"), ("adamw_8bit.c", "UPDATE_8BIT")):
        source = FOLDER / name
        command = ["gcc", *flags, "-fopt-info-vec-optimized", str(source), "-o", str(tmp_path / "library")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        lines = {int(line) for line in re.findall(rf"{name}:(\d+):\d+: optimized: loop vectorized", said)}
        code = source.read_text().splitlines()
        loops = {number for number, line in enumerate(code, 1) if line.strip().startswith(f"{macro}(")}
        assert len(loops) == 4
        assert loops <= lines, [code[number - 1].strip() for number in sorted(loops - lines)]
