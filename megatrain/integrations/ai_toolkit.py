"""MemoryManager: in the place of ai-toolkit's object of this name, whose `attach` and `detach` offload a model.

A script that starts ai-toolkit:

    from megatrain.integrations import ai_toolkit

    ai_toolkit.install(memory="20GiB")  # before anything of ai-toolkit is imported
    runpy.run_path("run.py", run_name="__main__")

Then `layer_offloading: true` in its configuration streams the model: each call is one of `megatrain.compile`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

import megatrain
from megatrain.base.host_limits import return_free_memory
from megatrain.errors import ExecuteError, OptionError

# Names of ai-toolkit: where its object is imported from, what says that a model is managed, where an adapter's inputs
# are, and what the results of a network's adapters are multiplied by.
_MODULES = ("toolkit.memory_management", "toolkit.memory_management.manager")
_MANAGER, _PLACE, _MULTIPLIER = "_memory_manager", "_memory_management_device", "torch_multiplier"


class MemoryManager:
    """The model of one `attach`. Its calls stream from the first on, with the adapters that are on its layers then.

    Adapters (LoRA) replace `forward` of the model's layers and aren't modules of the model. At the first call they move
    to the host, as the model's own parameters, and stream with the layers. The optimizer updates them there.
    """

    options: ClassVar[dict[str, Any]] = {}
    """Of `megatrain.compile`, for all models."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self._device = module, torch.device(device)
        self.compiled: Any = None
        self._before = {name: vars(module)[name] for name in ("forward", "to") if name in vars(module)}
        self._forward, self._move = module.forward, module.to
        self._adapters: Sequence[nn.Module] = ()

    @classmethod
    def attach(cls, module: nn.Module, device: torch.device, *_: Any, **__: Any) -> None:
        """Has calls of a model stream; the plan decides what stays on the device, so further arguments aren't used."""
        if _MANAGER not in vars(module):
            manager = cls(module.cpu(), device)
            vars(module).update({_MANAGER: manager, "forward": manager._call, "to": manager._to})

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Undoes `attach`: the model and its adapters are on the host, with the values that they have now."""
        manager = vars(module).pop(_MANAGER, None)
        if manager is None:
            return
        del module.forward, module.to
        vars(module).update(manager._before)
        for each in nn.ModuleList(manager._adapters).modules():
            vars(each).pop(_PLACE, None)
        if manager.compiled is not None:
            manager.compiled.megatrain.release()

    @classmethod
    def free(cls, module: nn.Module) -> None:
        """Undoes `attach`, and destroys the weights."""
        cls.detach(module)
        module.to("meta")

    release_cached_memory = staticmethod(return_free_memory)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        found = list(_adapters(self.module))
        if self.compiled is None:
            whole = _Whole(self.module, self._forward, [each.cpu() for each in found])
            for each in whole.adapters.modules():
                vars(each)[_PLACE] = self._device
            self._adapters = found
            self.compiled = megatrain.compile(whole, device=self._device, **self.options)
        if found != self._adapters:
            raise ExecuteError(
                "the model's layers have other adapters than at its first call.\n"
                "  The model streams with the adapters that it had then.\n  Detach the model, and attach it again."
            )
        return self.compiled([vars(each)[_MULTIPLIER] for each in _networks(found)], *args, **kwargs)

    def _to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Changes the dtype, as long as nothing streams, and leaves the model where it is."""
        dtype = kwargs.get("dtype", next((each for each in args if isinstance(each, torch.dtype)), None))
        if dtype is None or dtype == next(self.module.parameters()).dtype:
            return self.module
        if self.compiled is not None:
            raise OptionError(
                f"the model streams, and can't become {dtype} any more.\n"
                "  Its weights are laid out in host memory at its first call.\n  Call `.to` before."
            )
        return self._move(dtype=dtype)


class _Whole(nn.Module):
    """A model and the adapters on its layers, as one module; what adapters are multiplied by is an input."""

    def __init__(self, module: nn.Module, forward: Any, adapters: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module, self.adapters, self._forward = module, nn.ModuleList(adapters), forward

    def forward(self, multipliers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        networks = _networks(self.adapters)
        before = [vars(each)[_MULTIPLIER] for each in networks]
        try:
            for network, multiplier in zip(networks, multipliers, strict=True):
                vars(network)[_MULTIPLIER] = multiplier
            return self._forward(*args, **kwargs)
        finally:
            for network, multiplier in zip(networks, before, strict=True):
                vars(network)[_MULTIPLIER] = multiplier


def _networks(adapters: Iterable[nn.Module]) -> Sequence[nn.Module]:
    """The networks of adapters that have a multiplier in a tensor, which is another one for each batch."""
    found = (vars(each).get("network_ref", lambda: None)() for each in adapters)
    return [each for each in dict.fromkeys(found) if each is not None and vars(each).get(_MULTIPLIER) is not None]


def _adapters(module: nn.Module) -> Iterator[nn.Module]:
    """The modules outside a model whose methods its layers call, those of adapters over adapters included."""
    known = set(module.modules())
    left = list(module.modules())
    for layer in left:
        for method in vars(layer).values():
            owner = method.__self__ if isinstance(method, MethodType) else None
            if isinstance(owner, nn.Module) and owner not in known:
                known.update(owner.modules())
                left.append(owner)
                yield owner


def install(**options: Any) -> None:
    """Puts this object in the place of ai-toolkit's; `options` are those of `megatrain.compile`, such as `memory`."""
    MemoryManager.options = options
    for name in _MODULES:
        vars(import_module(name))["MemoryManager"] = MemoryManager
