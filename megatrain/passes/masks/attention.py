"""Attention: the calls of torch that take a mask, with their arguments by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.rewriting.call_trial import Site
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.sizes import format_bytes

_MHA = F.multi_head_attention_forward
_NAMES = {
    F.scaled_dot_product_attention: (
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    _MHA: tuple(inspect.signature(_MHA).parameters),
}

ATTENTION = frozenset(_NAMES)
"""Torch's functions of attention that take a mask."""


@dataclass(frozen=True, slots=True)
class MaskNote:
    """What became of a call's mask; in `node.meta["mask"]` of what a pass puts there. Prints the pass's promise.

    Args:
        nbytes: Of the mask that was.
        text: What is there instead.
        promise: Which numbers keep their bits.
    """

    nbytes: int
    text: str
    promise: str

    def __str__(self) -> str:
        return f"{self.text} instead of a mask of {format_bytes(self.nbytes)}: {self.promise}"


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of `scaled_dot_product_attention`, or of the function that computes a `MultiheadAttention`.

    Args:
        node: The call.
        given: Its arguments, by name.
        mask: What it masks with.
    """

    node: fx.Node
    given: Mapping[str, Any]
    mask: fx.Node

    @property
    def is_multihead(self) -> bool:
        """Whether projections are part of the call."""
        return self.node.target is _MHA

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        place = 0 if self.is_multihead else -2
        return self._spec("query").shape[place], self._spec("key").shape[place]

    @property
    def draws(self) -> bool:
        """Whether it drops some of the weights at random."""
        dropout = self.given.get("dropout_p", 0.0)
        return bool(dropout and self.given.get("training", True)) or bool(self.node.meta.get("is_random"))

    @property
    def is_plain(self) -> bool:
        """Whether the mask is all that lets queries see less than all keys, and is read for nothing else."""
        if not self.is_multihead:
            return not self.given.get("is_causal")
        extra = ("bias_k", "bias_v", "static_k", "static_v", "key_padding_mask")
        is_extended = any(self.given.get(name) is not None for name in extra) or self.given["add_zero_attn"]
        return not is_extended and not self.given.get("need_weights", True)

    @property
    def takes_causality(self) -> bool:
        """Whether it may be told of causality: kernels fill in -inf before they scale, which a negative scale turns."""
        scale = self.given.get("scale")
        is_positive = scale is None or (isinstance(scale, int | float) and 0 < scale < math.inf)
        return is_positive and not self.draws and self.is_plain and self.lengths[0] == self.lengths[1] > 1

    @property
    def leaves_mask_unread(self) -> bool:
        """Whether torch reads the word `is_causal` in place of the mask, which must only be there."""
        return self.is_multihead and bool(self.given.get("is_causal")) and self.is_plain

    def masked(
        self, rewriter: Rewriter, mask: fx.Node | None, text: str, promise: str, *, is_causal: bool = False
    ) -> bool:
        """Lets the call mask by `mask`, or by causality, or not at all; tells whether it can be.

        Args:
            rewriter: Of the graph.
            mask: Another mask, made before the call.
            text: See `MaskNote`.
            promise: Likewise.
            is_causal: Whether queries see themselves and what comes before.
        """
        given = {**self.given, "attn_mask": mask, "is_causal": is_causal}
        site = replace(Site.of(self.node), after=max(self._parts, default=self.node))
        if mask is None and self.is_multihead and is_causal:  # torch wants some mask there, and doesn't read it
            given["attn_mask"] = rewriter.add(site, torch.zeros, (1, 1), {"device": rewriter.device})
        made = rewriter.add(site, self.node.target, self._positional(given), self._named(given))  # pyright: ignore
        return self.replaced(rewriter, made, text, promise)

    def replaced(self, rewriter: Rewriter, made: Any, text: str, promise: str) -> bool:
        """Lets others read these results, if they are laid out like those of the call; tells whether they are."""
        parts = self._parts
        pairs = [(part, made[part.args[1]]) for part in parts] or [(self.node, made)]  # pyright: ignore
        if any(old.meta[key] != new.meta[key] for old, new in pairs for key in ("spec", "requires_grad")):
            return False
        for old, new in pairs:
            rewriter.replace(old, new)
        if parts:
            rewriter.erase(self.node)
        call: Any = pairs[0][1].args[0] if isinstance(made, tuple) else made
        call.meta["mask"] = MaskNote(self.mask.meta["storage_bytes"], text, promise)
        return True

    @property
    def _parts(self) -> list[fx.Node]:
        """The results, where there are several."""
        return [user for user in self.node.users if user.target is getitem]

    def _positional(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        names = _NAMES[self.node.target][: 13 if self.is_multihead else 3]  # pyright: ignore
        return tuple(given[name] for name in names)

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        names = _NAMES[self.node.target][13 if self.is_multihead else 3 :]  # pyright: ignore
        return {name: given[name] for name in names if name in given}

    def _spec(self, name: str) -> Any:
        return self.given[name].meta["spec"]


def masked_attention(graph: fx.Graph) -> Iterator[Attention]:
    """Yields the calls of attention that are given a mask, in execution order."""
    for node in list(graph.nodes):
        names = _NAMES.get(node.target) if node.op == "call_function" else None  # pyright: ignore
        if names is None:
            continue
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if isinstance(mask, fx.Node) and not mask.meta.get("requires_grad") and not mask.meta["spec"].on_host:
            yield Attention(node, given, mask)


def has_masked_attention(graph: fx.Graph) -> bool:
    """Tells whether a call of attention is given a mask: most models have none, and their graph needs no copy."""
    return any(True for _ in masked_attention(graph))


def before(node: fx.Node) -> Site:
    """The site right before a call, in its module and modes."""
    site = Site.of(node)
    return Site(node.prev, site.modules, site.source, site.grad, site.autocast)
