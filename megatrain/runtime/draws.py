"""Draws: the random numbers of a forward, drawn without the forward, to learn where the generators are behind it.

A loop over micro-batches draws in the order of its forwards. A training step runs the blocks of all micro-batches in
turns, so each micro-batch draws from generators of its own: they begin where the forward before it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from megatrain.device import Device
from megatrain.errors import DrawsError
from megatrain.memory.block_image import stored_stride
from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.runtime.rng import OwnGenerators, RngState, kept_generators, micro_batch_seed
from megatrain.tracer.recording.random_numbers import HostRng
from megatrain.tracer.spec import TensorSpec

_ONLY_AS_A_LOOP: ContextVar[bool] = ContextVar("_ONLY_AS_A_LOOP", default=False)


@contextmanager
def only_as_a_loop() -> Generator[None]:
    """Refuses steps in the body whose micro-batches would draw other numbers than a loop does."""
    before = _ONLY_AS_A_LOOP.set(True)
    try:
        yield
    finally:
        _ONLY_AS_A_LOOP.reset(before)


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


class Draws:
    """The random calls of a program, in the order of its forward.

    Args:
        calls: Of the whole forward.
        are_hidden: Some of them draw from a state that torch doesn't show.
        are_opaque: There are opaque modules, which drew nothing when they were captured.
    """

    def __init__(self, calls: Sequence[_Draw], *, are_hidden: bool = False, are_opaque: bool = False) -> None:
        self._calls = calls
        self.are_hidden = are_hidden
        self.are_opaque = are_opaque

    @staticmethod
    def of(program: Program) -> Draws | None:
        """Finds the random calls; None if one can't be made alone, such as that of an opaque module that draws."""
        of_template = functools.cache(lambda name: _draws_of(program.templates[name].graph))  # pyright: ignore
        calls: list[_Draw] = []
        if any(template.hides_draws for template in program.templates.values()):
            return Draws(calls, are_hidden=True)
        for block in program.blocks:
            found = of_template(block.template)
            if found is None:
                return None
            calls.extend(found)
        return Draws(calls, are_opaque=bool(program.opaque_calls))

    def make(self, device: Device) -> None:
        """Draws what a forward draws, from the present generators.

        How many numbers a call draws may depend on its operands' shapes, layouts and history, not on their values.
        """
        with torch.enable_grad():
            for call in self._calls:
                call.code([operand.like_it(device) for operand in call.operands])


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


@dataclass(frozen=True, slots=True, eq=False)
class DealtDraws:
    """The part of a step's random numbers that is one rank's.

    Args:
        starts_at: Where the generators of rank 0 are when the step begins.
        begins_at: Where this rank's first forward begins.
        ends: Where each of its forwards ends.
        first: How many micro-batches earlier ranks have.
        total: How many all ranks have.
        leaves_at: Where the step leaves this rank's global generators: on rank 0 at the end of the last forward of all
            ranks, on others where they are.
    """

    starts_at: RngState
    begins_at: RngState
    ends: Sequence[RngState]
    first: int
    total: int
    leaves_at: RngState


def drawn_ends(draws: Sequence[Draws | None], begins_at: RngState, device: Device) -> list[RngState]:
    """Draws what some forwards draw, one after the other; returns where the generators are after each of them.

    Args:
        draws: Of each forward.
        begins_at: Where the first begins.
        device: Compute device.

    Raises:
        DrawsError: If a forward can't be drawn ahead.
    """
    ends: list[RngState] = []
    with kept_generators(device):
        begins_at.restore(device)
        for each in draws:
            if each is None or each.are_hidden or each.are_opaque:
                raise DrawsError(
                    "the model draws random numbers that nobody can draw ahead of its forward.\n"
                    "  Each rank draws what one process would draw for its micro-batches, so it must know what others "
                    "draw.\n"
                    "  Use nn.Dropout or torch's own random functions in the model, or train in one process."
                )
            each.make(device)
            ends.append(RngState.now(device))
    return ends


