"""Masters: the exact values of a model's parameters, which blocks compute with in bf16."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.base.counts import counted
from megatrain.errors import CheckpointError
from megatrain.files import Saved, Source
from megatrain.files.weight_files import PIECE_BYTES, Maps, parts
from megatrain.optim.masters.halves import (
    Master,
    RoundedMaster,
    SplitMaster,
    WholeMaster,
    dense,
    in_memory,
    memory_order,
    read_,
    set_halves,
)
from megatrain.optim.masters.held import Aside, Held
from megatrain.runtime.versions import version
from megatrain.tracer.inventory import inventory
from megatrain.tracer.packing import unpacked_state
from megatrain.tracer.spec import TensorSpec

PIECE = PIECE_BYTES // 4
"""Elements that are worked on at a time."""


def low_source(parameter: torch.Tensor, low: torch.Tensor | None) -> Source:
    """Describes a low half, int16 of the parameter's shape; None is zero."""
    if low is not None:
        return Source.of(low)
    return Source(TensorSpec(tuple(parameter.shape), torch.int16), lambda: _zeros(parameter.numel()))


def master_source(parameter: torch.Tensor, low: torch.Tensor | None) -> Source:
    """Describes the fp32 values of a bf16 parameter with its low half; None is zero."""
    high = parameter.detach()
    spec = TensorSpec(tuple(high.shape), torch.float32)
    place = ("master", high.data_ptr(), high.shape, high.stride()) if high.numel() else None
    return Source(spec, lambda: _joined(high, low), place)


def _zeros(numel: int) -> Iterator[torch.Tensor]:
    piece = torch.zeros(min(numel, PIECE), dtype=torch.int16, device="cpu")
    for start in range(0, numel, PIECE):
        yield piece[: numel - start]


def _joined(high: torch.Tensor, low: torch.Tensor | None) -> Iterator[torch.Tensor]:
    if low is None:
        for part in parts(high, PIECE):
            yield part.float().contiguous()
        return
    for upper, lower in zip(parts(high, PIECE), parts(low, PIECE), strict=True):
        yield read_(torch.empty(upper.shape, device="cpu"), SplitMaster(upper.contiguous(), lower.contiguous()))


def check_saved(expected: Mapping[str, Source], saved: Mapping[str, Saved]) -> None:
    """Compares the contents of a checkpoint with the sources that the masters would store.

    Raises:
        CheckpointError: Listing all differences.
    """
    problems = [
        f"missing: `{name}` {expected[name].spec} is not in the checkpoint" for name in expected.keys() - saved.keys()
    ]
    problems += [f"unexpected: `{name}` {saved[name]} belongs to no master" for name in saved.keys() - expected.keys()]
    problems += [
        f"differs: `{name}` {saved[name]}, but {source.spec} here"
        for name, source in expected.items()
        if name in saved and saved[name].spec != source.spec
    ]
    if problems:
        lines = [
            f"the checkpoint doesn't fit these masters: {counted(len(problems), 'difference')}.",
            *sorted(problems),
            "Each trainable bf16 parameter has a low half, or with masters='rounded' a generator.",
            "Compile the model with the saved precision and masters, and with the same parameters frozen.",
        ]
        raise CheckpointError("\n  ".join(lines))


Kind = Literal["whole", "exact", "rounded"]
"""Kinds of masters of bf16 parameters: none, with low halves, or the parameters themselves, rounded at random."""


Stamp = tuple[int, int, int]
"""Which parameter it is, and the addresses of both its halves; 0 for a half that it doesn't have."""


