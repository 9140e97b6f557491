"""narrow_fused_head: TRL's fused head, whose tiles of logits become narrower where memory lacks."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from megatrain.errors import LowerError
from megatrain.passes.rewriting.call_trial import Site
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.tracer.calls import applied_function
from megatrain.tracer.traced import TracedModule

# Narrower products of matrices take longer.
_FEWEST = 128
_OPERANDS = ("hidden", "weight", "bias", "targets")
_WIDTH = "chunk_size"


@dataclass(frozen=True, slots=True)
class NarrowHead:
    """The target of a call: TRL's fused head, with narrower tiles than it was called with.

    The Function stays TRL's own, and takes what it was called with. It computes logits in tiles, of so many rows and so
    many words, and folds each into what it returns of a row: the label's log-probability, the entropy, and others.

    Args:
        function: The `autograd.Function`.
        position: Of the number of words among its arguments.
        rows: Of a tile.
        words: Of a tile.
        words_before: Of a tile as the model asked for it.
        dtype: Of logits.
    """

    function: type[torch.autograd.Function]
    position: int
    rows: int
    words: int
    words_before: int
    dtype: torch.dtype

    __name__ = "fused_head"

    def __call__(self, *args: Any) -> Any:
        """Calls the Function."""
        return self.function.apply(*args[: self.position], self.words, *args[self.position + 1 :])

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"narrow({arguments}: {name}; {self.words} words at a time)"

    def tile_bytes(self, words: int) -> int:
        """Bytes of a tile of so many words."""
        return self.rows * words * self.dtype.itemsize


def narrow_fused_head(traced: TracedModule, *, divisor: int = 1) -> TracedModule:
    """Returns the capture with narrower tiles in each of TRL's fused heads; `traced` itself if none gets narrower.

    TRL's trainers put a head into the model that computes log-probabilities of labels, with their gradients, in tiles
    of 4096 rows and 32768 words. As for other heads (`chunk_head_loss`), a tile gets about as large as all hidden
    states, and no narrower than 128 words. A row's sum over its words is one over tiles, in fp32, and so is the
    gradient of its hidden state: narrower tiles add in another order. Gradients of the head's weights keep their bits.
    A head whose kernels can't be followed keeps its tiles.

    Args:
        traced: The capture.
        divisor: So many times narrower than that.
    """
    found = [(node, head) for node in traced.graph.nodes if (head := _narrowed(node, divisor)) is not None]
    if not found:
        return traced
    rewriter = Rewriter(traced)
    for node, head in found:
        old: list[Any] = sorted(node.users)  # a capture takes results apart where they are made
        try:
            parts: Any = rewriter.add(replace(Site.of(node), after=old[-1]), head, node.args)
        except LowerError:  # its kernels need values: no plan would see that its tiles are narrower
            return traced
        for part in old:
            rewriter.replace(part, parts[part.args[1]])
        rewriter.erase(node)
    return rewriter.done()


def _narrowed(node: fx.Node, divisor: int) -> NarrowHead | None:
    """The head that a call becomes; None if it is no head of TRL's, or gets no narrower."""
    function = applied_function(node.target)
    if function is None or isinstance(node.target, NarrowHead) or function.__module__.partition(".")[0] != "trl":
        return None
    names = list(inspect.signature(function.forward).parameters)[1:]  # the first is the context
    rows: Any = getattr(sys.modules[function.__module__], "TOKEN_CHUNK_SIZE", None)
    is_head = tuple(names[: len(_OPERANDS)]) == _OPERANDS and _WIDTH in names and isinstance(rows, int)
    if not is_head or not node.users or any(user.target is not getitem for user in node.users):
        return None
    position = names.index(_WIDTH)
    hidden, weight = (node.args[index].meta["spec"] for index in (0, 1))  # pyright: ignore
    num_words: Any = node.args[position]
    (num_rows, width), (vocabulary, _) = hidden.shape, weight.shape
    rows, before = min(rows, num_rows), min(num_words, vocabulary)
    wanted = max(1, -(-num_rows * width // max(1, rows)))
    words = max(_FEWEST, (1 << (wanted - 1).bit_length()) // divisor)
    dtype = next((dtype for _, dtype in node.meta["autocast"]), hidden.dtype)
    return NarrowHead(function, position, rows, words, before, dtype) if words < before else None
