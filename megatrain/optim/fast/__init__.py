"""Fast paths: updates of some optimizers in one pass over a parameter, fp32 or bf16 with masters.

AdamW and AdamW8bit have one. For another optimizer, subclass `FastPath`, and `register` an object of that class before
the first training step; `unregister` removes it again. `NativeKernel` calls a C function that the machine's compiler
builds. docs/fast_paths.md writes one for Lion.
"""

from megatrain.base.native import NativeKernel
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.fast.adamw_8bit import AdamW8bitInOnePass
from megatrain.optim.fast.path import FastPath, ParameterUpdate, fast_path, register, unregister

__all__ = ["FastPath", "NativeKernel", "ParameterUpdate", "fast_path", "register", "unregister"]

register(AdamWInOnePass())
register(AdamW8bitInOnePass())
