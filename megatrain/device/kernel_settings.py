"""kernel_settings(): torch's global settings by which eager calls choose their kernels."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.backends import cuda, cudnn


def kernel_settings() -> Hashable:
    """The settings as they are now: where they differ, recorded work isn't what eager calls would do."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.fp32_precision,  # reads of the older names fail once this was set
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.conv.fp32_precision,  # pyright: ignore
        cudnn.rnn.fp32_precision,  # pyright: ignore
    )
