"""Host effects: what the ops of the host do: squares of gradients, their norm, and updates."""

from __future__ import annotations

from typing import Any

from megatrain.scheduler.items import NO_BLOCK, Effect, Item


def squares(step: Any, block: int, micro_batch: int) -> Effect:
    """S."""
    # Gradients that several blocks share are whole with the last of them, which reads the sum.
    return Effect((Item("landed", block),), (Item("squares", block),), moves=step.workload.blocks[block].gradient_bytes)


def norm(step: Any, block: int, micro_batch: int) -> Effect:
    """N."""
    summing = step.workload.update_blocks() if step.kind.reports_norm else step.gradient_blocks
    return Effect(tuple(Item("squares", b) for b in summing), (Item("norm", NO_BLOCK),))


def update(step: Any, block: int, micro_batch: int) -> Effect:
    """U."""
    kind = "waiting" if block in step.deferred else "landed"
    group, blocks = step.workload.update_group(block), step.workload.blocks
    reads = [Item(kind, b) for b in group if blocks[b].has_backward and blocks[b].gradient_bytes > 0]
    reads += [Item("norm", NO_BLOCK)] * step.kind.clip + [Item("left", NO_BLOCK)] * (step.kind.updates == "serial")
    also = ["squares"] * step.kind.reports_norm + ["part"] * step.kind.is_shared
    moves = blocks[block].update_bytes + blocks[block].gradient_bytes * step.kind.reports_norm
    return Effect(tuple(reads), tuple(Item(what, block) for what in ["state", *also]), moves=moves)


def whole(step: Any, block: int, micro_batch: int) -> Effect:
    """V."""
    return Effect((Item("part", block),), (Item("state", block),))
