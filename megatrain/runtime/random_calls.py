"""Random numbers: the generators of a step, what each micro-batch and each recompute draws."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import fx

from megatrain.device import Device
from megatrain.errors import DrawsError
from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.tracer.block_image import stored_stride
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.opaque import Observer, Opaque, unobserved
from megatrain.tracer.recording.random_numbers import HostRng
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    spec: TensorSpec
    requires_grad: bool

    def like_it(self, device: Device) -> torch.Tensor:
        """A tensor of ones: a probability, a weight, a standard deviation, or an index."""
        spec, place = self.spec, torch.device("cpu") if self.spec.on_host else device.torch_device
        made = torch.empty_strided(spec.shape, stored_stride(spec), dtype=spec.dtype, device=place).fill_(1)
        return (
            made.requires_grad_().clone() if self.requires_grad else made
        )  # a call may write into it, if it's no leaf


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One random call, with nothing but its operands' shapes."""

    code: Code
    operands: Sequence[_Operand]

    def make(self, device: Device) -> None:
        """Draws from the present generators."""
        with torch.enable_grad():
            self.code([operand.like_it(device) for operand in self.operands])


class Draws:
    """The random calls of a program, in the order of its forward.

    Args:
        are_hidden: Some of them draw from a state that torch doesn't show.
        are_opaque: There are opaque modules, which drew nothing when they were captured.
    """

    def __init__(self, calls: Sequence[Sequence[_Draw]], *, are_hidden: bool = False, are_opaque: bool = False) -> None:
        self._calls = calls
        self.are_hidden = are_hidden
        self.are_opaque = are_opaque

    @staticmethod
    def of(program: Program) -> Draws | None:
        """Finds the random calls; None if one can't be made alone, such as that of an opaque module that draws."""
        of_template = functools.cache(lambda name: _draws_of(program.templates[name].graph))  # pyright: ignore
        calls: list[Sequence[_Draw]] = []
        if any(template.hides_draws for template in program.templates.values()):
            return Draws(calls, are_hidden=True)
        for block in program.blocks:
            found = of_template(block.template)
            if found is None:
                return None
            calls.append(found)
        return Draws(calls, are_opaque=bool(program.opaque_calls))

    def make(self, device: Device) -> None:
        """Draws what a forward draws, from the present generators.

        How many numbers a call draws may depend on its operands' shapes, layouts and history, not on their values.
        """
        for call in chain.from_iterable(self._calls):
            call.make(device)


def _draws_of(graph: fx.Graph) -> list[_Draw] | None:
    nodes = [node for node in graph.nodes if node.meta.get("is_random") and not node.meta.get("drew_nothing")]
    found = [_draw_of(node) for node in nodes]
    return None if None in found else [draw for draw in found if draw is not None]


def _draw_of(node: fx.Node) -> _Draw | None:
    alone = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    operands: list[_Operand] = []
    for operand in node.all_input_nodes:
        spec = operand.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return None
        known[operand] = alone.placeholder(operand.name)
        operands.append(_Operand(spec, bool(operand.meta["requires_grad"])))
    alone.node_copy(node, known.__getitem__)
    alone.output(())
    code = Code(alone)
    return None if code.opaque else _Draw(code, operands)


# MicroBatchGenerators: what a micro-batch of a training step draws from.
#
# A loop over micro-batches draws in the order of its forwards. A training step runs the blocks of all micro-batches in
# turns, so each micro-batch draws from generators of its own: they begin where the forward before it ends.


