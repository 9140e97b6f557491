"""LaunchGraphs: work of a device that is recorded once and then launched by one call, such as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class LaunchGraphs(ABC):
    """Makes launch graphs, and keeps the memory in which they run.

    Tensors that a graph makes are in memory that no other work gets, for as long as this object is there, also when no
    graph is left. All graphs share this memory, so one run overwrites what the run before has left.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settings(self) -> Hashable:
        """What chooses kernels now, besides tensors: under other settings recorded work isn't what calls would do."""
        return kernel_settings()

    @abstractmethod
    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Records what `work` launches, which nothing runs yet.

        Args:
            work: Launches kernels and copies between tensors of the device, and waits for nothing. It runs on a stream
                of its own, without a wait for other streams.

        Returns:
            Launches the work on the calling thread's current stream. All that it reads must be where it was.

        Raises:
            RuntimeError: If the device can't record it.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes`, one or more, of the memory of the graphs, as `uint8`.

        Nothing else gets it, also once the tensor is gone. So it may be used on any stream.
        """
        made: list[torch.Tensor] = []
        # By a recording, which is then dropped; an empty one would be warned of.
        self.record(lambda: made.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device)))
        return made[0]

    @abstractmethod
    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns bytes that a graph writes, as `uint8`, though the tensor there is gone."""
