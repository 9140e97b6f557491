"""HostPlan: the host memory that a training step takes, row by row, before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatrain.base.checks import checked, count, optional
from megatrain.base.counts import counted
from megatrain.base.host_limits import available_bytes as available_now
from megatrain.base.sizes import aligned, format_bytes
from megatrain.base.torch_private import FakeTensor
from megatrain.device import is_on_host
from megatrain.device.host_pages import gives_back
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.moments import MomentLayout, moment_layout
from megatrain.optim.need import OptimizerNeed
from megatrain.optim.trained_model import TrainedModel
from megatrain.passes.program import Program
from megatrain.runtime.loaded import Facts
from megatrain.scheduler.builder.moments import buffer_bytes, spared_bytes
from megatrain.scheduler.from_program import filed_state, updated_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.packing import plain_tensors

CACHE = "cache of files"
"""Name of a row: what the system's cache needs of files that are read."""
BROUGHT = "before the first update"
"""Name of a row: how much more the model takes until the device has the blocks that it updates."""
RING = "optimizer state of two blocks"
"""Name of a row: buffers for state that is in a file between its updates."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """One use of host memory."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The host memory that a step takes; prints as a table.

    Args:
        rows: The uses of memory and their bytes, none of them zero.
        num_parameters: Elements of all parameters, tied ones once.
        held_bytes: Bytes of these that the process held when the plan was made: weights, existing state, gradients.
        helps: Ways to take less memory, in words.
        is_estimate: The size of the optimizer's state couldn't be found out exactly.
        file_bytes: Bytes of frozen parameters that stay in their files, in no row: the system's cache of files holds
            some of them while nobody else needs the memory.
        moment_bytes: Bytes of optimizer state that are in a file between updates, in no row.
        there_bytes: Bytes of parameters and optimizer state that the device alone has, in no row: a call of the model,
            an evaluation say, brings them to the host.
    """

    rows: tuple[HostRow, ...]
    num_parameters: int
    held_bytes: int = 0
    helps: tuple[str, ...] = ()
    is_estimate: bool = False
    file_bytes: int = 0
    moment_bytes: int = 0
    there_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all rows; a step never holds more."""
        return sum(row.nbytes for row in self.rows)

    @property
    def by_use(self) -> tuple[Mapping[str, int], int]:
        """The rows by name, and `held_bytes`."""
        return {row.name: row.nbytes for row in self.rows}, self.held_bytes

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of a row, or of all rows `name.*`; 0 if there is none."""
        return sum(row.nbytes for row in self.rows if row.name == name or row.name.startswith(f"{name}."))

    @checked(available_bytes=optional(count()))
    def missing_bytes(self, available_bytes: int | None = None) -> int:
        """Returns how much more memory a step takes than there is, 0 if it fits; as `check`."""
        return max(0, self.total_bytes - self._limit(available_bytes))

    def _limit(self, available_bytes: int | None) -> int:
        held = min(self.held_bytes, self.total_bytes)
        return available_now() + held if available_bytes is None else available_bytes

    @checked(available_bytes=optional(count()))
    def check(self, available_bytes: int | None = None) -> None:
        """Refuses a step that takes more memory than there is; call it before anything is allocated.

        Args:
            available_bytes: Memory for the whole plan. None: the free memory of this machine, or of this process's
                control group, plus the part of the plan that is allocated already.

        Raises:
            ExecuteError: With the bytes needed, the bytes available, the table, and ways to take less.
        """
        limit = self._limit(available_bytes)
        if self.total_bytes <= limit:
            return
        table = "\n".join(f"  {line}" for line in str(self).splitlines())
        helps = "".join(f"\n    {what}" for what in (*self.helps, "a machine with more memory"))
        raise ExecuteError(
            f"a step needs {format_bytes(self.total_bytes)} of host memory, {format_bytes(limit)} are available.\n"
            f"{table}\n"
            f"  {format_bytes(self.total_bytes - limit)} are missing. What helps:{helps}"
        )

    def __str__(self) -> str:
        head = f"host: {self.total_bytes} B for {counted(self.num_parameters, 'parameter')}"
        return "\n".join([head, *self.lines()])

    def lines(self) -> list[str]:
        """The table alone."""
        rows = [("what", "bytes", "size", "B/parameter")]
        for row in (*self.rows, HostRow("total", self.total_bytes)):
            per_parameter = f"{row.nbytes / max(1, self.num_parameters):.2f}"
            rows.append((row.name, str(row.nbytes), format_bytes(row.nbytes), per_parameter))
        files = f"in files: {format_bytes(self.file_bytes)} of frozen weights, in no row (compile(weights=...))"
        filed = f"in a file: {format_bytes(self.moment_bytes)} of optimizer state, in no row (offload=...)"
        note = "note: the optimizer's rows are estimates: its code wasn't run on tensors without memory"
        notes = (files if self.file_bytes else "", filed if self.moment_bytes else "", note if self.is_estimate else "")
        return [*in_columns(rows), *filter(None, notes)]


def in_columns(rows: Sequence[Sequence[str]], num_texts: int = 1) -> list[str]:
    """Returns lines of a table: so many texts on the left, then numbers, aligned at their ends."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [cell.ljust(width) if index < num_texts else cell.rjust(width) for cell in column]
        for index, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def host_plan(
    programs: Program | Sequence[Program],
    schedule: Schedule,
    model: TrainedModel,
    *,
    on_host: bool = False,
    in_files: Collection[str] = (),
    vacated_bytes: int = 0,
    moments: MomentLayout | None = None,
    mapped: Collection[int] = (),
    held_bytes: int = 0,
) -> HostPlan:
    """Adds up the host memory that the steps of a model take; allocates nothing.

    Args:
        programs: All captures of the model that share the store.
        schedule: Of the step. Without updates or a norm in it, gradients are the tensors in `.grad`.
        model: The model and its optimizers, or none of these.
        on_host: The compute device is the host, so the schedule's device memory is host memory too.
        in_files: Keys of parameters that stay in their files; those that are trained don't count.
        vacated_bytes: Of tensors whose values the device has, so that they take no memory of the host now.
        moments: The state of optimizers that may be in a file between updates; the schedule says of which blocks.
        mapped: Identities of tensors whose values are in the file now.
        held_bytes: Of low halves and buffers that the process has.

    Raises:
        OptimizerError: If an optimizer's `step` needs a closure, or the size of its state can't be found out.
    """
    programs = (programs,) if isinstance(programs, Program) else tuple(programs)
    entries, tensors, low_bytes = model.entries, model.tensors, model.low_bytes
    frozen = {key: entries[key].spec.nbytes for key in in_files if key in entries and not entries[key].requires_grad}
    there = set() if on_host else _on_device(programs[0], schedule)
    filed = (
        None if moments is None else moments.of_keys(filed_state(programs[0], schedule.known_workload(), moments.sizes))
    )
    rows = [*_state_rows(programs, {key: entry for key, entry in entries.items() if key not in {*frozen, *there}})]
    rows.append((CACHE, _CACHED * largest_read(programs, frozen)))
    rows.append(("low halves", sum(nbytes for key, nbytes in low_bytes.items() if key not in there)))
    own = [tensor for key, tensor in tensors.items() if key not in frozen]
    held: list[torch.Tensor] = [*own, *(t.grad for t in tensors.values() if t.grad is not None)]
    need, first_bytes, may_file, away = OptimizerNeed({}, 0), 0, 0, dict[str, int]()
    if model.optimizers:
        blocks = [keys for program in programs for keys in _trained(program)]
        need = model.need(blocks, undoes=schedule.kind.updates != "none", scales=schedule.kind.clip)
        states = (state for each in model.optimizers for state in each.state.values())
        values = (value for state in states for value in dict(state).values() if id(value) not in mapped)
        own = [value for value in values if isinstance(value, torch.Tensor)]
        held += own
        away = _moments(model.optimizers, {id(model.parameters[key]): entries[key].spec.numel for key in there})
        need = replace(need, state={name: nbytes - away.get(name, 0) for name, nbytes in need.state.items()})
        need = replace(need, state=_in_memory(need.state, filed))
        rows += need.state.items()
        # With a file the device updates no block, and the host has all of them again.
        if moments is None and not there:
            may_file = _spared_in_file(programs[0], model, need.state)
        # What isn't there yet when the first step brings blocks to the device.
        first_bytes = need.scratch_bytes + max(0, sum(need.state.values()) - _held_bytes(own))
    rows += [*_step_rows(programs, entries, schedule, on_host=on_host), ("update scratch", need.scratch_bytes)]
    rows.append((RING, sum(buffer_bytes(schedule).values())))
    brought = sum(entries[key].spec.nbytes + low_bytes.get(key, 0) for key in there)
    rows.append((BROUGHT, max(0, brought - first_bytes - vacated_bytes)))
    kept = tuple(HostRow(name, nbytes) for name, nbytes in rows if nbytes)
    num_parameters = sum(e.spec.numel for e in entries.values() if e.kind == "parameter")
    held_bytes += _held_bytes(held) - vacated_bytes
    apart = sum(frozen.values()), 0 if filed is None else filed.nbytes, brought + sum(away.values())
    plan = HostPlan(kept, num_parameters, held_bytes, (), need.is_estimate, *apart)
    return replace(plan, helps=_helps(plan, schedule, need, may_file, can_narrow=model.master is WholeMaster))