class Masters(Mapping[torch.Tensor, Master]):
    """The master of each trainable parameter; `compiled.masters`.

    An fp32 parameter is its own master. A bf16 parameter is the high half of an exact master, in any memory; the low
    half is kept here. A write into such a parameter sets its master: the low half is zero from then on. Version
    counters and addresses reveal writes, so a write through `.data` is only noticed if it brings other memory;
    otherwise the master equals the written value to within its rounding.

    Masters are in the order of memory: `master.shape` is the parameter's, its dimensions sorted by stride.

    Args:
        model: Whose parameters these are.
        kind: The kind of masters of bf16 parameters.
        casts_inputs: Whether the model was written for fp32 inputs.
    """

    def __init__(self, model: nn.Module, kind: Kind, *, casts_inputs: bool = False):
        self.kind: Kind = kind
        self.casts_inputs = casts_inputs
        self._model = weakref.ref(model)
        self._seed = torch.initial_seed()
        # Those of parameters that have masters whenever they are trained.
        self._trained = {torch.float32} if kind == "whole" else {torch.float32, torch.bfloat16}
        self._held: dict[int, Held] = {}
        self._by_key: dict[str, Held] = {}
        self._aside: dict[int, Aside] = {}

    # -- the mapping --------------------------------------------------------------------------------------

    def __getitem__(self, parameter: torch.Tensor) -> Master:
        """Returns the master, as views of the parameter's present memory.

        Raises:
            KeyError: If it isn't a trainable parameter of the model, in fp32 or bf16.
            ExecuteError: If it is on meta and has no values.
        """
        if id(parameter) not in self._held:
            self.find()  # it may have been put in another's place
        held = self._held.get(id(parameter))
        if held is None or not self._has_master(held):
            raise KeyError("isn't a trainable parameter of this model")
        return self._master(held)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.find()
        return iter([held.parameter for held in self._held.values() if self._has_master(held)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Masters({self.kind}, {counted(len(self), 'parameter')}, {self.low_bytes} B of low halves)"

    @property
    def low_bytes(self) -> int:
        """Bytes of the low halves when each was written once."""
        return sum(2 * held.parameter.numel() for held in self._halved())

    @property
    def held_bytes(self) -> int:
        """Bytes of the low halves that exist now."""
        lows = [*(held.low for held in self._held.values()), *(each.low for each in self._aside.values())]
        return sum(low.nbytes for low in lows if low is not None)

    # -- keeping both halves together ----------------------------------------------------------------------

    def find(self) -> None:
        """Looks up the model's parameters anew; masters of parameters that still exist stay as they are."""
        model = self._model()
        if model is None:
            return
        entries, tensors = inventory(model)
        found: dict[int, Held] = {}
        for key in (key for key, entry in entries.items() if entry.kind == "parameter"):
            held = self._held.get(id(tensors[key])) or Held(key, tensors[key], aside=self._aside)
            held.key = key
            found[id(tensors[key])] = held
        self._held = found
        self._by_key = {held.key: held for held in found.values()}

    def wrote(self, parameter: torch.Tensor) -> None:
        """Notes that the parameter's present values were written together with its low half."""
        held = self._held.get(id(parameter))
        if held is not None:
            held.wrote()

    def stamps(self, parameters: Iterable[torch.Tensor]) -> list[Stamp] | None:
        """Identifies the memory of masters to which nobody else has written; None if somebody has, or one is none."""
        found: list[Stamp] = []
        # Each update asks, on a thread whose Python others wait for: so nothing is called that isn't needed.
        try:
            for held in map(self._held.get, map(id, parameters)):
                if held is None:
                    return None
                parameter, mark = held.parameter, held.mark
                if mark[0] != parameter._version or mark[1] != parameter.data_ptr():
                    return None
                if not (parameter.dtype in self._trained and parameter.requires_grad) and not self._has_master(held):
                    return None
                found.append((id(held), mark[1], 0 if held.low is None else held.low.data_ptr()))
        except RuntimeError:  # one was made in inference mode, where nothing counts its writes
            return None
        return found

    def wrote_in_place(self, parameters: Iterable[torch.Tensor]) -> None:
        """As `wrote`, of parameters that have a stamp: their memory is the same."""
        for parameter in parameters:
            held = self._held[id(parameter)]
            held.mark = parameter._version, held.mark[1]

    def move(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Gives a parameter other memory with the same values."""
        held = self._held.get(id(parameter))
        if held is not None:
            held.drop_old_low()
        parameter.data = view
        if held is not None:
            held.wrote()

    def settle(self, parameter: torch.Tensor) -> None:
        """Sets the low half to zero if other code has written the parameter, now rather than at its next use."""
        held = self._held.get(id(parameter))
        if held is not None:
            held.drop_old_low()
            held.wrote()

    def low_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The low half of a parameter that has one, as it is: nothing asks whether the parameter was written since."""
        low = self._held[id(parameter)].low
        assert low is not None
        return low

    def lows(self) -> dict[str, torch.Tensor]:
        """The low half of each master in halves, by key, laid out like its parameter."""
        return {held.key: held.room() for held in self._halved()}

    def take_lows(self, lows: Mapping[str, torch.Tensor]) -> None:
        """Takes other memory with the same low halves."""
        for key, low in lows.items():
            self._by_key[key].low = low

    @contextmanager
    def moving(self) -> Generator[None]:
        """In its body, parameters may get other memory with the same values."""
        self._drop_old_lows()
        try:
            yield
        finally:
            for held in self._held.values():
                if held.low is not None and not held.is_as_left:
                    held.wrote()

    def _drop_old_lows(self) -> None:
        # Each step asks.
        if not self._aside and all([held.is_as_left for held in self._held.values()]):
            return
        # Two parameters may have exchanged their memory.
        for held in self._held.values():
            held.put_aside()
        for held in self._held.values():
            held.drop_old_low()
        for address, each in list(self._aside.items()):
            if each.memory.expired():
                del self._aside[address]

    def halves(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of the model has a low half when it is bf16."""
        held = self._held[id(parameter)]
        # A parameter that was trained before it was frozen keeps its low half.
        return self.kind == "exact" and (parameter.requires_grad or held.low is not None)

    def keep(self, parameter: torch.Tensor, high: torch.Tensor | None, low: torch.Tensor | None) -> None:
        """Sets the low half for the memory that a parameter is about to get; None drops the present low half."""
        held = self._held[id(parameter)]
        held.low = low
        held.mark = (version(parameter), 0 if high is None else high.data_ptr())

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, values: torch.Tensor) -> bool:
        """Sets a master in halves to floating-point values of its shape, piece by piece.

        Returns:
            False if this parameter has no such master: then nothing was done.
        """
        held = self._held.get(id(parameter))
        if held is None or held.parameter.is_meta or not self._has_halves(held):
            return False
        if not values.is_floating_point() or values.shape != parameter.shape or values.is_meta:
            return False
        whole = (parameter.detach(), held.room(), values.detach())
        for high, low, piece in zip(*(parts(tensor, PIECE) for tensor in whole), strict=True):
            set_halves(high, low, piece)
        self.wrote(parameter)
        return True

    def room_for(self, key: str) -> torch.Tensor | None:
        """Returns the low half of a parameter whose values are about to be set; None if it has none to set."""
        held = self._by_key.get(key)
        return None if held is None or not self._has_halves(held) else held.room()

    def loading(self) -> TorchFunctionMode:
        """While it is active, `parameter.copy_(values)` sets the exact master."""
        self.find()
        return _Exactly(self)

    # -- to and from files ---------------------------------------------------------------------------------

    def sources(self, there: Mapping[int, torch.Tensor] = MappingProxyType({})) -> dict[str, Source]:
        """Returns the sources that a checkpoint needs in addition to the parameters, to continue with the same bits.

        `<parameter>.low` is an int16 tensor of its shape; masters that are rounded have `<parameter>.generator`.
        The parameters themselves are the high halves.

        Args:
            there: What other tensors have in place of low halves, by the identity of these.
        """
        self.find()
        with self.moving():
            lows = [(held, None if held.low is None else there.get(id(held.low), held.low)) for held in self._halved()]
            found = {f"{held.key}.low": low_source(held.parameter, low) for held, low in lows}
        found |= {f"{held.key}.generator": Source.of(g.get_state()) for held, g in self._generators()}
        return found

    def check(self, saved: Mapping[str, Saved]) -> None:
        """Compares names, shapes and dtypes with the sources that were saved, and reads nothing.

        Raises:
            CheckpointError: Listing all differences.
        """
        check_saved(self.sources(), saved)

    def restore(self, saved: Mapping[str, Saved], maps: Maps | None = None) -> None:
        """Reads the saved sources; call it after the parameters have been read.

        Args:
            saved: By name, such as `load(folder).tensors`.
            maps: Takes low halves that have no memory yet, and stay in the files.

        Raises:
            CheckpointError: As `check`, before anything is read; or if a tensor is damaged.
            ExecuteError: If a parameter has no values yet.
        """
        self.check(saved)
        for held in self._halved():
            held.check_values()
        for held in self._halved():
            low = saved[f"{held.key}.low"]
            mapped = low.mapped(maps) if maps is not None and held.low is None else None
            if mapped is None:
                low.read(held.room())
            held.low = held.low if mapped is None else mapped
            self.wrote(held.parameter)
        for held, generator in self._generators():
            state = generator.get_state()
            saved[f"{held.key}.generator"].read(state)
            generator.set_state(state)

    def state_sources(self) -> dict[str, Source]:
        """Returns the model's state dict with all bf16 parameters as fp32, values made as they are read.

        Extra states of modules that aren't tensors are left out.
        """
        self.find()
        model = self._model()
        assert model is not None, "a compiled model holds its model"
        with self.moving():
            state = unpacked_state(model.state_dict(keep_vars=True))
            return {name: self._source(t) for name, t in state.items() if isinstance(t, torch.Tensor)}

    # -- one parameter -------------------------------------------------------------------------------------

    def _halved(self) -> list[Held]:
        return [held for held in self._held.values() if self._has_halves(held)]

    def _has_halves(self, held: Held) -> bool:
        return held.parameter.dtype == torch.bfloat16 and self.halves(held.parameter)

    def _has_master(self, held: Held) -> bool:
        parameter = held.parameter
        if parameter.dtype == torch.float32 or (parameter.dtype == torch.bfloat16 and self.kind == "rounded"):
            return parameter.requires_grad
        return self._has_halves(held)

    def _master(self, held: Held) -> Master:
        parameter = held.parameter
        held.check_values()
        if held.has_other_memory:
            self._drop_old_lows()
        held.drop_old_low()
        values = parameter.detach()
        if (moved := dense(values)) is not values:
            parameter.data = moved  # as the host store does when it takes it in
            self.wrote(parameter)
            values = parameter.detach()
        order = memory_order(values)
        if parameter.dtype == torch.float32:
            return WholeMaster(in_memory(values, order))
        if self.kind == "rounded":
            return RoundedMaster(in_memory(values, order), self._generator(held))
        return SplitMaster(in_memory(values, order), in_memory(held.room(), order))

    def _generators(self) -> Iterator[tuple[Held, torch.Generator]]:
        if self.kind == "rounded":
            for held in self._held.values():
                if held.parameter.dtype == torch.bfloat16 and held.parameter.requires_grad:
                    yield held, self._generator(held)

    def _generator(self, held: Held) -> torch.Generator:
        # One for each parameter, so that the bits don't depend on the order of updates.
        if held.generator is None:
            held.generator = torch.Generator().manual_seed((self._seed + zlib.crc32(held.key.encode())) % 2**63)
        return held.generator

    def _source(self, tensor: torch.Tensor) -> Source:
        held = self._held.get(id(tensor))
        if held is None or tensor.dtype != torch.bfloat16:
            return Source.of(tensor)
        held.check_values()
        return master_source(tensor, held.low)


class _Exactly(TorchFunctionMode):
    def __init__(self, masters: Masters):
        super().__init__()
        self._masters = masters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) > 1 and self._masters.take(args[0], args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))
