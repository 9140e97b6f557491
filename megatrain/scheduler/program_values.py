"""The values of a program as values of a workload: those between blocks, and results that blocks may keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.passes.program import Block, Program
from megatrain.scheduler.workload import ValueWork
from megatrain.tracer.spec import TensorSpec


def has_backward(program: Program, block: Block) -> bool:
    """Tells whether a gradient flows into `block`."""
    return any(program.values[name].requires_grad for name in block.outputs)


def value_works(program: Program) -> tuple[ValueWork, ...]:
    """The values of a program, and behind them the results that its blocks may keep."""
    return (*_between_blocks(program), *_result_works(program))


def storage_bytes(program: Program) -> tuple[int, ...]:
    """Bytes of the storages of the same."""
    return (*_storages(program), *(spec.nbytes for _, specs in _kept(program) for spec in specs))


def _between_blocks(program: Program) -> tuple[ValueWork, ...]:
    readers = program.readers()
    commits = {name for _, name in program.commits}
    ends = {o.name for o in program.outputs if o.kind == "value"} | commits
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
            and not value.spec.on_host
            and sharers[value.storage] == 1
            and value.storage_bytes == value.spec.nbytes,
            is_committed=value.name in commits,
            on_host=value.spec.on_host,
        )
        for value in program.values.values()
    )


def _kept(program: Program) -> Iterator[tuple[Block, Sequence[TensorSpec]]]:
    """Yields the blocks that may keep results, and the specs of these."""
    for block in program.blocks:
        cost = program.templates[block.template].cost
        if cost is not None and cost.results is not None and has_backward(program, block):
            yield block, cost.results.specs


def result_names(program: Program) -> list[list[str]]:
    """The names of the results that each block may keep."""
    found: list[list[str]] = [[] for _ in program.blocks]
    for block, specs in _kept(program):
        found[block.index] = [f"result {number} of block {block.index}" for number in range(len(specs))]
    return found


def _result_works(program: Program) -> Iterator[ValueWork]:
    names = result_names(program)
    found = [(block, *each) for block, specs in _kept(program) for each in zip(names[block.index], specs, strict=True)]
    for storage, (block, name, spec) in enumerate(found, start=len(_storages(program))):
        yield ValueWork(
            name=name,
            nbytes=spec.nbytes,
            storage=storage,
            producer=block.index,
            readers=(),
            is_output=False,
            has_gradient=False,
            is_parkable=True,
            is_result=True,
        )


def _storages(program: Program) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for value in program.values.values():
        found[value.storage] = max(found.get(value.storage, 0), value.storage_bytes)
    return tuple(found[i] for i in range(len(found)))
