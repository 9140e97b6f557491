"""kernel_settings(): torch's global settings by which eager calls choose their kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch.backends import cuda, cudnn, opt_einsum
from torch.nn import attention

from megatrain.torch_private import attention_priority, kernels_of_op, python_kernels

# Looked up once: modules of settings answer through Python.
_MATMUL, _CONV, _RNN, _EINSUM = cuda.matmul, cudnn.conv, cudnn.rnn, getattr(opt_einsum, "m", opt_einsum)  # pyright: ignore
_flash: Callable[[], object] = getattr(attention, "current_flash_attention_impl", lambda: None)


def kernel_settings() -> Hashable:
    """The settings as they are now: where they differ, recorded work isn't what eager calls would do."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        tuple(attention_priority()),
        _flash(),
        cuda.preferred_blas_library(),
        cuda.preferred_linalg_library(),
        cuda.preferred_rocm_fa_library(),
        _MATMUL.fp32_precision,  # reads of the older names fail once this was set
        _MATMUL.allow_fp16_reduced_precision_reduction,
        _MATMUL.allow_bf16_reduced_precision_reduction,
        _MATMUL.allow_fp16_accumulation,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        _CONV.fp32_precision,
        _RNN.fp32_precision,
        _EINSUM.enabled,
        _EINSUM.strategy,
        len(python_kernels),
    )


def replaced_kernel() -> str:
    """Names a kernel of torch's own operators that others have written in Python; empty if there is none."""
    home = torch.__path__[0]
    for name in sorted(python_kernels):
        namespace, operator, key = name.split("/")
        if namespace != "aten" or key == "Meta":
            continue
        lines = [line for line in kernels_of_op(f"aten::{operator}").splitlines() if line.startswith(f"{key}")]
        if any(".py:" in line and f" {home}" not in line for line in lines):
            return f"aten::{operator} of {key}"
    return ""
