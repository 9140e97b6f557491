"""PlanBound: seconds and device bytes that a single plan takes at least, without a draft of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bounds.bound_memory import bytes_at_turn
from megatrain.scheduler.builder.bounds.step_parts import StepParts
from megatrain.scheduler.effects import Effects
from megatrain.scheduler.parking import Parks, turn_block


class KeptChoices(Protocol):
    """The choices of a plan that say what its streams have to do, as in `Choices`."""

    @property
    def saves(self) -> tuple[int, ...]:
        """As in `Schedule`, like those below."""
        ...

    @property
    def results(self) -> tuple[int, ...]:
        """See there."""
        ...

    @property
    def persistent(self) -> tuple[int, ...]:
        """See there."""
        ...


class PlanBound:
    """Lower bounds of single plans: what each stream has to do, and what is on the device where the step turns.

    Args:
        step: The effects of any plan.
        machine: Whose rates count.
    """

    def __init__(self, step: Effects, machine: Hardware) -> None:
        workload, parts = step.workload, StepParts(step, machine)
        self._step, self._machine = step, machine
        self._recomputed_s = {block: parts.recomputed_s(block) for block in workload.backward_blocks()}
        self._repeated_s = {block: parts.recomputed_s(block, has_results=True) for block in self._recomputed_s}
        spared = sum(use.compute for use in parts.graphs())
        self._compute_s = max(most - spared for most in parts.compute_limits())
        self._copies_s = [limit[:3] for limit in parts.copy_limits()]
        self._load_s = parts.loads_s()
        self._d2h_s = parts.d2h_s()
        turn = turn_block(workload)
        self._at_turn = 0 if turn is None else bytes_at_turn(step) - step.copied(workload.blocks[turn].state_bytes)
        # Of the turn's own block there may be a graph of one micro-batch at a time.
        self._graph_bytes = {
            block: step.kind.micro_batches * workload.blocks[block].saved_bytes
            for block in self._recomputed_s
            if block != turn
        }
        self._values = [
            (index, value, frozenset(readers))
            for index, value in enumerate(workload.values)
            if value.is_parkable
            and (readers := workload.backward_readers(index))
            and turn is not None
            and readers[-1] < turn
            and step.kind.transfer == "copy"
        ]

    def seconds(self, plan: KeptChoices, parked: Parks, loads: Iterable[int]) -> float:
        """Those of its step, at least.

        Args:
            plan: Its choices.
            parked: The values that it parks.
            loads: The blocks whose weights come, each as often as they do.
        """
        persistent = frozenset(plan.persistent)
        recomputed = set(self._recomputed_s).difference(plan.saves)
        compute_s = sum(self._recomputed_s[block] for block in recomputed.difference(plan.results))
        compute_s += sum(self._repeated_s[block] for block in recomputed.intersection(plan.results))
        nbytes = self._parked_bytes(parked)
        h2d_s = nbytes / self._machine.h2d_bytes_per_s + sum(self._load_s[b][b in persistent] for b in loads)
        d2h_s = nbytes / self._machine.d2h_bytes_per_s + self._d2h_s
        copies_s = (start + to_device * h2d_s + to_host * d2h_s for start, to_device, to_host in self._copies_s)
        return max(self._compute_s + compute_s, *copies_s)

    def device_bytes(self, plan: KeptChoices, parked: Parks, arena: int) -> int:
        """Those of its schedule, at least.

        Args:
            plan: Its choices.
            parked: The values that it parks.
            arena: Bytes of the slots.
        """
        saves, results = frozenset(plan.saves), frozenset(plan.results)
        away = {value for values in parked.values() for value in values}
        graphs = sum(nbytes for block, nbytes in self._graph_bytes.items() if block in saves)
        values = sum(
            value.nbytes
            for index, value, readers in self._values
            if index not in away
            and (value.producer in results or not value.is_result)
            and value.producer not in saves
            and readers.isdisjoint(saves)
        )
        return self._at_turn + arena + graphs + self._step.kind.micro_batches * values

    def _parked_bytes(self, parked: Parks) -> int:
        values = self._step.workload.values
        nbytes = sum(values[value].nbytes for of_block in parked.values() for value in of_block)
        return self._step.kind.micro_batches * nbytes
