"""CallRunner: runs the calls of a forward that is captured, on fake tensors or on values, and checks their effects."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import FakeTensor, FakeTensorMode, pytree
from megatrain.tracer.calls import is_of_torch
from megatrain.tracer.inventory import StateValues
from megatrain.tracer.packing import PackedState
from megatrain.tracer.python.followed_numbers import Following
from megatrain.tracer.recording.effect_watch import EffectWatch
from megatrain.tracer.recording.gradient_order import GradientOrder
from megatrain.tracer.recording.obstacles import (
    RUN_AGAIN,
    Attempt,
    StartAgainError,
    call_on_fakes,
    refuse,
    refuse_read,
    unprinted_failures,
)
from megatrain.tracer.recording.random_numbers import GeneratorWatch
from megatrain.tracer.recording.recall import Recall
from megatrain.tracer.recording.tape import Tape
from megatrain.tracer.spec import storage_key

MOST_BYTES = 1 << 30
"""A capture computes nothing larger: a mask of 32768 by 32768 tokens has as much, of one byte each."""
# Bytes of the widest elements, complex numbers of double precision.
_WIDEST = 16
# Calls that hand the contents of a tensor to Python and that fake tensors answer with errors of their own.
_VALUE_READS = {"numpy", "__array__", "__dlpack__", "__format__", "__repr__"}


class CallRunner(TorchFunctionMode):
    """Runs torch calls with itself switched off.

    Calls that depend on inputs and constants alone run for real, unless their results are very large. State is fake,
    and so are values that depend on state or on random numbers. If the attempt uses values, a call runs on the values
    behind the fake state. Modules hold fake state in either case, so that questions about state (device, shape) have
    one answer.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        state: StateValues,
        originals: dict[int, torch.Tensor],
        device: torch.device,
        attempt: Attempt,
        earlier: CallRunner | None = None,
        *,
        packed: PackedState,
    ):
        super().__init__()
        self._generator = GeneratorWatch()
        self.effects = EffectWatch(self._check_read, self._check_write, self._generator.draw)
        earlier_tape = None if earlier is None else earlier.tape
        self.tape = Tape(self.effects, device, uses_values=attempt.uses_values, earlier=earlier_tape)
        self.gradient_order = GradientOrder()
        is_recalling = attempt.recalls and not attempt.uses_values
        self.recall = Recall(fake_mode, self.tape.table, originals, self._refuse_recall, is_on=is_recalling)
        self.is_recording = False
        self._fake_mode = fake_mode
        self._state = state
        self._originals = originals  # fake state, by the id of the real tensor
        self._attempt = attempt
        self._packed = packed
        # What opaque modules and observing hooks changed in Python: their code does it again at each step.
        self.changed_by_users: set[tuple[Any, Any]] = set()
        self._operands: set[int] = set()
        self._reads_graph = False
        self.runs_on_fakes = False
        self._left_out_large = False
        self._drops_saved = attempt.uses_values and not attempt.keeps_saved
        self._needs: dict[str, Any] = {}  # what another attempt must have; the model may catch the error that says so
        self.host_drawer: tuple[str, ...] = ()  # the calls around a draw from Python's or NumPy's generators
        self.following = Following()

    @contextmanager
    def unrecorded(self) -> Generator[None]:
        """Lets torch functions pass while the recorder itself works, or runs a call."""
        was_recording, self.is_recording = self.is_recording, True
        try:
            yield
        finally:
            self.is_recording = was_recording

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], *, is_users: bool = False) -> Any:
        """Runs a call; `is_users` says that it runs any code of the user's, which may differentiate."""
        has_fakes = any(isinstance(x, FakeTensor) for x in operands)
        if has_fakes and self.tape.site[1] in _VALUE_READS:
            refuse_read(*self.tape.site)
        self._operands = {storage_key(x) for x in operands if x.layout == torch.strided}
        # A backward reads what the graph of its arguments saved.
        self._reads_graph = func is torch.autograd.grad
        if self._reads_graph and self._drops_saved:
            self._refuse_saved()
        self.effects.clear()
        self.runs_on_fakes = False
        # Ctrl-C waits for the end of the call: C++ ends the process at some errors in a dispatch mode.
        with Interrupts(), self.unrecorded():
            is_large = not has_fakes and self._is_too_large(func, args, kwargs, operands)
            is_made_fake = not self._attempt.uses_values and self.tape.site in self._attempt.make_fake
            if not (has_fakes or is_made_fake or is_large):
                with self.effects, nullcontext() if is_users else self._dropping_saved(operands):
                    result = func(*args, **kwargs)
            else:
                self.runs_on_fakes = True
                for operand in operands:
                    self._follow_copy(operand)
                if is_large:  # fake tensors compute what depends on real ones alone
                    args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake_mode.from_tensor, (args, kwargs))
                with self._fake_mode, self.effects:
                    result = call_on_fakes(func, args, kwargs, *self.tape.site)
            if self.effects.written:
                self.recall.note_writes(self.effects.written)
            return result

    @contextmanager
    def _dropping_saved(self, operands: list[torch.Tensor]) -> Generator[None]:
        """Throws away what autograd saves for a backward: for all blocks at once, the device may have no room.

        Tensors still require grad as in eager, because kernels look at that.
        """
        is_saving = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        if not is_saving or not self._drops_saved:
            yield
            return
        with saved_tensors_hooks(lambda _: None, self._refuse_saved):
            yield

    def _refuse_saved(self, *_: object) -> NoReturn:
        """Asks for an attempt that keeps what autograd saves."""
        self._needs = {"keeps_saved": True}
        raise StartAgainError(**self._needs)

    def _refuse_recall(self, *_: object) -> NoReturn:
        """Asks for an attempt that runs every call."""
        self._needs = {"recalls": False}
        raise StartAgainError(**self._needs)

    def check_needs(self) -> None:
        """Checks that the forward could do without what this attempt leaves out."""
        if self._needs:
            raise StartAgainError(**self._needs)

    def _is_too_large(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> bool:
        """Tells of a call whose operands have values whether its result stays without."""
        if self._attempt.uses_values or self._attempt.computes_large:
            return False
        is_large = _makes_large(func, args, kwargs, operands, self._fake_mode)
        self._left_out_large |= is_large
        return is_large

    def _follow_copy(self, tensor: torch.Tensor) -> None:
        """Makes the fake that stands for a real tensor among fakes count as that tensor's memory, for writes."""
        if not isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
            fake = self._fake_mode.from_tensor(tensor)
            self.tape.table.stand_in_memory(fake, tensor)
            self._operands.add(storage_key(fake))

    def _value(self, tensor: torch.Tensor, *, is_leaf: bool = False) -> torch.Tensor:
        """Returns the tensor with the values of fake state, where the attempt uses them; a leaf for the user's code."""
        if not self._attempt.uses_values or not self._state.has(tensor):
            return tensor
        with self.unrecorded():
            refuse = self._refuse_saved if self._drops_saved else None
            value = self._state.value(tensor, refuse)
            if is_leaf:
                value = self._state.leaf(tensor)
        if self.tape.table.node(value) is None:
            self.tape.table.stand_in(value, tensor)
        return value

    def _check_read(self, tensor: torch.Tensor) -> None:
        storage = storage_key(tensor)
        if self.tape.table.knows_storage(storage) and storage not in self._operands and not self._reads_graph:
            refuse(
                f"reads a tensor inside `{self.tape.site[1]}` that isn't among its arguments",
                "All tensors that a call reads must be in the graph; this tensor would become a constant.",
                "Pass the tensor as an argument.",
                remedy=RUN_AGAIN,
            )

    def _check_write(self, tensor: torch.Tensor) -> None:
        for node, known in self.tape.table.names(storage_key(tensor)):
            if node.op == "placeholder" and known.requires_grad:
                refuse(
                    f"writes into its input `{node.name}` in place, which requires a gradient",
                    "The gradient of the old content would go to another tensor.",
                    "Clone the input first.",
                )
            if node.op == "placeholder":
                raise StartAgainError(written_inputs=frozenset({str(node.name)}))
            is_real = not isinstance(known, FakeTensor)
            if node.op == "get_attr" and (is_real or self._state.is_shared(known)):
                refuse(
                    "writes into a tensor that isn't a buffer",
                    "Only buffers are written back after a step.",
                    "Register the tensor with register_buffer.",
                )
            turns_unknown = self.runs_on_fakes or self.effects.is_random
            if turns_unknown and not self._attempt.uses_values and is_real and node in self.tape.made_by:
                raise StartAgainError(make_fake=frozenset({self.tape.made_by[node]}))

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.unrecorded(), self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _makes_large(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[torch.Tensor], mode: FakeTensorMode
) -> bool:
    """Tells whether a call makes a tensor of more than `MOST_BYTES`, as a mask of a long text is.

    Such a call is tried on tensors without values. No result of torch's own functions has more elements than all
    operands and whole numbers multiplied, so nearly all calls need no trial.
    """
    if _most_elements(args, kwargs, operands) * _WIDEST <= MOST_BYTES or not is_of_torch(func):
        return False
    given = max((tensor.untyped_storage().nbytes() for tensor in operands), default=0)
    try:
        with unprinted_failures(), mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
            result = func(*args, **kwargs)
    except Exception:  # whatever is wrong with it, the call itself tells
        return False
    made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return any(t.layout == torch.strided and t.untyped_storage().nbytes() > max(given, MOST_BYTES) for t in made)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _most_elements(args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[torch.Tensor]) -> int:
    numbers = [abs(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is int]
    return math.prod(max(1, size) for size in (*numbers, *(tensor.numel() for tensor in operands)))
