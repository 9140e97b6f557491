"""Functions of C that the machine's own compiler builds."""

from megatrain.native.native_kernel import NativeKernel

__all__ = ["NativeKernel"]