def _on_device(program: Program, schedule: Schedule) -> set[str]:
    """Keys of the parameters that the device updates and the host holds nothing of, where the system takes pages."""
    state = (program.state[key] for b in schedule.device_updates for key in program.blocks[b].binding)
    return {entry.owner for entry in state if entry.requires_grad} if gives_back() else set()


def _moments(optimizers: Sequence[torch.optim.Optimizer], numels: Mapping[int, int]) -> Mapping[str, int]:
    """The bytes of AdamW's moments of some parameters, which are fp32, by their names in a plan."""
    found: dict[str, int] = {}
    for each in optimizers:
        numel = sum(numels.get(id(p), 0) for group in each.param_groups for p in group["params"])
        found |= {f"{type(each).__name__}.{name}": 4 * numel for name in AdamWInOnePass.moments}
    return found


def _spared_in_file(program: Program, model: TrainedModel, state: Mapping[str, int]) -> int:
    """The memory of the host that isn't needed if all of an optimizer's state is in a file; 0 if it can't be."""
    try:
        layout = moment_layout(model)
    except OptimizerError:
        return 0
    sizes = {b: nbytes for b, nbytes in enumerate(updated_bytes(program, layout.sizes)) if nbytes}
    buffers = sum(sizes.values()) - spared_bytes(sizes)
    return sum(state.values()) - sum(_in_memory(state, layout).values()) - buffers


