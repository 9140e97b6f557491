"""DealtTables: the parts of programs and the kinds of steps of a rank to whose device blocks are dealt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatrain.errors import OptionError
from megatrain.passes.program import Program
from megatrain.passes.split.dealt_blocks import device_of_each
from megatrain.passes.split.dealt_program import DealtProgram, deal, whole_of
from megatrain.ranks.ranks import Ranks
from megatrain.scheduler.from_program import merge_programs, step_schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import LOSSES, StepKind

# When updates run, of which none is left to the next step.
_AT_ONCE = {"none": "serial", "deferred": "serial", "spread": "overlap"}
# Programs of captures that are in use are kept by their tables.
_MOST = 64


def wholes(programs: Sequence[Program]) -> list[Program]:
    """The whole programs of those that were dealt, and others as they are, each once."""
    return list({id(program): program for program in map(whole_of, programs)}.values())


def dealt_schedule(
    dealing: DealtTables | None, kind: StepKind, own: Mapping[str, Any], programs: Sequence[Program], **further: Any
) -> Schedule:
    """The schedule of a step, or of the parts of its programs that are dealt to one of several devices.

    Args:
        dealing: Deals them; None if all are here.
        kind: Of the step, as far as it is known before they are dealt.
        own: Options of `step_schedule`.
        programs: The whole ones.
        further: More options.

    Raises:
        MicroBatchError: If the programs run other blocks than the first one.
        ScheduleError: See `step_schedule`.
    """
    options = {**own, **further}
    if dealing is None:
        return step_schedule(programs, kind, **options)
    merge_programs(programs)  # refuses micro-batches that run other layers, which are dealt as the first one is
    parts = dealing.parts(programs)
    known = dealing.kind_of(parts[0], kind)
    options |= {} if known.has_losses else {"loss_bytes": 0}
    return step_schedule(parts, known, **options)


class DealtTables:
    """Deals programs.

    Args:
        device: The number of this rank's device on its host.
        size: How many ranks the host has.
    """

    def __init__(self, device: int, size: int):
        self._device, self._size = device, size
        self._devices: dict[int, tuple[Program, tuple[int, ...]]] = {}
        self._parts: OrderedDict[tuple[int, tuple[int, ...]], DealtProgram] = OrderedDict()

    @staticmethod
    def of(ranks: Ranks | None, *, is_shared: bool) -> DealtTables | None:
        """Returns it; None if blocks aren't dealt.

        Raises:
            OptionError: If they are to be dealt, but each rank has a store of its own.
        """
        if ranks is None or ranks.mailbox is None:
            return None
        if not is_shared:
            raise OptionError(
                'across_devices="round" is impossible: each rank of this host has a store of its own.\n'
                '  A rank updates the parameters of its blocks for all ranks. masters="rounded", and optimizers that '
                "keep more than tensors, can't be shared.\n"
                '  Leave across_devices out: with "replicate" each rank can make all updates.'
            )
        assert ranks.host is not None
        return DealtTables(ranks.host.index, ranks.host.size)

    def kind(self, kind: StepKind) -> StepKind:
        """The kind of a step as far as it is known before its programs are dealt. It leaves no update to the next one.

        Args:
            kind: Of a step that might.
        """
        return replace(kind, devices=self._size, updates=_AT_ONCE.get(kind.updates, kind.updates))

    def kind_of(self, program: Program, kind: StepKind) -> StepKind:
        """The kind of a step of this rank's parts, of which this is one."""
        assert isinstance(program, DealtProgram)
        return replace(kind, devices=self._size, losses=LOSSES[not program.has_losses])

    def parts(self, programs: Sequence[Program]) -> list[Program]:
        """This rank's parts of the programs of a step, which are all dealt as the first one is.

        Raises:
            LowerError: If they can't be dealt.
        """
        key = id(programs[0])
        if key not in self._devices or self._devices[key][0] is not programs[0]:
            while len(self._devices) >= _MOST:
                self._devices.pop(next(iter(self._devices)))
            self._devices[key] = programs[0], device_of_each(programs[0], self._size)
        return [self._part(program, self._devices[key][1]) for program in programs]

    def deal_as(self, programs: Sequence[Program], devices: Sequence[int]) -> None:
        """Has these programs dealt as another host does, which has other micro-batches.

        Args:
            programs: Of a step, whole or dealt.
            devices: The device of each block.
        """
        for whole in wholes(programs):
            self._devices[id(whole)] = whole, tuple(devices)

    def _part(self, program: Program, devices: tuple[int, ...]) -> DealtProgram:
        key = id(program), devices
        if key not in self._parts:
            self._parts[key] = deal(program, devices, self._device)  # which keeps the program, and so its id
            while len(self._parts) > _MOST:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return self._parts[key]
