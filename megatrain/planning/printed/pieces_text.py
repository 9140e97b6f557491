"""What a step computes piece by piece: smaller blocks, heads in chunks, all else in tiles; what became of masks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megatrain.counts import counted
from megatrain.passes.program import Block, Program
from megatrain.passes.rewrites.head.head_loss import HeadLoss
from megatrain.passes.rewrites.masked_attention import ATTENTION, BandedAttention, MaskNote
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.scheduler.printed.block_ranges import ranges
from megatrain.sizes import format_bytes


def piece_lines(program: Program) -> list[str]:
    """A line for smaller blocks, for each head whose loss is computed in chunks, for tiles of a template, for masks."""
    return [*_blocks(program), *_chunks(program), *_tiles(program), *_masks(program)]


def _blocks(program: Program) -> Iterator[str]:
    if program.block_bytes is not None:
        largest = max(map(program.state_bytes, program.blocks), default=0)
        yield (
            f"blocks: {len(program.blocks)} of about {format_bytes(program.block_bytes)} of state instead of the "
            f"model's own modules, the largest with {format_bytes(largest)}"
        )


def _chunks(program: Program) -> Iterator[str]:
    for block, node in _calls_of(program, HeadLoss):
        target: HeadLoss = node.target  # pyright: ignore[reportAssignmentType]
        weight = node.args[2].meta["spec"]  # pyright: ignore
        rows, num_rows = target.head.rows, target.shape.numel()
        row_bytes = weight.shape[0] * weight.nbytes // max(1, weight.numel)
        sizes = f"{format_bytes(rows * row_bytes)} instead of {format_bytes(num_rows * row_bytes)}"
        where = f"in block {block.index} ({block.name})"
        yield f"chunked: logits of {rows} of {num_rows} rows at a time {where}, {sizes}"


def _tiles(program: Program) -> Iterator[str]:
    regions: dict[tuple[str, int, int], dict[fx.Node, TiledRegion]] = {}
    blocks: dict[tuple[str, int, int], dict[int, None]] = {}
    for block, node in _calls_of(program, TiledRegion):
        region: TiledRegion = node.target  # pyright: ignore[reportAssignmentType]
        key = block.template, region.rows, region.num_tokens
        regions.setdefault(key, {})[node] = region  # blocks of one template share its nodes
        blocks.setdefault(key, {})[block.index] = None
    for key, found in regions.items():
        _, rows, tokens = key
        calls, inner = sum(r.num_calls for r in found.values()), sum(r.inner_bytes for r in found.values())
        sizes = f"{format_bytes(inner * rows // tokens)} instead of {format_bytes(inner)} between them"
        where = f"in block{'s' * (len(blocks[key]) > 1)} {', '.join(ranges(list(blocks[key])))}"
        yield f"tiled: {counted(calls, 'call')} on {rows} of {tokens} tokens at a time {where}, {sizes}"


def _masks(program: Program) -> Iterator[str]:
    blocks: dict[tuple[str, int, str], dict[int, None]] = {}
    for block in program.blocks:
        for node in program.templates[block.template].graph.nodes:
            note: MaskNote | None = node.meta.get("mask")
            is_banded = isinstance(node.target, BandedAttention)
            if note is None or not (is_banded or node.target is ATTENTION):
                continue
            keys = f" on {node.target.most_keys} keys" if is_banded else ""  # pyright: ignore
            blocks.setdefault((note.text + keys, note.nbytes, note.promise), {})[block.index] = None
    for (text, nbytes, _), found in blocks.items():
        where = f"in block{'s' * (len(found) > 1)} {', '.join(ranges(list(found)))}"
        yield f"masks: attention {where} with {text} instead of a mask of {format_bytes(nbytes)}"


def _calls_of(program: Program, kind: type) -> Iterator[tuple[Block, fx.Node]]:
    for block in program.blocks:
        for node in program.templates[block.template].graph.nodes:
            if isinstance(node.target, kind):
                yield block, node
