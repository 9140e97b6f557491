"""Weights: the files given to compile(weights=...), matched with the state of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_private import make_subclass
from megatrain.errors import ExecuteError, WeightsError
from megatrain.files.weight_files import Stored, open_checkpoint
from megatrain.tracer.inventory import StateEntry, first_packed, inventory


class Weights:
    """Values in files for every parameter and persistent buffer of a model; none of them read yet.

    Adapters of peft may be in no file. They keep the values that they have, and the other state may have its names from
    before.

    Args:
        model: The model, on the CPU or on meta, or partly so.

    Attributes:
        may_stay: Whether frozen parameters can be used in their files, as far as the use of the model goes.
        stay: Whether they are.

    Raises:
        WeightsError: If a file can't be read, or names, shapes and dtypes are not the model's: all of what
            doesn't fit in one error.
    """

    def __init__(self, model: nn.Module, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._stored = open_checkpoint(paths)
        self.may_stay = self.stay = False
        self._sources: dict[str, list[Stored]] = {}
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._match(model)
        self.remember(model)

    def __contains__(self, key: str) -> bool:
        return key in self._sources

    @property
    def keys(self) -> Sequence[str]:
        """The state that the files have values for."""
        return list(self._sources)

    def remember(self, model: nn.Module) -> None:
        """Takes the model's state as it is now for unchanged."""
        self._seen = {key: (tensor, _version(tensor)) for key, tensor in inventory(model)[1].items()}

    def check_unchanged(self, model: nn.Module) -> None:
        """Refuses what the user put into the model since `remember`, which reading would overwrite."""
        tensors = inventory(model)[1]
        known = {key: seen for key, seen in self._seen.items() if key in self._sources}
        changed = [
            key
            for key, tensor in tensors.items()
            if key in known and (tensor is not known[key][0] or _version(tensor) != known[key][1])
        ]
        if changed:
            raise WeightsError(
                f"{_listed(changed)} changed after compile(weights=...) and before the files were read.\n"
                "  The values come from the files, so reading them would undo the change.\n"
                "  Call load_weights() first, then change the model."
            )
        self._match(model)

    def staying(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
        """Finds the frozen parameters whose bytes are in a file as the model needs them, once for each.

        Buffers are read: forwards write them.
        """
        if not self.may_stay:
            return {}
        found = {key: self._sources.get(key, ()) for key in tensors}
        return {
            key: stored[0] for key, stored in found.items() if len(stored) == 1 and _is_as_is(tensors[key], stored[0])
        }

    def read(self, key: str, out: torch.Tensor) -> None:
        """Reads the values of one tensor of state.

        Args:
            out: On the CPU, of the state's shape and dtype, with any strides.

        Raises:
            WeightsError: If the file can't be read any more, or holds the tensor under several tied names with
                different values.
        """
        first, *others = self._sources[key]
        self._fill(first, key, out)
        for other in others:
            if not self._is_same(other, key, out):
                raise WeightsError(
                    f"`{first.name}` and `{other.name}` are one tensor in the model, but differ in the files.\n"
                    "  Tied names share their values.\n"
                    "  Untie them in the model, or save the files with one of the two names."
                )

    def _fill(self, source: Stored, key: str, out: torch.Tensor) -> None:
        source.read(out)

    def _is_same(self, source: Stored, key: str, out: torch.Tensor) -> bool:
        return source.equals(out)

    def _match(self, model: nn.Module) -> None:
        entries, tensors = inventory(model)
        packed = first_packed(entries)
        if packed is not None:
            raise WeightsError(
                f"weights= can't fill the packed (quantized) parameter `{packed}`.\n"
                "  Files have such weights under the names of the library that made them, or not quantized at all.\n"
                "  Load the model with that library (from_pretrained, say), then compile it without weights=."
            )
        wanted = {key: entry for key, entry in entries.items() if entry.persistent}
        wanted = {
            key: named for key, entry in wanted.items() if (named := _named(model, entry, self._stored)) is not None
        }
        sources = {
            key: [self._stored[name] for name in (entry.key, *entry.ties) if name in self._stored]
            for key, entry in wanted.items()
        }
        problems = _Problems(self._paths, wanted, self._stored, sources)
        problems.without_values = [k for k in entries if k not in sources and tensors[k].is_meta]
        problems.check()
        self._sources = sources


class _Problems:
    """What doesn't fit between the state of a model and what files hold."""

    def __init__(
        self,
        paths: Sequence[Path],
        wanted: Mapping[str, StateEntry],
        stored: Mapping[str, Stored],
        sources: Mapping[str, list[Stored]],
    ) -> None:
        self._paths = paths
        self._wanted = wanted
        self._stored = stored
        self._missing = [entry for key, entry in wanted.items() if not sources[key]]
        known = {name for entry in wanted.values() for name in (entry.key, *entry.ties)}
        self._unexpected = [name for name in stored if name not in known]
        pairs = [(wanted[key].spec, source) for key, found in sources.items() for source in found]
        self._shapes = [(spec, source) for spec, source in pairs if spec.shape != source.shape]
        self._dtypes = [
            (spec, source) for spec, source in pairs if spec.shape == source.shape and not source.fits(spec.dtype)
        ]
        self.without_values: list[str] = []

    def check(self) -> None:
        """Raises one WeightsError with everything, if there is anything."""
        counts = {
            "missing": len(self._missing),
            "unexpected": len(self._unexpected),
            "of another shape": len(self._shapes),
            "of another dtype": len(self._dtypes),
            "without values": len(self.without_values),
        }
        if any(counts.values()):
            summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            files = f"files: {_listed(list(map(str, self._paths)))}"
            lines = [f"the weights don't fit the model: {summary}.", files, *self._details(), *self._ways_out()]
            raise WeightsError("\n  ".join(lines))

    def _details(self) -> Iterable[str]:
        for entry in self._missing:
            ties = f" (or {_listed(entry.ties)})" if entry.ties else ""
            yield f"missing: `{entry.key}`{ties} {entry.spec}"
        for name in self._unexpected:
            yield f"unexpected: `{name}` {self._stored[name]}"
        for spec, source in self._shapes:
            yield f"shape: `{source.name}` {source}, but {spec} in the model"
        for spec, source in self._dtypes:
            yield f"dtype: `{source.name}` {source}, but {spec} in the model; only floats convert"
        for key in self.without_values:
            yield f"without values: `{key}` is on meta and no file is expected to hold it"

    def _ways_out(self) -> Iterable[str]:
        if self._missing or self._unexpected or self._shapes or self._dtypes:
            yield (
                "As with load_state_dict(strict=True), the files must hold every parameter and persistent buffer, "
                "and nothing else."
            )
            yield (
                self._prefix_hint()
                or "Give the files of this model, or save these names with safetensors.torch.save_file."
            )
        if self.without_values:
            places = list(dict.fromkeys(key.rpartition(".")[0] or key for key in self.without_values))
            yield "Adapters and non-persistent buffers get values when their module is made; on meta they get none."
            yield f'Outside torch.device("meta"), make these again and assign them to the model: {_listed(places)}.'
            yield "Or build the model with only its parameters on meta."

    def _prefix_hint(self) -> str | None:
        """Says so if all state were found with one prefix put in front of its names, or taken off them."""
        if not self._missing:
            return None
        first = [self._missing[0].key, *self._missing[0].ties]
        for prefix in sorted({s[: -len(n)] for s in self._stored for n in first if s.endswith(f".{n}")}, key=len):
            if self._is_complete(lambda name, prefix=prefix: prefix + name):
                path = prefix.removesuffix(".")
                return f"All names exist with the prefix `{prefix}`: compile a module that holds this one as `{path}`."
        parts = first[0].split(".")
        for prefix in (".".join(parts[:n]) + "." for n in range(1, len(parts))):
            if self._is_complete(lambda name, prefix=prefix: name.removeprefix(prefix)):
                path = prefix.removesuffix(".")
                return (
                    f"All names exist without the prefix `{prefix}`: compile the module `{path}` of this model itself."
                )
        return None

    def _is_complete(self, renamed: Callable[[str], str]) -> bool:
        return all(any(renamed(n) in self._stored for n in (e.key, *e.ties)) for e in self._wanted.values())


def _named(model: nn.Module, entry: StateEntry, stored: Mapping[str, Stored]) -> StateEntry | None:
    """Describes state by the names that files have for it; None for what adapters add and no file has."""
    names = entry.key, *entry.ties
    if not any(name in stored for name in names):
        names = [plain for name in names if (plain := plain_name(model, name)) is not None]
    return replace(entry, key=names[0], ties=tuple(names[1:])) if names else None


def has_adapters(module: nn.Module) -> bool:
    """Tells whether it is a layer of peft around another one: all its methods have these attributes."""
    return "base_layer" in module._modules and hasattr(module, "merged_adapters") and hasattr(module, "merge")


def plain_name(model: nn.Module, key: str) -> str | None:
    """The name in the model without adapters of peft; None for what only a model with adapters has."""
    names, module = list[str](), model
    path = key.split(".")
    if hasattr(model, "peft_config") and path[:2] == ["base_model", "model"]:
        path, module = path[2:], model.get_submodule("base_model.model")
    elif hasattr(model, "peft_config") and path[0] == "base_model":
        return None  # what all layers of a method share
    while path:
        child = module._modules.get(path[0])
        if child is None:
            return ".".join([*names, *path])
        if "modules_to_save" in module._modules:
            active: Any = module
            if path[0] != "modules_to_save" or path[1] not in active.active_adapters:
                return None  # the original, or of another adapter
            path, child = path[1:], child.get_submodule(path[1])
        elif has_adapters(module):
            if path[0] != "base_layer":
                return None
        elif not (path[0] == "token_adapter" and has_adapters(child)):
            names.append(path[0])
        path, module = path[1:], child
    return None


def check_replaceable(key: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor on meta that can't be given values and stay the same object.

    Raises:
        ExecuteError: If something refers to it weakly: torch then refuses to exchange what it holds.
    """
    if tensor.is_meta and weakref.getweakrefs(tensor):
        raise _irreplaceable(key, "it has weak references")


def replace_memory(key: str, tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Makes `tensor` use the memory of `view`; it stays the same object, with its attributes and hooks.

    Args:
        tensor: On the CPU or on meta.
        view: On the CPU, of the same shape and dtype.

    Raises:
        ExecuteError: If `tensor` is on meta and part of a graph.
    """
    if not tensor.is_meta:
        tensor.data = view
        return
    # `.data =` can't cross devices. Exchanging keeps the object, and with it optimizers that hold it already.
    # `view.data`, because a view counts its changes together with all others of its arena.
    real = make_subclass(type(tensor), view.data, tensor.requires_grad)
    vars(real).update(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, real)
    except RuntimeError as error:
        raise _irreplaceable(key, str(error)) from error
    # The dictionaries of hooks stay with the object; assigning them hooks them into what it holds now.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(tensor, hooks, getattr(tensor, hooks))


def _is_as_is(tensor: torch.Tensor, stored: Stored) -> bool:
    """Tells whether a tensor is a frozen parameter whose bytes a file has where arithmetic can read them."""
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.numel() > 0
    is_alike = tensor.dtype == stored.dtype and tensor.is_contiguous()
    return is_frozen and is_alike and stored.start % tensor.itemsize == 0


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _irreplaceable(key: str, reason: str) -> ExecuteError:
    return ExecuteError(
        f"`{key}` is on the meta device and can't be given values: {reason}.\n"
        "  It must stay the same object, so that existing optimizers train the model.\n"
        "  Drop results computed from it and weak references to it, or load the weights first."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
