"""The fp32 parameters of a model become bf16, and the lost bits low halves; or files are read into both halves."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megatrain.base.interrupts import Interrupts
from megatrain.device import is_on_host
from megatrain.device.unshared import PARTED, check_unshared, held_elsewhere, warn_of_holders
from megatrain.errors import ExecuteError, OptionError
from megatrain.files.weight_files import Stored, parts
from megatrain.optim.masters.halves import (
    SplitMaster,
    dense,
    in_memory,
    memory_order,
    pieces,
    read_,
    set_halves,
    write_,
)
from megatrain.optim.masters.registry import Kind, Masters
from megatrain.runtime.stores.weights import Weights
from megatrain.tracer.inventory import StateEntry, check_plain_state, first_packed, inventory


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """An fp32 tensor in two halves, which together take as many bytes.

    Args:
        high: bf16.
        low: int16, the bits that `high` lacks, laid out like it; None on meta, and if `whole` is kept.
        ties: Where, in the order of memory, `high` is the lower one of two bf16 values at the same distance: 16 bits
            can't tell these values from their mirror images.
        whole: The tensor itself, if it isn't a dense one of fp32.
    """

    high: torch.Tensor
    low: torch.Tensor | None = None
    ties: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    @staticmethod
    def of(wide: torch.Tensor, *, is_master: bool) -> Narrowed:
        """Narrows a tensor, which stays as it is.

        Args:
            wide: Any tensor of floating-point numbers.
            is_master: Round ties as `SplitMaster` does, so that the halves are one; else as torch does.
        """
        if wide.layout != torch.strided or wide.dtype != torch.float32:
            return Narrowed(wide.to(torch.bfloat16), whole=wide)
        values = dense(wide)
        high = torch.empty_like(values, dtype=torch.bfloat16, requires_grad=False)
        if wide.is_meta:
            return Narrowed(high)
        low = torch.empty_like(values, dtype=torch.int16, requires_grad=False)
        order = memory_order(values)
        write_(SplitMaster(in_memory(high, order), in_memory(low, order)), in_memory(values, order))
        ties = None if is_master else _round_ties(_flat(high), _flat(low), _flat(values))
        return Narrowed(high, low, ties)

    def widened(self) -> torch.Tensor:
        """Returns a tensor with the bits of the wider one."""
        if self.whole is not None:
            return self.whole
        wide = torch.empty_like(self.high, dtype=torch.float32)
        if self.low is None:
            return wide
        order = memory_order(wide)
        read_(in_memory(wide, order), SplitMaster(in_memory(self.high, order), in_memory(self.low, order)))
        if self.ties is not None:
            bits = _flat(self.high).view(torch.int16)[self.ties].int().bitwise_left_shift_(16)
            _flat(wide).view(torch.int32)[self.ties] = bits.add_(0x8000)
        return wide


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory(tensor, memory_order(tensor)).view(-1)


def _round_ties(high: torch.Tensor, low: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Rounds as torch does, ties to even, and returns the places where the result differs."""
    found: list[torch.Tensor] = []
    for start, end in pieces(values.numel()):
        rounded = values[start:end].to(torch.bfloat16)
        is_other = rounded.view(torch.int16) != high[start:end].view(torch.int16)
        high[start:end] = rounded
        places = (is_other & (low[start:end] == -0x8000)).nonzero().view(-1)
        if places.numel():
            found.append(places.add_(start).to(torch.int32 if values.numel() < 2**31 else torch.int64))
    return torch.cat(found) if found else None


_OF_MODELS: WeakKeyDictionary[nn.Module, Masters] = WeakKeyDictionary()
"""A model that is compiled again goes on with the masters that it has."""


