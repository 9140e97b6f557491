"""head_pattern(): the linear layer whose logits a loss is of, with all calls between, found in a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.rewriting.replacing import is_written_after
from megatrain.tracer.calls import target_name
from megatrain.tracer.node_meta import CALLS
from megatrain.tracer.spec import TensorSpec

# Each acts on every element alone, with operands that are numbers or are broadcast along rows.
_POINTWISE = frozenset(
    "add sub mul div neg multiply divide true_divide subtract tanh sigmoid clamp float to bfloat16 half double".split()
)
_CASTS = frozenset("float to bfloat16 half double".split())
# Each may bring the words from the last dimension to the second.
_TRANSPOSING = frozenset("transpose permute movedim moveaxis swapaxes swapdims".split())
# Each changes the shape of the leading dimensions alone, if the last one stays.
_RESHAPING = frozenset("view reshape flatten unflatten squeeze unsqueeze contiguous clone".split())
# As many take about as long as all rows at once, a quarter of these a fifth longer (docs/benchmarks.md).
_FEWEST = 256


@dataclass(frozen=True, slots=True)
class HeadPattern:
    """A loss of a linear head in a graph.

    Args:
        loss: The call of `cross_entropy` or `nll_loss`.
        linear: The call that makes logits.
        between: What is called between the two, in order, without a softmax.
        dtype: Of the softmax's result, where the call of the softmax says so.
    """

    loss: fx.Node
    linear: fx.Node
    between: tuple[fx.Node, ...]
    dtype: torch.dtype | None

    @property
    def operands(self) -> set[fx.Node]:
        """All that its calls read."""
        return {operand for node in (self.linear, *self.between, self.loss) for operand in node.all_input_nodes}

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype of the log-probabilities, if logits are cast once at most and nothing else is done to them."""
        calls: list[fx.Node] = []
        for node in self.between:
            before: Any = node.args[0]
            if is_pointwise(node, before):
                calls.append(node)
        if any(target_name(node) not in _CASTS for node in calls):
            return None
        # A loss has the dtype of its log-probabilities.
        dtypes = [node.meta["spec"].dtype for node in (self.linear, *calls, self.loss)]
        return dtypes[-1] if sum(one != other for one, other in pairwise(dtypes)) <= 1 else None

    @property
    def num_rows(self) -> int:
        """Of the logits that count."""
        return math.prod(shape_of(self.loss.args[1]))

    @property
    def usual_rows(self) -> int:
        """As many as make the logits of a chunk about as large as the hidden states of all rows."""
        num_words, width = shape_of(self.linear.args[1])
        wanted = max(_FEWEST, -(-self.num_rows // -(-num_words // width)))
        return 1 << (wanted - 1).bit_length()


def head_pattern(loss: fx.Node) -> HeadPattern | None:
    """Finds the linear layer whose logits a loss is of; None if it can't be chunked."""
    if not _is_of_words(loss):
        return None
    dtype: Any = None
    needs_softmax = loss.target is F.nll_loss
    between: list[fx.Node] = []
    reader: fx.Node = loss
    node: Any = loss.args[0]
    if len(shape_of(node)) > 2:
        reader, node = node, _with_words_last(loss, node)
    while _is_read_by(node, reader) and _is_plain(node) and node.meta["autocast"] == loss.meta["autocast"]:
        before = node.args[0] if node.args else None
        if node.target is F.linear and not needs_softmax and not node.kwargs and len(shape_of(node.args[1])) == 2:
            found = HeadPattern(loss, node, tuple(reversed(between)), dtype)
            return None if is_written_after(node, found.operands) else found
        if not isinstance(before, fx.Node) or "spec" not in before.meta:
            return None
        if needs_softmax and _is_softmax(node):
            needs_softmax, dtype = False, node.kwargs.get("dtype")
        elif _moves_rows(node, before) or (not needs_softmax and is_pointwise(node, before)):
            between.append(node)
        else:
            return None
        reader, node = node, before
    return None


def _is_of_words(loss: fx.Node) -> bool:
    """Tells whether a loss compares rows of logits with the number of a word each."""
    given: Any = loss.args
    if len(given) != 2 or not all(isinstance(a, fx.Node) for a in given) or not _is_plain(loss):
        return False
    logits, labels = given
    is_deprecated = loss.kwargs.get("size_average") is not None or loss.kwargs.get("reduce") is not None
    shape = shape_of(logits)
    are_words = labels.meta["spec"].dtype == torch.int64 and shape_of(labels) == (*shape[:1], *shape[2:])
    return are_words and len(shape) >= 2 and not is_deprecated


def _with_words_last(loss: fx.Node, logits: fx.Node) -> Any:
    """Returns what a loss of [batch, words, ...] transposes for its logits, [batch, ..., words]; None if it doesn't."""
    before = logits.args[0] if logits.args else None
    if not (isinstance(before, fx.Node) and _is_read_by(logits, loss) and _is_plain(logits)):
        return None
    if target_name(logits) not in _TRANSPOSING or loss.target is not F.cross_entropy:
        return None
    moved = TensorSpec.of(before.meta["spec"].empty(torch.device("meta")).movedim(-1, 1))
    return before if moved == logits.meta["spec"] else None


def _is_read_by(node: Any, reader: fx.Node) -> TypeGuard[fx.Node]:
    """Tells whether a call is read by this one alone."""
    return isinstance(node, fx.Node) and node.op in CALLS and set(node.users) == {reader}


def _is_plain(node: fx.Node) -> bool:
    """Tells whether a call makes one tensor with gradients, and does nothing else."""
    meta = node.meta
    return "spec" in meta and meta["grad"] and not meta.get("is_random") and not meta.get("writes")


def _is_softmax(node: fx.Node) -> bool:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    is_over_words = dim in (-1, len(shape_of(node)) - 1) and len(node.args) <= 2
    return is_over_words and node.target in (F.log_softmax, torch.log_softmax, "log_softmax")


def is_pointwise(node: fx.Node, logits: fx.Node) -> bool:
    """Tells whether a call computes each row from this row, from numbers and from what all rows share."""
    name = target_name(node)
    if name not in _POINTWISE or node.target not in (name, getattr(torch, name, None)):
        return False
    if shape_of(node) != shape_of(logits):
        return False
    others = [n for n in node.all_input_nodes if n is not logits]
    return all("spec" in n.meta and math.prod(shape_of(n)[:-1]) == 1 for n in others)


def _moves_rows(node: fx.Node, logits: fx.Node) -> bool:
    """Tells whether a call leaves rows whole and in their order; it may leave out some."""
    before, after = logits.meta["spec"], node.meta["spec"]
    if node.op != "call_method" and node.target is not getattr(torch, target_name(node), None):
        return False
    if before.dtype != after.dtype or not after.shape or before.shape[-1] != after.shape[-1]:
        return False
    if node.target == "__getitem__":
        return len(node.args) == 2 and _leaves_words(node.args[1], len(before.shape))
    return target_name(node) in _RESHAPING and math.prod(before.shape) == math.prod(after.shape)


def _leaves_words(index: Any, ndim: int) -> bool:
    """Tells whether an index selects along leading dimensions alone, by numbers and slices."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or (isinstance(item, slice | int) and not isinstance(item, bool)) for item in items):
        return False
    if any(isinstance(part, fx.Node) for i in items if isinstance(i, slice) for part in (i.start, i.stop, i.step)):
        return False
    behind = items[items.index(Ellipsis) + 1 :] if Ellipsis in items else items
    reaches_words = bool(behind) if Ellipsis in items else len(items) == ndim
    return not reaches_words or items[-1] == slice(None)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a tensor that a node stands for."""
    return tuple(node.meta["spec"].shape)
