"""SeenKeys: a mask as a band of positions and flags of keys, such as padding, that must all allow a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from megatrain.passes.masks.position_proof import PositionProof
from megatrain.passes.masks.seen_band import SeenBand
from megatrain.tracer.calls import target_name
from megatrain.tracer.node_meta import CALLS

_AND = ("and", "logical_and", "bitwise_and")


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Query `i` sees key `j` if the band and each of the flags at `j` say so.

    Args:
        band: By the positions of both.
        flags: Of the same keys for all queries: bool [..., 1, keys], or [..., 1, 1].
    """

    band: SeenBand
    flags: tuple[fx.Node, ...]

    @staticmethod
    def of(mask: fx.Node, queries: int, keys: int, positions: PositionProof) -> SeenKeys | None:
        """Takes a mask of [..., queries, keys] apart; None if it has other parts, or something writes into one.

        Args:
            mask: Its node.
            queries: Their number.
            keys: Their number.
            positions: Of the graph.
        """
        bands: list[SeenBand] = []
        flags: list[fx.Node] = []
        ends = [mask]
        while ends:
            node = ends.pop()
            band = SeenBand.of(positions.bands(node), queries, keys)
            if band is not None:
                bands.append(band)
            elif _is_of_keys(node, keys) and not positions.is_written(node):
                flags.append(node)
            elif (parts := _parts(node)) and not positions.is_written(node):
                ends += parts
            else:
                return None
        return SeenKeys(SeenBand.of_all(bands), tuple(dict.fromkeys(reversed(flags))))


def _is_of_keys(node: fx.Node, keys: int) -> bool:
    """Tells whether a tensor holds flags of keys that count for all queries."""
    spec = node.meta["spec"]
    has_no_queries = len(spec.shape) < 2 or spec.shape[-2] == 1
    return spec.dtype == torch.bool and not spec.on_host and has_no_queries and spec.shape[-1:] in ((keys,), (1,))


def _parts(node: fx.Node) -> Sequence[fx.Node]:
    """What a mask consists of, if all of it must allow a key; the tensor that it repeats, if it is expanded."""
    name, operands = target_name(node), node.all_input_nodes
    if node.op not in CALLS or node.meta["spec"].dtype != torch.bool or node.meta.get("is_random"):
        return ()
    are_flags = all("spec" in a.meta and a.meta["spec"].dtype == torch.bool for a in operands)
    is_expanded = name in ("expand", "expand_as", "broadcast_to") and len(operands) == 1
    return operands if are_flags and (is_expanded or (name in _AND and len(operands) == 2)) else ()
