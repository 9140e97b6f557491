"""FileReads and MomentTraffic: what a step moves from and to the disk, of weights, optimizer state and activations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatrain.base.sizes import format_bytes
from megatrain.errors import NeedlessFileWarning
from megatrain.hardware.hardware import Hardware, of_files
from megatrain.hardware.presets import DISK
from megatrain.passes.program import Program
from megatrain.planning.host_plan import HostPlan, HostRow
from megatrain.scheduler.bands import format_s
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class FileReads:
    """The frozen weights that a step reads in their files.

    A forward takes blocks in their order and a backward in the reverse, so what the system's cache of files was given
    last is used first: in each of the two it has as much as it holds, and the disk is read for the rest. In a control
    group with room for 0.2 to 0.75 of a file, the system read 1.0 to 1.65 times that rest.

    Args:
        crossing: Bytes that cross to the device.
        distinct: The same, each once.
        cached: Bytes of the host's memory that are left for the cache of files.
    """

    crossing: int
    distinct: int
    cached: int

    @staticmethod
    def of(program: Program, table: Schedule, in_files: Mapping[str, int], cached: int) -> FileReads:
        """Counts what a step reads.

        Args:
            program: The model's blocks.
            table: The schedule. What stays on the device from step to step isn't read again.
            in_files: Bytes of the parameters in files, by key.
            cached: See above.
        """
        owners = ({program.state[key].owner for key in block.binding} for block in program.blocks)
        nbytes = [sum(in_files.get(key, 0) for key in keys) for keys in owners]
        blocks = [op.block for op in table.ops if op.what == "W" and op.block not in table.persistent]
        return FileReads(sum(nbytes[block] for block in blocks), sum(nbytes[block] for block in set(blocks)), cached)

    @property
    def disk_bytes(self) -> int:
        """Bytes that a step reads from the disk at least."""
        return max(0, round(self.crossing * (1 - self.cached / self.distinct))) if self.distinct else 0

    def on(self, machine: Hardware) -> Hardware:
        """A machine whose copies to the device are as fast as such weights arrive."""
        return of_files(machine, self.crossing, self.disk_bytes)

    def text(self, machine: Hardware | None) -> str:
        """Says what is read, and for how long, in a line."""
        kept = f"the host's memory has room for {format_bytes(self.cached)} of them"
        if not self.disk_bytes:
            return f"{kept}: later steps read nothing from the disk"
        text = f"{kept}: a step reads {format_bytes(self.disk_bytes)} or more from the disk"
        if machine is None:
            return text
        rate = machine.disk_bytes_per_s
        return (
            f"{text}, {format_s(self.disk_bytes / rate)} at {rate / 1e9:.1f} GB/s{', assumed' if rate == DISK else ''}"
        )


@dataclass(frozen=True, slots=True)
class MomentTraffic:
    """The optimizer state that a step reads from its file, and writes back; and activations that it writes, and reads.

    Args:
        file_bytes: Of the file of optimizer state.
        moved: Bytes that a step reads, and as many that it writes, activations included.
        activation_bytes: The part of these that are activations.
    """

    file_bytes: int
    moved: int
    activation_bytes: int = 0

    @staticmethod
    def of(table: Schedule, file_bytes: int) -> MomentTraffic:
        """Counts what a step moves."""
        blocks, activations = table.known_workload().blocks, table.evicted_bytes
        moved = sum(blocks[op.block].moment_bytes for op in table.ops if op.stream == Stream.DISK and op.what == "K")
        return MomentTraffic(file_bytes, moved + activations, activations)

    def text(self, machine: Hardware | None) -> str:
        """Says in a line what is moved, for how long, and how much 1,000 steps write."""
        if not self.moved:
            return "disk: nothing needs the file: all of the optimizer's state stays in memory, and no step reads it"
        written = 1000 * self.moved
        text = f"disk: {format_bytes(self.file_bytes)} of optimizer state"
        text += f", and {format_bytes(self.activation_bytes)} of activations" if self.activation_bytes else ""
        text += f"; a step reads and writes {format_bytes(self.moved)}"
        wear = f"1,000 steps write {written / 1e12:.3g} TB"
        if machine is None:
            return f"{text}; {wear}"
        rate, rated = machine.disk_bytes_per_s, machine.disk_rating_bytes
        wear += (
            "" if rated is None else f", {written / rated:.2%} of the {rated / 1e12:.4g} TB that the drive is rated for"
        )
        assumed = ", assumed" if rate == DISK else ""
        return f"{text}, {format_s(2 * self.moved / rate)} at {rate / 1e9:.1f} GB/s{assumed}; {wear}"


# State of fewer bytes isn't worth a warning.
_MUCH = 1 << 30


def warn_if_needless(plan: HostPlan, state_bytes: int, host_memory: int | None) -> bool:
    """Warns of a file for optimizer state that all has room in the host's memory.

    Args:
        plan: A step's memory of the host.
        state_bytes: Of all state that may be in the file.
        host_memory: What a step may take, or None for what is free.

    Returns:
        Whether it has warned.
    """
    whole = replace(plan, rows=(*plan.rows, HostRow("in the file", plan.moment_bytes)))
    if state_bytes < _MUCH or whole.missing_bytes(host_memory):
        return False
    size = format_bytes(state_bytes)
    if plan.moment_bytes:
        moved = format_bytes(plan.moment_bytes)
        what = f"each step reads and writes {moved} of it all the same, as host_memory isn't given"
        way = f'Give host_memory="{format_bytes(whole.total_bytes).replace(" ", "")}" or more'
    else:
        what, way = "it stays in memory, and no step reads or writes the file", "Give less host_memory"
    warnings.warn(
        f"nothing needs the file of offload=: the host has room for all of the optimizer's state, {size}.\n"
        f"  {what[0].upper()}{what[1:]}.\n  {way}, or leave offload out.",
        NeedlessFileWarning,
        stacklevel=2,
    )
    return True
