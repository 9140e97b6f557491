"""megatrain: a compiler that trains models larger than the device's memory on one GPU.

    compiled = megatrain.compile(model)        # any nn.Module
    print(compiled.schedule)                   # the operations of a step, tick by tick
    compiled(**batch).loss.backward()          # same numbers as eager PyTorch

For compiler people the steps are public too: `trace`, `lower`, `workload`, `schedule`, `Executor`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the public names, and torch with them, when the first one is used: `megatrain --help` uses none."""
    is_public = name == "__all__" or not (name.startswith("__") or find_spec(f"{__name__}.{name}"))
    if is_public:
        public = import_module(f"{__name__}.public")
        globals().update({"__all__": public.__all__, **{each: getattr(public, each) for each in public.__all__}})
    if not is_public or name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
