"""The printed form of a workload: what a schedule was made for."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.counts import counted
from megatrain.hardware.work import total_flops, total_kernels
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload


def workload_text(workload: Workload) -> str:
    """Prints a row per block and a row per value, in bytes; what a schedule moves and holds is made of them."""
    blocks = [_block_cells(index, block) for index, block in enumerate(workload.blocks)]
    values = [_value_cells(index, value) for index, value in enumerate(workload.values)]
    storages = ", ".join(f"{index} = {nbytes}" for index, nbytes in enumerate(workload.storages))
    return "\n".join(
        [
            f"workload: {counted(len(blocks), 'block')}, {counted(len(values), 'value')}, "
            f"{counted(len(workload.storages), 'storage')}",
            f"storages: {storages}",
            *([f"loss: {workload.loss_bytes} B"] if workload.loss_bytes else []),
            *(["Python code reads values of the last block"] if workload.last_reads_values else []),
            *_aligned([_BLOCK, *blocks]),
            *_aligned([_VALUE, *values]),
        ]
    )


_BLOCK = ("block", "state", "frozen", "gradients", "saved", "forward", "backward", "FLOP", "kernels", "update", "name")
_VALUE = ("value", "bytes", "storage", "made by", "read by", "is", "name")


def _block_cells(index: int, block: BlockWork) -> tuple[str, ...]:
    backward = str(block.backward_workspace_bytes) if block.has_backward else "."
    gradients = f"{block.gradient_bytes}" + (f"+{block.gradient_padding}" if block.gradient_padding else "")
    shares = f", updates rows of {_listed(block.shares)} as well" if block.shares else ""
    held = (block.saved_bytes, block.forward_workspace_bytes, backward)
    sizes = (block.state_bytes, block.frozen_bytes, gradients, *held)
    both = (block.forward, block.backward) if block.has_backward else (block.forward,)
    kernels = ["+".join(str(total(works)) for works in both) for total in (total_flops, total_kernels)]
    return (str(index), *map(str, sizes), *kernels, str(block.update_bytes), f"{block.name}{shares}")


def _value_cells(index: int, value: ValueWork) -> tuple[str, ...]:
    producer = "." if value.producer is None else str(value.producer)
    facts = {
        "input": value.is_there,
        "output": value.is_output,
        "differentiable": value.has_gradient,
        "parkable": value.is_parkable,
        "committed": value.is_committed,
        "cpu": value.on_host,
        "result": value.is_result,
    }
    told = "+".join(fact for fact, holds in facts.items() if holds) or "."
    return (str(index), str(value.nbytes), str(value.storage), producer, _listed(value.readers), told, value.name)


def _listed(blocks: Sequence[int]) -> str:
    return ",".join(map(str, blocks)) or "."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    *_, last = widths
    return [
        "  ".join([*(c.rjust(w) for c, w in zip(row, widths[:-1], strict=False)), row[-1].ljust(last).rstrip()])
        for row in rows
    ]
