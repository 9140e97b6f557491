"""Functions of C that the machine's own compiler builds."""

from megatrain.base.native.native_kernel import NativeKernel

__all__ = ["NativeKernel"]
