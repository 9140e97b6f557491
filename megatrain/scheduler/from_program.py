"""workload(): what scheduling needs to know of a program."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.passes.program import Block, Program
from megatrain.scheduler.build import schedule as build_schedule
from megatrain.scheduler.table import Schedule
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload
from megatrain.sizes import parse_bytes
from megatrain.tracer.spec import TensorSpec

SLOT_ALIGNMENT = 64


def slot_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes that tensors take in a slot, one after another, each on a 64-byte boundary."""
    return sum(-(-spec.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for spec in specs)


def workload(program: Program) -> Workload:
    """Describes `program` by bytes and dependencies only."""
    return Workload(
        blocks=tuple(_block_work(program, block) for block in program.blocks),
        values=_value_works(program),
        storages=_storages(program),
    )


def schedule(
    program: Program,
    *,
    num_slots: int | None = None,
    keep: int | None = None,
    memory: int | str | None = None,
    activations: str = "auto",
    transfer: str = "copy",
    mode: str = "train",
) -> Schedule:
    """Places one step of `program` on the streams; see `megatrain.scheduler.build.schedule` for the options."""
    return build_schedule(
        workload(program),
        num_slots=num_slots,
        keep=keep,
        memory=None if memory is None else parse_bytes(memory, "memory"),
        activations=activations,
        transfer=transfer,
        mode=mode,
    )


def has_backward(program: Program, block: Block) -> bool:
    """Tells whether a gradient flows into `block`."""
    return any(program.values[name].requires_grad for name in block.outputs)


def _block_work(program: Program, block: Block) -> BlockWork:
    cost = program.templates[block.template].cost
    assert cost is not None, "measure runs before scheduling"
    is_differentiable = has_backward(program, block)
    trained = {k for k in block.binding if program.state[k].requires_grad}
    return BlockWork(
        name=block.name,
        state_bytes=slot_bytes(program.state[k].spec for k in block.binding),
        gradient_bytes=sum(program.state[k].spec.nbytes for k in trained) if is_differentiable else 0,
        saved_bytes=cost.saved_bytes,
        forward_workspace_bytes=cost.forward_workspace_bytes,
        backward_workspace_bytes=cost.backward_workspace_bytes,
        has_backward=is_differentiable,
        forward_flops=cost.forward_flops,
    )


def _value_works(program: Program) -> tuple[ValueWork, ...]:
    readers = program.readers()
    ends = {o.name for o in program.outputs if o.kind == "value"} | {name for _, name in program.commits}
    sharers: dict[int, int] = {}
    for value in program.values.values():
        sharers[value.storage] = sharers.get(value.storage, 0) + 1
    return tuple(
        ValueWork(
            name=value.name,
            nbytes=value.spec.nbytes,
            storage=value.storage,
            producer=value.producer,
            readers=readers[value.name],
            is_output=value.name in ends,
            has_gradient=value.requires_grad,
            is_parkable=value.producer is not None
            and value.name not in ends
            and sharers[value.storage] == 1
            and value.storage_bytes == value.spec.nbytes,
        )
        for value in program.values.values()
    )


def _storages(program: Program) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for value in program.values.values():
        found[value.storage] = max(found.get(value.storage, 0), value.storage_bytes)
    return tuple(found[i] for i in range(len(found)))
