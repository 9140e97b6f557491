"""The Llamas of the benchmarks have the sizes that their names say."""

from __future__ import annotations

from benchmarks.llamas import LlamaShape


def test_a_tied_head_is_the_embedding():
    """Also after their parameters have got memory: each module gets parameters of its own from that."""
    tied, untied = (LlamaShape(1, 64, 128, 2, 2, 256, is_tied=is_tied).model() for is_tied in (True, False))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == 256 * 64
