"""chunk_head_loss: a head's logits and their loss, computed chunk by chunk of rows (chunked cross-entropy)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.call_trial import Site
from megatrain.passes.pattern import is_written_after
from megatrain.passes.rewriter import Rewriter
from megatrain.passes.rewrites.chunked_log_probs import Head, Logits, Operand, RowCall, chunked_log_probs
from megatrain.tracer.calls import literal_text, target_name
from megatrain.tracer.spec import CALLS, TensorSpec
from megatrain.tracer.traced import TracedModule

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


# Of a loss, where no row is ignored: any index that is no word's.
_NO_WORD = -100


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The target of a call: the loss of a linear head, whose logits never exist whole.

    `(hidden, labels, weight, bias, class_weight, operands)`, where hidden states have the shape [..., width] and labels
    that of the rows; the result is what `cross_entropy` returns.

    Args:
        reduction: `"mean"`, `"sum"` or `"none"`.
        ignore_index: Label of rows that don't count.
        smoothing: Label smoothing, from 0 to 1.
    """

    head: Head
    reduction: str
    ignore_index: int
    smoothing: float
    shape: torch.Size

    __name__ = "head_loss"

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the loss by the operations of torch's `cross_entropy`, in their order."""
        labels = labels.reshape(-1)
        is_ignored = labels == self.ignore_index
        words = labels.masked_fill(is_ignored, 0)
        rows = hidden.reshape(-1, hidden.shape[-1])
        log_probs, sums = chunked_log_probs(self.head, rows, words, weight, bias, class_weight, *operands)
        loss = self._negative(log_probs, words, is_ignored, class_weight)
        if sums is None:
            return loss
        smooth = (-sums).masked_fill(is_ignored, 0).view(self.shape)
        if self.reduction == "mean":
            counted = (~is_ignored).sum() if class_weight is None else _counted(class_weight, words, is_ignored).sum()
            smooth = smooth.sum() / counted
        elif self.reduction == "sum":
            smooth = smooth.sum()
        return loss * (1 - self.smoothing) + smooth * (self.smoothing / len(weight))

    def _negative(
        self,
        log_probs: torch.Tensor,
        words: torch.Tensor,
        is_ignored: torch.Tensor,
        class_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """The negative log-likelihood. Without weights of classes torch sums rows as it would those of all words."""
        if class_weight is None:
            only = torch.zeros_like(words).masked_fill(is_ignored, _NO_WORD).view(self.shape)
            of_only = log_probs.view(self.shape).unsqueeze(1)
            return F.nll_loss(of_only, only, ignore_index=_NO_WORD, reduction=self.reduction)
        factors = _counted(class_weight, words, is_ignored)
        rows = (-log_probs * factors).view(self.shape)
        if self.reduction == "none":
            return rows
        return rows.sum() / factors.sum() if self.reduction == "mean" else rows.sum()

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        calls = "".join(f"{call.text}, " for call in self.head.calls)
        return f"chunked({arguments}: linear, {calls}{self._loss_text()}; {self.head.rows} rows at a time)"

    def _loss_text(self) -> str:
        told: dict[str, tuple[Any, Any]] = {
            "reduction": (self.reduction, "mean"),
            "ignore_index": (self.ignore_index, -100),
            "label_smoothing": (self.smoothing, 0.0),
        }
        text = ", ".join(f"{name}={literal_text(value)}" for name, (value, usual) in told.items() if value != usual)
        return f"cross_entropy({text})" if text else "cross_entropy"


def _counted(class_weight: torch.Tensor, words: torch.Tensor, is_ignored: torch.Tensor) -> torch.Tensor:
    return class_weight[words].masked_fill(is_ignored, 0)


def chunk_head_loss(traced: TracedModule, *, rows: int | None = None, divisor: int = 1) -> TracedModule:
    """Returns the capture with each loss of a linear head computed in chunks of rows; `traced` itself if none can be.

    The pattern is `linear`, then calls that treat each row alone (casts, scales, a softcap, a bias), views and slices
    of rows, then `cross_entropy`, also of transposed logits ([batch, words, length]), or `log_softmax` and `nll_loss`.
    All of it may run under one autocast. Nothing else may read the logits, or what is made of them in between. All
    reductions, ignored labels, label smoothing and weights of classes are served.

    The loss and the gradients of hidden states have the bits of the unchunked computation on the CPU (but weights of
    classes sum rows in another order, and transposed logits the words of a row). Gradients of the head's weights are
    sums over chunks, in fp32 or wider.

    Args:
        rows: Of a chunk; None takes as many as make its logits about as large as all hidden states, and at least 256.
        divisor: Without `rows`: so many times fewer than these.
    """
    losses = [node for node in traced.graph.nodes if node.target in (F.cross_entropy, F.nll_loss)]
    found = [pattern for pattern in map(head_pattern, losses) if pattern is not None]
    chunked = [
        (pattern, size) for pattern in found if (size := rows or pattern.usual_rows // divisor) < pattern.num_rows
    ]
    if not chunked:
        return traced
    rewriter = Rewriter(traced)
    for pattern, size in chunked:
        _rewrite(pattern, rewriter, size)
    return rewriter.done()


def _rewrite(found: HeadPattern, rewriter: Rewriter, rows: int) -> None:
    """Replaces the loss; nothing reads the logits then, so that they go."""
    hidden, weight, bias = (*found.linear.args, None)[:3]
    calls: list[RowCall] = []
    operands: list[Any] = []
    for node in found.between:
        logits: Any = node.args[0]
        if is_pointwise(node, logits):
            calls.append(_row_call(rewriter, found.loss, node, operands))
        elif node.target == "__getitem__":  # rows of hidden states are moved as rows of logits were
            hidden = rewriter.call(found.loss, "__getitem__", hidden, node.args[1])
        elif shape_of(node) != shape_of(logits):
            hidden = rewriter.call(found.loss, "reshape", hidden, (*shape_of(node)[:-1], shape_of(hidden)[-1]))
    scores: Any = found.loss.args[0]
    dtype = found.loss.meta["spec"].dtype
    if found.loss.target is F.cross_entropy and scores.meta["spec"].dtype != dtype:
        # Autocast makes this loss in fp32, and its softmax with it.
        calls.append(RowCall("to", (Logits(), dtype), (), f"to({literal_text(dtype)})"))
    hidden, weight, bias = (_cast(found, rewriter, operand) for operand in (hidden, weight, bias))
    labels, options = found.loss.args[1], found.loss.kwargs
    smoothing: Any = options.get("label_smoothing", 0.0)
    reduction: Any = options.get("reduction", "mean")
    ignore_index: Any = options.get("ignore_index", -100)
    target = HeadLoss(
        Head(
            tuple(calls), found.dtype, rows, sums=smoothing > 0, cast=found.cast, autocast=found.loss.meta["autocast"]
        ),
        reduction,
        ignore_index,
        float(smoothing),
        torch.Size(shape_of(labels)),
    )
    # The call stands for the head, and blocks are named for their modules.
    site = replace(Site.of(found.loss), modules=found.linear.meta["modules"])
    given = (hidden, labels, weight, bias, options.get("weight"), *operands)
    rewriter.replace(found.loss, rewriter.add(site, target, given))


def _cast(found: HeadPattern, rewriter: Rewriter, operand: Any) -> Any:
    """An operand of the linear layer as autocast gives it: cast once, not for each chunk."""
    dtype = found.linear.meta["spec"].dtype
    if operand is None or operand.meta["spec"].dtype == dtype:
        return operand
    return rewriter.call(found.loss, "to", operand, dtype)


def _row_call(rewriter: Rewriter, loss: fx.Node, node: fx.Node, operands: list[Any]) -> RowCall:
    before = node.args[0]

    def without_nodes(argument: Any) -> Any:
        if argument is before:
            return Logits()
        if not isinstance(argument, fx.Node):
            return argument
        spec = argument.meta["spec"]
        if len(spec.shape) > 1:
            argument = rewriter.call(loss, "reshape", argument, (spec.shape[-1],))
        operands.append(argument)
        return Operand(len(operands) - 1)

    args = tuple(without_nodes(a) for a in node.args)
    kwargs = tuple((name, without_nodes(value)) for name, value in node.kwargs.items())
    given = [*(literal_text(a) for a in node.args if a is not before)]
    given += [f"{name}={literal_text(value)}" for name, value in node.kwargs.items()]
    text = f"{target_name(node)}({', '.join(given)})" if given else target_name(node)
    target: Any = node.target
    return RowCall(target, args, kwargs, text)
