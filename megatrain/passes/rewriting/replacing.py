"""The conditions for replacing one node of a graph by another, and the fate of their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from torch import fx

from megatrain.errors import LowerError
from megatrain.tracer.spec import CALLS


def refuse_rewrite(what: str, rule: str, way_out: str) -> NoReturn:
    """Raises the error for a change that would break a graph."""
    raise LowerError(f"{what}.\n  {rule}\n  {way_out}")


def check_alike(old: fx.Node, new: fx.Node) -> None:
    """Checks that all readers of `old` may read `new`.

    Raises:
        LowerError: If one is no call of one tensor, or the tensors differ in spec or in whether they need a gradient.
    """
    for node in (old, new):
        if node.op not in CALLS or "spec" not in node.meta:
            refuse_rewrite(
                f"`{node.name}` is no call that makes one tensor",
                "Only a call can be replaced, and only by a call; inputs and state stay as they are.",
                "Replace the calls that read it, or the `getitem` calls that read its parts.",
            )
    for key, what in (("spec", "is"), ("requires_grad", "requires a gradient:")):
        if old.meta[key] != new.meta[key]:
            refuse_rewrite(
                f"`{new.name}` {what} {new.meta[key]}, and `{old.name}`, which it is to replace, {old.meta[key]}",
                "Readers of the old tensor were recorded for its shape, dtype, strides and history.",
                "Add a call that converts the new tensor, such as `to`, `reshape` or `contiguous`.",
            )


def take_over_memory(
    old: fx.Node, new: fx.Node, writers: dict[fx.Node, list[fx.Node]], added: Collection[fx.Node]
) -> None:
    """Lets views of the old tensor be views of the new one, and writes into the old one be writes into the new one.

    Args:
        old: Is replaced.
        new: Takes its place.
        writers: The calls that write into each node's memory; kept up to date.
        added: What the pass has added; that reads the old tensor on purpose.

    Raises:
        LowerError: If a write would reach other memory than before.
    """
    views = _views(old, added)
    if any(writers.get(view) for view in views) and not (_owns_memory(old) and _owns_memory(new)):
        refuse_rewrite(
            f"`{old.name}` is written in place, and `{(old if _owns_memory(new) else new).name}` is a view",
            "A write changes every tensor that shares the memory: after a replacement it would change other tensors.",
            "Replace the call that makes the memory, or clone the new tensor.",
        )
    for node in writers.pop(old, ()):
        node.meta["writes"] = tuple(new if w is old else w for w in node.meta["writes"])
        writers.setdefault(new, []).append(node)
    for view in views:
        if view is not old and "storage" in view.meta:
            view.meta.update(storage=new.meta["storage"], storage_bytes=new.meta["storage_bytes"])


def is_written_after(first: fx.Node, nodes: Iterable[fx.Node]) -> bool:
    """Tells whether `first` or a later call writes into memory of one of these tensors.

    What a pass puts in place of calls reads their operands later than they did, and again in the backward.
    """
    memory = {node.meta["storage"] for node in nodes if "storage" in node.meta}
    writers = (node for node in first.graph.nodes if node.meta.get("writes") and not node < first)
    return any(written.meta.get("storage") in memory for node in writers for written in node.meta["writes"])


def _views(node: fx.Node, added: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Lists a node and its views, in order, also through calls with several results."""
    number = node.meta["storage"]
    views = {node: None}
    ends = [node]
    while ends:
        for user in ends.pop().users:
            is_view = user.op in CALLS and user.meta.get("storage", number) == number
            if is_view and user not in views and user not in added:
                views[user] = None
                ends.append(user)
    return views


def _owns_memory(node: fx.Node) -> bool:
    """Tells whether a call has made the memory of its result, rather than one of its operands."""
    operands = [a for n in node.all_input_nodes for a in ((n,) if "storage" in n.meta else n.all_input_nodes)]
    return all(n.meta.get("storage") != node.meta["storage"] for n in operands)