def _in_memory(state: Mapping[str, int], filed: MomentLayout | None) -> dict[str, int]:
    """The bytes of an optimizer's state, by class and name, that aren't in a file."""
    of_file = (lambda _: 0) if filed is None else filed.bytes_of
    left = {name: nbytes - of_file(name.partition(".")[2]) for name, nbytes in state.items()}
    return {name: nbytes for name, nbytes in left.items() if nbytes > 0}


def _state_rows(programs: Sequence[Program], entries: Mapping[str, StateEntry]) -> Iterator[tuple[str, int]]:
    """The arenas of the store, where each tensor begins at a multiple of the alignment, and the state outside."""
    alignment = max(program.alignment for program in programs)
    bound = {p.state[key].owner for p in programs for block in p.blocks for key in block.binding}
    stored = [entry for key, entry in entries.items() if key in bound]
    for kind in ("parameter", "buffer"):
        yield f"{kind}s", sum(aligned(entry.spec.nbytes, alignment) for entry in stored if entry.kind == kind)
    unbound = [entry.spec.nbytes for key, entry in entries.items() if key not in bound]
    yield "state of no block", sum(aligned(nbytes, alignment) for nbytes in unbound)
    constants = [tensor for program in programs for tensor in program.constants.values() if is_on_host(tensor)]
    yield "constants", _held_bytes(constants)


# Of the largest block in files: it is copied to the device while the next is read. With less of the cache, pages would
# leave before they are copied, and each would be read again and again.
_CACHED = 2