@dataclass(slots=True)
class MicroBatchGenerators:
    """What a micro-batch of a training step draws from.

    Args:
        forward: Its forward; None for the global generators.
        loss: Its loss; None for the global generators.
        ends_at: Where its forward must end, because the next one begins there; None if none does.
        host: Where Python's and NumPy's generators must stay, because nobody knows of draws from them; None if they may
            move.
        leaves_at: Where the step leaves the global generators; None: where the last forward does.
    """

    forward: OwnGenerators | None = None
    loss: OwnGenerators | None = None
    ends_at: RngState | None = None
    host: HostRng | None = None
    leaves_at: RngState | None = None

    @staticmethod
    def of_rank(draws: Sequence[Draws | None], device: Device, dealt: DealtDraws) -> Sequence[MicroBatchGenerators]:
        """What the micro-batches of one rank draw from: as those of a process that has the micro-batches of all ranks.

        Args:
            draws: The random calls of each micro-batch.
            device: Compute device.
            dealt: Where this rank stands.
        """
        found: list[MicroBatchGenerators] = []
        begins = [dealt.begins_at, *dealt.ends]
        for number, each in enumerate(draws):
            assert each is not None
            seed = micro_batch_seed(dealt.total + dealt.first + number, device, dealt.starts_at)
            # The first of all draws from the global generators, as it does in a process alone.
            forward = None if dealt.first + number == 0 else OwnGenerators(begins[number], device)
            loss = OwnGenerators.seeded(seed, device)
            found.append(MicroBatchGenerators(forward, loss, ends_at=begins[number + 1], leaves_at=dealt.leaves_at))
        return found

    @staticmethod
    def of(draws: Sequence[Draws | None], are_random: Sequence[bool], device: Device) -> Sequence[MicroBatchGenerators]:
        """Divides the random numbers of a step that begins now among its micro-batches.

        If a forward draws, all draw as in a loop over micro-batches, and their losses from seeded generators: a loop's
        order has the loss of one ahead of the forward of the next. Forwards that can't be drawn ahead (of opaque
        modules) have seeded generators as well; the first of them has the global ones.

        Args:
            draws: The random calls of each micro-batch.
            are_random: Which of them draw.
            device: Compute device.

        Raises:
            DrawsError: If a forward draws from a state that torch doesn't show; or, in `only_as_a_loop`, can't be drawn
                ahead.
        """
        count = len(draws)
        if count == 1 or not any(are_random):
            return [MicroBatchGenerators() for _ in draws]
        if any(each is not None and each.are_hidden for each in draws):
            raise DrawsError(
                "the model has an RNN with dropout, whose random numbers come from a state inside of cuDNN.\n"
                "  Micro-batches of a step draw in the order of a loop, so their generators must be known ahead.\n"
                "  Give TrainStep a single micro-batch; or give the RNN dropout=0, and its layers nn.Dropout."
            )

        def seeded(number: int) -> OwnGenerators:
            return OwnGenerators.seeded(micro_batch_seed(number, device), device)

        found = [MicroBatchGenerators(loss=seeded(count + number)) for number in range(count)]
        if any(each is None for each in draws):
            if _ONLY_AS_A_LOOP.get():
                raise DrawsError(
                    "a module that runs its own code draws random numbers.\n"
                    "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                    "  Give TrainStep a single micro-batch; print(compiled.program) says why the module is opaque."
                )
            for number, each in enumerate(found[1:], start=1):
                each.forward = seeded(number)
            return found
        if any(each is not None and each.are_opaque for each in draws):
            host = HostRng.now()
            for each in found:
                each.host = host
        with kept_generators(device):
            for each, (earlier, later) in zip(draws, pairwise(found), strict=False):
                assert each is not None
                each.make(device)
                earlier.ends_at = RngState.now(device)
                later.forward = OwnGenerators(earlier.ends_at, device)
        return found

    def check(self, device: Device) -> None:
        """Checks that the forward, which is over, drew as many numbers as were drawn ahead.

        Raises:
            DrawsError: If it drew others.
        """
        now = RngState.now(device) if self.forward is None else self.forward.state
        has_moved = self.host is not None and self.host != HostRng.now()
        if has_moved or (self.ends_at is not None and not self.ends_at.is_same(now)):
            raise DrawsError(
                "the model drew another number of random values than the shapes of its tensors say.\n"
                "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                "  Give TrainStep a single micro-batch, or draw the values (torch.poisson, gamma) outside of the model."
            )

    def leave(self, device: Device) -> None:
        """Sets the global generators to the end of this forward, the last of a step."""
        if self.leaves_at is not None:
            self.leaves_at.restore(device)
        elif self.forward is not None and not self.forward.is_seeded:
            self.forward.state.restore(device)
