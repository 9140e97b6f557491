"""workload_lines(): how the blocks and values of another workload differ, in words and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice

from megatrain.checks import shown
from megatrain.hardware.work import Works, total_bytes, total_flops, total_kernels
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload

# More differences are of the same kind.
_MOST = 8


def workload_lines(workload: Workload, other: Workload) -> list[str]:
    """A line for each block and value that differs; the last says that there are more."""
    found = list(islice(_lines(workload, other), _MOST + 1))
    return found if len(found) <= _MOST else [*found[:_MOST], "and more"]


def _lines(workload: Workload, other: Workload) -> Iterator[str]:
    for name in ("blocks", "values", "storages"):
        here, there = len(getattr(workload, name)), len(getattr(other, name))
        if here != there:
            yield f"{name}: {here} -> {there}"
    # Inputs come first: they are what a caller knows.
    yield from _values(workload, other, are_inputs=True)
    for index, (block, new) in enumerate(zip(workload.blocks, other.blocks, strict=False)):
        yield from _fields(f"block {index} ({block.name})", block, new)
    yield from _values(workload, other, are_inputs=False)
    if len(workload.storages) == len(other.storages):
        for index, (size, new_size) in enumerate(zip(workload.storages, other.storages, strict=True)):
            if size != new_size:
                yield f"storage {index}: {size} -> {new_size} B"
    if workload.loss_bytes != other.loss_bytes:
        yield f"the loss: {workload.loss_bytes} -> {other.loss_bytes} B"
    if workload.last_reads_values != other.last_reads_values:
        told = [("not read", "read")[each.last_reads_values] for each in (workload, other)]
        yield f"values of the last block, by Python code: {' -> '.join(told)}"


def _values(workload: Workload, other: Workload, *, are_inputs: bool) -> Iterator[str]:
    for index, (value, found) in enumerate(zip(workload.values, other.values, strict=False)):
        if (value.producer is None) == are_inputs:
            yield from _fields(f"value {index} ({value.name})", value, found)


def _fields(owner: str, one: BlockWork | ValueWork, other: BlockWork | ValueWork) -> Iterator[str]:
    if one == other:
        return
    changed: list[str] = []
    for part in fields(one):
        here, there = getattr(one, part.name), getattr(other, part.name)
        if here != there:
            words = _work if part.name in ("forward", "backward") else shown
            changed.append(f"{part.name} {words(here)} -> {words(there)}")
    yield f"{owner}: {', '.join(changed)}"


def _work(works: Works) -> str:
    return f"{total_flops(works)} FLOPs, {total_bytes(works)} B, {total_kernels(works)} kernels"
