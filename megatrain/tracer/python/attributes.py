"""Records which attributes of modules the running forward reads."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.patches import original_of, replaced_here
from megatrain.tracer.python.contents import MISSING
from megatrain.tracer.source_line import OURS, SourceLine, user_line

# Torch's own bookkeeping: compared as a whole, whether read or not.
REGISTRIES = frozenset(
    """
    _parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks
    _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks __class__ _call_impl _wrapped_call_impl _compiled_call_impl
    """.split()
)
_TORCH_MODULE_FILE = sys.modules["torch.nn.modules.module"].__file__


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The first read of an attribute.

    Args:
        value: What the module's own `__dict__` held, or `MISSING`: then its class or a registry gave the answer.
        source: The user's line.
    """

    value: Any
    source: SourceLine | None


class Reads:
    """The attributes that one thread's forward read, by module."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.by_module: dict[int, dict[str, Read | None]] = {}
        self.made: dict[int, nn.Module] = {}  # by the forward itself, such as a loss of its own at each call

    def note(self, module: nn.Module, name: str) -> None:
        """Keeps the first read of `name`."""
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if id(module) not in self.by_module:
            self.modules[id(module)] = module  # alive, so that its identity stays its own
            self.by_module[id(module)] = {}
        is_bookkeeping = name in REGISTRIES
        read = None if is_bookkeeping else Read(attributes.get(name, MISSING), user_line())
        self.by_module[id(module)][name] = read

    def items(self) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
        """Yields each module with what was read from it, in the order of the first reads."""
        for identity, names in self.by_module.items():
            yield self.modules[identity], {n: r for n, r in names.items() if r is not None}

    def note_all(self, module: nn.Module) -> None:
        """Notes a read of everything that `module` holds itself, wherever that was."""
        self.modules[id(module)] = module
        names = self.by_module.setdefault(id(module), {})
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                names.setdefault(name, Read(value, None))


def _lookup_of(kind: type) -> type:
    """Returns the class that defines how attributes of `kind` are read, other than by the hook below."""
    return next(k for k in kind.__mro__ if k is not nn.Module and "__getattribute__" in k.__dict__)


@contextmanager
def recorded_reads(root: nn.Module, instead: Mapping[tuple[int, str], Any]) -> Generator[Reads]:
    """Notes what this thread reads from modules, through a hook in `nn.Module` that is there for the body only.

    Classes with an attribute lookup of their own are taken to read everything.

    Args:
        root: The model.
        instead: What the thread finds in place of attributes, by module's identity and name; such reads aren't noted.
    """
    reads, initialize = Reads(), original_of(nn.Module, "__init__")
    for module in root.modules():
        if _lookup_of(type(module)) is not object:
            reads.note_all(module)

    def look_up(module: Any, name: str) -> Any:
        if name == "__dict__":
            # Torch looks into it for every parameter; anybody else may see all that is in it.
            file = sys._getframe(2).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
            if file != _TORCH_MODULE_FILE and not file.startswith(OURS):
                reads.note_all(module)
        elif instead and (id(module), name) in instead:
            return instead[id(module), name]
        else:
            names = reads.by_module.get(id(module))
            if names is None or name not in names:
                reads.note(module, name)
        return object.__getattribute__(module, name)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        reads.made[id(module)] = module
        initialize(module, *args, **kwargs)

    with replaced_here(nn.Module, "__getattribute__", look_up), replaced_here(nn.Module, "__init__", init):
        yield reads