@dataclass(slots=True)
class MicroBatchGenerators:
    """What a micro-batch of a training step draws from.

    Args:
        state: Where the generators of its forward are now; None if it draws from the global ones.
        ends_at: Where its forward must end, because the next one begins there; None if none does.
        is_quiet: Its loss may not draw: the model draws, and the next forward comes later in the loop, and earlier in
            the step.
        is_still: No block may draw: opaque modules drew nothing when they were captured.
        host: Where Python's and NumPy's generators must stay, because nobody knows of draws from them; None if they may
            move.
    """

    device: Device
    state: RngState | None = None
    ends_at: RngState | None = None
    is_quiet: bool = False
    is_still: bool = False
    host: HostRng | None = None

    @staticmethod
    def of(draws: Sequence[Draws | None], are_random: Sequence[bool], device: Device) -> Sequence[MicroBatchGenerators]:
        """Divides the random numbers of a step that begins now among its micro-batches.

        If a forward draws, all draw as in a loop over micro-batches.

        Raises:
            DrawsError: If a forward can't be drawn ahead: it draws in an opaque module or a hook, or from a state that
                torch doesn't show.
        """
        count = len(draws)
        if count == 1 or not any(are_random):
            has_opaque = count > 1 and any(each is not None and each.are_opaque for each in draws)
            return [MicroBatchGenerators(device, is_still=has_opaque) for _ in draws]
        if any(each is not None and each.are_hidden for each in draws):
            raise DrawsError(
                "the model has an RNN with dropout, whose random numbers come from a state inside of cuDNN.\n"
                "  Micro-batches of a step draw in the order of a loop, so their generators must be known ahead.\n"
                "  Give TrainStep a single micro-batch; or give the RNN dropout=0, and its layers nn.Dropout."
            )
        if any(each is None for each in draws):
            raise DrawsError(
                "a module or a hook that runs its own code draws random numbers.\n"
                "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                "  Give TrainStep a single micro-batch, or write the loop yourself; print(compiled.program) says why "
                "code is opaque."
            )
        host = HostRng.now() if any(each is not None and each.are_opaque for each in draws) else None
        found = [MicroBatchGenerators(device, is_quiet=True, host=host) for _ in draws]
        with kept_generators(device):
            for each, (earlier, later) in zip(draws, pairwise(found), strict=False):
                assert each is not None
                each.make(device)
                earlier.ends_at = later.state = RngState.now(device)
        return found

    def check(self) -> None:
        """Checks that the forward, which is over, drew as many numbers as were drawn ahead."""
        now = RngState.now(self.device) if self.state is None else self.state
        has_moved = self.host is not None and self.host != HostRng.now()
        if has_moved or (self.ends_at is not None and not self.ends_at.is_same(now)):
            raise DrawsError(_DREW_OTHERWISE)

    def drawing(self, block: int | None) -> AbstractContextManager[None]:
        """Lets the body draw as a block of the forward does, or as the loss, if that may; None is the loss."""
        if block is None:
            return self._without_draws(_LOSS_DRAWS) if self.is_quiet else nullcontext()
        if self.is_still:
            return self._without_draws(_DREW_OTHERWISE)
        return nullcontext() if self.state is None else self._drawing_own(self.state)

    @contextmanager
    def _drawing_own(self, state: RngState) -> Generator[None]:
        """Runs the body with generators of this micro-batch instead of the global ones, which stay as they are."""
        with kept_generators(self.device):
            state.restore(self.device)
            yield
            self.state = RngState.now(self.device)

    @contextmanager
    def _without_draws(self, refusal: str) -> Generator[None]:
        with kept_generators(self.device):
            before = RngState.of_all(self.device)
            yield
            is_quiet = before.is_same(RngState.of_all(self.device))
        if not is_quiet:
            raise DrawsError(refusal)

    def leave(self) -> None:
        """Sets the global generators to the end of this forward, the last of a step."""
        if self.state is not None:
            self.state.restore(self.device)


_DREW_OTHERWISE = (
    "the model drew another number of random values than the shapes of its tensors say.\n"
    "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
    "  Give TrainStep a single micro-batch, or draw the values (torch.poisson, gamma) outside of the model."
)
_LOSS_DRAWS = (
    "the loss draws random numbers, and so does the model.\n"
    "  In a loop over micro-batches a loss draws before the next forward; a step runs the forwards in turns.\n"
    "  Draw in the model, give TrainStep a single micro-batch, or write the loop yourself."
)


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """The generators' state at one moment.

    Args:
        device: State of the compute device's generator; None where it draws from that of the CPU.
        python: That of Python's and NumPy's generators; None if no code reads them.
        attributes: What opaque modules and hooks read and change besides.
    """

    host: torch.Tensor
    device: torch.Tensor | None
    python: HostRng | None = None
    attributes: tuple[Snapshot, ...] = ()

    @staticmethod
    def now(device: Device, opaque: Sequence[Opaque | Observer] = ()) -> RngState:
        """Reads torch's generators, and all that the code of opaque modules and hooks reads."""
        found = RngState.of_all(device) if opaque else RngState(torch.get_rng_state(), device.generator_state())
        return replace(found, attributes=tuple(call.python_state() for call in opaque))

    @staticmethod
    def of_all(device: Device) -> RngState:
        """Reads all global generators: torch's, Python's and NumPy's."""
        return RngState(torch.get_rng_state(), device.generator_state(), HostRng.now())

    def is_same(self, other: RngState) -> bool:
        """Tells whether nothing was drawn from one to the other."""
        of_device = self.device is None or (other.device is not None and torch.equal(self.device, other.device))
        return torch.equal(self.host, other.host) and of_device and self.python == other.python

    def restore(self, device: Device) -> None:
        """Puts everything back to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            device.set_generator_state(self.device)
        if self.python is not None:
            self.python.restore()
        for attributes in self.attributes:
            attributes.restore()


@contextmanager
def repeated_rng(state: RngState | None, device: Device, opaque: Sequence[Opaque | Observer] = ()) -> Generator[None]:
    """Runs the body from `state` and then puts the generators back as they were; None changes nothing."""
    with unobserved():
        if state is None:
            yield
            return
        with _moving.turn:
            present = RngState.now(device, opaque)
            state.restore(device)
            try:
                yield
            finally:
                present.restore(device)


class _Moving(threading.local):
    """What this thread holds while it repeats earlier draws."""

    turn: AbstractContextManager[object] = nullcontext()


_moving = _Moving()


@contextmanager
def moving_in_turn(turn: AbstractContextManager[object]) -> Generator[None]:
    """In the body this thread holds `turn` while it repeats earlier draws, so that others who hold it don't see them.

    Each step has a turn of its own: a hook on a gradient, which holds that of its step, may train another model.
    """
    before, _moving.turn = _moving.turn, turn
    try:
        yield
    finally:
        _moving.turn = before


@contextmanager
def kept_generators(device: Device) -> Generator[None]:
    """Puts the global generators back after the body."""
    present = RngState.of_all(device)
    try:
        yield
    finally:
        present.restore(device)