def largest_read(programs: Sequence[Program], nbytes: Mapping[str, int]) -> int:
    """The most that a block has in files, where whole tensors are by key; 0 for nothing."""
    owners = ({p.state[key].owner for key in block.binding} for p in programs for block in p.blocks)
    return max((sum(nbytes.get(key, 0) for key in keys) for keys in owners), default=0)


def _trained(program: Program) -> list[list[str]]:
    """Keys of the parameters that each block updates: their gradients are complete with this block."""
    facts = Facts.of(program, is_training=True)
    parts = {part.key for part in facts.parts}
    return [[key for key in keys if key not in parts] for keys in facts.completes]


def _step_rows(
    programs: Sequence[Program], entries: Mapping[str, StateEntry], schedule: Schedule, *, on_host: bool
) -> Iterator[tuple[str, int]]:
    """The schedule's rows: gradients and the places where they land, parked values, memory of the device."""
    is_train, gradients, slab = schedule.kind.mode == "train", 0, 0
    if is_train and schedule.kind.holds_gradients:
        gradients = schedule.landing_bytes + _wholes_bytes(programs[0], entries)
    elif is_train:
        trained = {key for program in programs for keys in _trained(program) for key in keys}
        sizes = [entries[key].spec.nbytes for key in trained]
        # On the host gradients stay where they are made. Elsewhere they have page-locked rooms; those that are added to
        # others land in the slab.
        gradients = sum(sizes if on_host else map(aligned, sizes))
        slab = 0 if on_host else schedule.landing_bytes
    yield "gradients", gradients
    yield "slab", slab
    yield "parks", schedule.park_bytes
    yield "values on the host", schedule.host_value_bytes
    yield "device memory", schedule.device_bytes if on_host else 0


def _wholes_bytes(program: Program, entries: Mapping[str, StateEntry]) -> int:
    """Bytes of the whole gradients of parameters in parts; the gradients of the parts land elsewhere."""
    state = [program.state[key] for block in program.blocks for key in block.binding]
    wholes = {entry.owner for entry in state if entry.requires_grad and entry.base is not None}
    return sum(entries[key].spec.nbytes for key in wholes)


def _held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the host's memory of tensors, each memory once."""
    plain = (inner for tensor in tensors for inner in plain_tensors(tensor))
    real = [t for t in plain if is_on_host(t) and not isinstance(t, FakeTensor)]
    strided = [t.untyped_storage() for t in real if t.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in strided}.values())


def _helps(
    plan: HostPlan, schedule: Schedule, need: OptimizerNeed, may_file: int, *, can_narrow: bool
) -> tuple[str, ...]:
    """Yields ways to take less memory, with the bytes that each could save."""
    gradients, parks, state = plan.bytes_of("gradients"), plan.bytes_of("parks"), sum(need.state.values())
    found: list[str] = []
    if need.at_once is not None:
        all_at_once = format_bytes(gradients + plan.bytes_of("update scratch"))
        promise = f"megatrain.optim.per_parameter.register({need.at_once}), if it updates each parameter by itself"
        found.append(f"{promise}: gradients and copies ({all_at_once}) are then those of some blocks")
    elif gradients and schedule.kind.updates in ("serial", "deferred"):
        how = "overlap=True without clipping" if schedule.kind.clip else "overlap=True"
        found.append(f"{how}: gradients ({format_bytes(gradients)}) then wait for their own update only")
    if can_narrow and gradients + parks:
        found.append(f'precision="bf16": gradients and parks ({format_bytes(gradients + parks)}) take half')
    if parks:
        found.append(f"fewer or smaller micro-batches, or more device memory: less is parked ({format_bytes(parks)})")
    if state > plan.num_parameters:
        found.append(f"an optimizer with less state ({format_bytes(state)}), such as AdamW8bit, Adafactor or SGD")
    if may_file > 0:
        found.append(f"offload= a folder on a fast disk: then {format_bytes(plan.total_bytes - may_file)} are enough")
    if schedule.kind.mode == "train":
        found.append("training fewer parameters: requires_grad_(False), adapters")
    return tuple(found)