def masters_of(model: nn.Module, kind: Kind) -> Masters:
    """Returns the masters of a model; it stays as it is, until `narrowed`.

    Raises:
        OptionError: If a parameter is neither fp32 nor bf16.
        TraceError: If a tensor of its state isn't a plain dense one.
        ExecuteError: If a parameter to be narrowed shares memory with other state, or is on another device.
    """
    if kind == "whole":
        return Masters(model, kind)
    check_plain_state(model)
    known = _OF_MODELS.get(model)
    entries, tensors = inventory(model)
    check_packed_width(entries)
    parameters = {key: tensors[key] for key in plain_parameters(entries)}
    others = [key for key, p in parameters.items() if p.dtype not in (torch.float32, torch.bfloat16)]
    if others:
        more = f", nor are {len(others) - 1} others" if len(others) > 1 else ""
        raise OptionError(
            f"precision='bf16': parameter `{others[0]}` {entries[others[0]].spec} is neither fp32 nor bf16{more}.\n"
            "  fp32 parameters become bf16 with exact fp32 masters; a model with bf16 parameters stays as it is.\n"
            "  Convert the parameter, register values that aren't floating-point as a buffer, or use precision='fp32'."
        )
    is_wide = is_all_wide(entries)
    if is_wide:
        check_unshared(tensors)
        for key, parameter in parameters.items():
            if not parameter.is_meta and not is_on_host(parameter):
                raise ExecuteError(
                    f"parameter `{key}` is on {parameter.device}.\n"
                    "  Parameters stay in host memory; the device only borrows them.\n"
                    '  Move the model back with model.to("cpu").'
                )
    casts_inputs = is_wide or (known is not None and known.casts_inputs)
    if known is not None and (known.kind, known.casts_inputs) == (kind, casts_inputs):
        return known
    return Masters(model, kind, casts_inputs=casts_inputs)


@contextmanager
def narrowed(model: nn.Module, masters: Masters) -> Generator[None]:
    """Makes the parameters of a model bf16, if all are fp32 and the masters say so; nothing else changes.

    They stay the same objects. One after the other is converted and frees its old memory; gradients are converted too.
    If the conversion or the body fails, all parameters are fp32 again, with all their bits.
    """
    if masters.kind == "whole":
        yield
        return
    narrowing = _Narrowing(model, masters)
    # Twice: Ctrl-C may come at any line, also while a failure is undone.
    try:
        try:
            narrowing.do()
            yield
        except BaseException:
            narrowing.undo()
            raise
    except BaseException:
        narrowing.undo()
        raise


@contextmanager
def explained(masters: Masters) -> Generator[None]:
    """Adds the origin of mixed dtypes to torch's error."""
    try:
        yield
    except RuntimeError as error:
        if masters.casts_inputs and "type" in str(error):
            error.add_note(
                'precision="bf16" made the parameters and inputs of this model bf16; its buffers keep their dtype.\n'
                "  If a module needs fp32 parameters with its fp32 buffers, as BatchNorm does, make the rest of "
                "the model\n"
                "  bf16 yourself: docs/precision.md."
            )
        raise


def plain_parameters(entries: Mapping[str, StateEntry]) -> dict[str, StateEntry]:
    """Returns the parameters that are no tensors of packed ones."""
    return {key: e for key, e in entries.items() if e.kind == "parameter" and e.packed_in is None}


def is_all_wide(entries: Mapping[str, StateEntry]) -> bool:
    """Tells whether all parameters are fp32, so that precision="bf16" makes them bf16."""
    return all(e.spec.dtype == torch.float32 for e in entries.values() if e.kind == "parameter")


def check_packed_width(entries: Mapping[str, StateEntry]) -> None:
    """Refuses precision="bf16" for an fp32 model with packed parameters: the rest would become bf16, and they wouldn't.

    Raises:
        OptionError: Naming one of these.
    """
    plain = plain_parameters(entries)
    packed = first_packed(entries)
    if packed is not None and all(e.spec.dtype == torch.float32 for e in plain.values()):
        raise OptionError(
            f"precision='bf16': the model is fp32, and its packed parameter `{packed}` can't be converted.\n"
            "  What a packed parameter computes in was decided when the weight was quantized.\n"
            "  Convert the model to bf16 before it is quantized, or use precision='fp32'."
        )


def narrow_entries(entries: Mapping[str, StateEntry]) -> dict[str, StateEntry]:
    """Describes the state with its parameters in bf16, if all of them are fp32; otherwise unchanged."""
    check_packed_width(entries)
    if not is_all_wide(entries):
        return dict(entries)
    parameters = plain_parameters(entries).values()
    narrow = {e.key: replace(e, spec=replace(e.spec, dtype=torch.bfloat16)) for e in parameters}
    return {key: narrow.get(key, entry) for key, entry in entries.items()}


class _Narrowing:
    """Parameters on their way to bf16; the lost bits of all of them are kept until nothing can fail any more."""

    def __init__(self, model: nn.Module, masters: Masters):
        self._model = model
        self._masters = masters
        self._known = _OF_MODELS.get(model)
        self._taken: list[tuple[nn.Parameter, Narrowed, Narrowed | None]] = []

    def do(self) -> None:
        """Narrows all parameters, if all are fp32."""
        _OF_MODELS[self._model] = self._masters
        self._masters.find()
        entries, tensors = inventory(self._model)
        if is_all_wide(entries):
            held = held_elsewhere({key: tensors[key] for key in plain_parameters(entries)})
            warn_of_holders(
                held, PARTED, 'precision="bf16" converts parameters. Take the other from the model afterwards.'
            )
            with torch.inference_mode(False), torch.no_grad():
                for parameter in self._model.parameters():
                    self._narrow(parameter)

    def _narrow(self, parameter: nn.Parameter) -> None:
        has_halves = self._masters.halves(parameter)
        values = Narrowed.of(parameter.detach(), is_master=has_halves)
        gradient = None if parameter.grad is None else Narrowed.of(parameter.grad, is_master=False)
        self._taken.append((parameter, values, gradient))  # from here on it can be undone, at any line
        if has_halves and values.low is not None:
            self._masters.keep(parameter, values.high, values.low)
        _give(parameter, values.high, None if gradient is None else gradient.high)

    def undo(self) -> None:
        """Makes them fp32 again, the latest first. Parameters that are fp32 again already stay as they are."""
        with Interrupts(), torch.inference_mode(False), torch.no_grad():
            while self._taken:
                self._widen(*self._taken[-1])
                self._taken.pop()  # its halves are free before the next one gets its memory
            if self._known is None:
                _OF_MODELS.pop(self._model, None)
            else:
                _OF_MODELS[self._model] = self._known

    def _widen(self, parameter: nn.Parameter, values: Narrowed, gradient: Narrowed | None) -> None:
        if parameter.dtype != torch.float32:
            _give(parameter, values.widened(), None)
        if gradient is not None and (parameter.grad is None or parameter.grad.dtype != torch.float32):
            parameter.grad = gradient.widened()
        self._masters.keep(parameter, None, None)


def _give(parameter: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None  # it must have the dtype of its parameter
    parameter.data = values
    parameter.grad = gradient


class MasterWeights(Weights):
    """Values in files for a model whose bf16 parameters have masters.

    fp32 values give both halves, bf16 values the high half. Only one piece at a time exists in fp32.

    Args:
        model: As of `Weights`.
        paths: As of `Weights`.
        masters: Of the model.
    """

    def __init__(self, model: nn.Module, paths: Sequence[Path], masters: Masters) -> None:
        super().__init__(model, paths)
        self._masters = masters

    def _fill(self, source: Stored, key: str, out: torch.Tensor) -> None:
        low = self._masters.room_for(key)
        if low is None:
            super()._fill(source, key, out)
            return
        for (high, values), part in zip(source.pieces(out), parts(low, source.piece_numel), strict=True):
            set_halves(high, part, values)

    def _is_same(self, source: Stored, key: str, out: torch.Tensor) -> bool:
        low = self._masters.room_for(key)
        if low is None:
            return super()._is_same(source, key, out)
        for (high, values), part in zip(source.pieces(out), parts(low, source.piece_numel), strict=True):
            master = SplitMaster(high.contiguous(), part.contiguous())
            found = read_(torch.empty(high.shape), master)
            expected = read_(torch.empty(high.shape), SplitMaster.of(values.to(torch.float32)))
            if not torch.equal(found.view(-1).view(torch.int32), expected.view(-1).view(torch.int32)):
                return False
        return True
