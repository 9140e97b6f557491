"""Rewriter: how a pass changes a captured graph. Calls are tried, added and replaced."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from megatrain.base.checks import checked, count, function, optional, sequence_of, shown
from megatrain.base.torch_private import pytree
from megatrain.passes.call_trial import Outcome, Site, check_target, operands_of, refuse_call, tried
from megatrain.passes.canonicalize import copied_graph, frozen, is_erased, without_dead
from megatrain.passes.interpret import ExactFakes
from megatrain.passes.pattern import Match, Pattern, Target, refuse_rewrite
from megatrain.tracer.calls import call_name
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import CALLS, TensorSpec, storage_key
from megatrain.tracer.traced import TracedModule


class Rewriter:
    """Changes a copy of a capture's graph, node by node; the capture itself stays as it is.

    A rewrite is a plain function. This one takes a negation through a product:

    >>> import megatrain
    >>> def negate_late(traced):
    ...     rewriter = megatrain.Rewriter(traced)
    ...     for product in rewriter.calls(torch.mul):
    ...         negation, factor = product.args
    ...         if negation.target is torch.neg:
    ...             positive = rewriter.call(product, torch.mul, negation.args[0], factor)
    ...             rewriter.replace(product, rewriter.call(product, torch.neg, positive))
    ...     return rewriter.done()
    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.mul(torch.neg(x), 3)
    >>> print(negate_late(megatrain.trace(Model(), kwargs={"x": torch.ones(2)})))
    traced Model(x: f32[2]) -> f32[2]
      state: 0 parameters, 0 bytes; 0 buffers, 0 bytes
      mul_1: f32[2] = torch.mul(x, 3)
      mul: f32[2] = torch.neg(mul_1)
      return mul

    Args:
        traced: The capture.

    Attributes:
        graph: The copy. Nodes may be looked for there; they are added and replaced by the methods here.
        device: Where the model computes; for calls that make tensors, such as `torch.arange`.
    """

    @checked()
    def __init__(self, traced: TracedModule):
        self._traced = traced
        self.device = traced.device
        self.graph, self._copies = copied_graph(traced.graph)
        self._writes_back = {key: self._copies[node] for key, node in traced.writes_back}
        self._next_storage = 1 + max((n.meta.get("storage", 0) for n in self.graph.nodes), default=0)
        self._fakes = ExactFakes()
        # The targets and arguments live as long as a key that knows them by identity.
        self._outcomes: dict[Hashable, tuple[Outcome, Any]] = {}
        self._added: set[fx.Node] = set()
        self._last_after: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            for written in node.meta.get("writes", ()):
                self._writers[written].append(node)

    @property
    def kept(self) -> set[fx.Node]:
        """The nodes whose values are written back into buffers after the forward."""
        return set(self._writes_back.values())

    def calls(self, target: Target) -> list[fx.Node]:
        """Lists the calls of a function, or of a method by its name, in execution order.

        Raises:
            LowerError: If it is neither.
        """
        check_target(target)
        return [n for n in self.graph.nodes if n.op in CALLS and n.target == target]

    @checked(pattern=function(), through=sequence_of(kinds=(tuple, list), what="a tuple"))
    def matches(self, pattern: Callable[..., Any], *, through: Sequence[Target] = ()) -> list[Match]:
        """Lists where a few calls follow each other as in `pattern`, in execution order.

        >>> import torch.nn.functional as F
        >>> def head_loss(hidden, weight, labels, ignored):
        ...     return F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=ignored)

        finds each cross-entropy of a linear layer's result. `match["hidden"]` is the node of the hidden states,
        `match["ignored"]` a number, `match.result` the call of the loss, which `replace` can replace.

        Args:
            pattern: A plain function that makes the calls. Its parameters stand for any tensors or values; other
                arguments must be those of the graph, and what it doesn't give must be the default there.
            through: Calls that may stand between those of the pattern, such as `("view", "reshape")`.

        Returns:
            The matches: what they make on the way is read by nothing else, and no memory that they read is written
            into once they have begun. No call is in two of them.

        Raises:
            LowerError: If the pattern asks for values or shapes, or doesn't return the result of a call.
        """
        for target in through:
            check_target(target)
        return Pattern(pattern, through).matches(self.graph, self.kept)

    def call(self, like: fx.Node, target: Target, /, *args: Any, **kwargs: Any) -> Any:
        """Adds a call after `like` and after earlier additions there, and fills in its meta.

        Its spec comes from a run on tensors without values; grad mode, autocast, the module and the user's line come
        from `like`. Its operands may be any nodes up to there.

        Args:
            like: The call that it resembles, usually the one that it will replace.
            target: A function of tensors, or the name of a tensor's method. The function may make several torch calls.
                It runs at each step and again at each recompute, so it must compute the same from the same operands,
                and must hold no tensors; autograd differentiates it like any code.
            args: Its arguments, with nodes for tensors.
            kwargs: Its keyword arguments, likewise.

        Returns:
            The node. For a call with several results a tuple with a node for each tensor; for one that gives back an
            operand (`x.contiguous()`), that operand.

        Raises:
            LowerError: If the call fails, writes in place, makes no tensor, or an operand comes too late.
        """
        like = self._own(like)
        if like.op not in CALLS:
            refuse_rewrite(
                f"`{like.name}` isn't a call, so it can't be `like`",
                "A new call takes modes and module from `like`, and comes after it.",
                "Give as `like` the call that you replace, or a call that reads the operands that you need.",
            )
        check_target(target)
        return self.add(Site.of(like), target, args, kwargs)

    @checked(storage=optional(count()))
    def add(
        self,
        site: Site,
        target: Target,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        spec: TensorSpec | None = None,
        storage: int | None = None,
        name: str | None = None,
    ) -> Any:
        """Like `call`, for a pass that knows more.

        Args:
            site: Where, and under which modes.
            target: What is called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            spec: Of the result, one tensor, if it is known: then nothing is tried.
            storage: With `spec`: the memory that the result lies in; None for memory of its own.
            name: Of the node; another one if it is taken.

        Raises:
            OptionError: If an argument has a wrong value.
            LowerError: As `call`.
        """
        check_target(target)
        site = dataclasses.replace(site, after=self._own(site.after))
        args, kwargs = fx.map_arg((tuple(args), dict(kwargs or {})), self._own)  # pyright: ignore[reportAssignmentType]
        end = self._last_after.get(site.after, site.after)
        operands = operands_of(target, (args, kwargs), site, end)
        if spec is not None:
            node = self._append(site, target, args, kwargs, name, is_random=False)
            has_grad = site.grad and any(n.meta["requires_grad"] for n in operands)
            is_number = spec.dtype.is_floating_point or spec.dtype.is_complex
            self._describe(node, spec, has_grad and is_number, storage, spec.nbytes)
            return node
        outcome = self._outcome(target, args, kwargs, site, operands)  # pyright: ignore[reportArgumentType]
        if outcome.same is not None:
            return operands[outcome.same]
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(outcome.result)):
            refuse_call(
                target,
                "makes no tensor",
                "Nodes of a graph stand for tensors; plain values are arguments.",
                "Read plain values from `node.meta` in the pass, such as `node.meta['spec'].shape`.",
            )
        node = self._append(site, target, args, kwargs, name, is_random=outcome.is_random)
        known = {storage: operands[number] for storage, number in outcome.operands.items()}
        return self._bound(node, outcome.result, known, site)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Lets all that reads `old` from `new` on read `new`, which takes its name; `old` goes if nothing reads it.

        Raises:
            LowerError: If the two aren't alike, or aren't calls.
        """
        old, new = self._own(old), self._own(new)
        _check_alike(old, new)
        early = [user for user in old.users if not user > new and user is not new and user not in self._added]
        if early or new < old:
            refuse_rewrite(
                f"`{early[0].name if early else old.name}` comes before `{new.name}`, which is to replace `{old.name}`",
                "Readers of the old result must come after the new call.",
                "Give the replaced call as `like` when you make the new one.",
            )
        self._take_over_memory(old, new)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user > new)
        for key, node in self._writes_back.items():
            self._writes_back[key] = new if node is old else node
        self.erase(old)
        if is_erased(old) and new in self._added:
            new.name = old.name  # the name stays, for all code that looks the tensor up

    def erase(self, node: fx.Node) -> None:
        """Removes a node, unless something reads it.

        Raises:
            LowerError: If it isn't a node of this graph.
        """
        node = self._own(node)
        if node.users:
            return
        for other in self._writers.pop(node, ()):
            other.meta["writes"] = tuple(w for w in other.meta["writes"] if w is not node)
        self._last_after.pop(node, None)
        for like, last in self._last_after.items():
            self._last_after[like] = node.prev if last is node else last
        self.graph.erase_node(node)

    @checked()
    def done(self, *, state: Mapping[str, StateEntry] | None = None) -> TracedModule:
        """Returns the capture with the changed graph, without dead nodes; call it last.

        Args:
            state: The state that the graph reads now, if it has changed; entries that it doesn't read are left out.

        Raises:
            OptionError: If `state` has a wrong value.
        """
        return without_dead(
            dataclasses.replace(
                self._traced,
                graph=self.graph,
                state=self._traced.state if state is None else state,
                writes_back=tuple(self._writes_back.items()),
            )
        )

    # -- adding -------------------------------------------------------------------------------------------

    def _own(self, node: Any) -> fx.Node:
        """Returns the node of the copy; nodes of the capture's own graph stand for theirs."""
        found = self._copies.get(node) if isinstance(node, fx.Node) and node.graph is not self.graph else node
        if not isinstance(found, fx.Node) or is_erased(found):
            refuse_rewrite(
                f"{f'`{node.name}`' if isinstance(node, fx.Node) else shown(node)} isn't a node of this graph",
                "A pass works with the nodes of one capture; replaced nodes are gone.",
                "Take nodes from `rewriter.graph`, or from results of `call`.",
            )
        return found

    def _outcome(
        self, target: Target, args: Any, kwargs: dict[str, Any], site: Site, operands: Sequence[fx.Node]
    ) -> Outcome:
        """The outcome of a call's trial, which calls of one target on operands of the same kinds share."""
        number = {node: index for index, node in enumerate(operands)}
        kinds = tuple((node.meta["spec"], node.meta["requires_grad"]) for node in number)
        key = *(frozen(each, number) for each in (target, args, kwargs)), kinds, site.grad, site.autocast
        if key not in self._outcomes:
            self._outcomes[key] = (
                tried(target, (args, kwargs), site, operands, self.device, self._fakes),
                (target, args, kwargs),
            )
        return self._outcomes[key][0]

    def _append(
        self, site: Site, target: Target, args: Any, kwargs: Any, name: str | None, *, is_random: bool
    ) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_after(self._last_after.get(site.after, site.after)):
            node = self.graph.create_node(op, target, args, kwargs, name or _name(target))
        node.meta.update(
            modules=site.modules, source=site.source, grad=site.grad, autocast=site.autocast, is_random=is_random
        )
        self._last_after[site.after] = node
        self._added.add(node)
        return node

    def _bound(self, node: fx.Node, result: Any, known: dict[int, fx.Node], site: Site) -> Any:
        """Describes the tensors in a result; several get a node each."""
        if isinstance(result, torch.Tensor):
            owner = known.setdefault(storage_key(result), node)
            storage, size = (
                (None, result.untyped_storage().nbytes())
                if owner is node
                else (owner.meta["storage"], owner.meta["storage_bytes"])
            )
            self._describe(node, TensorSpec.of(result, self.device), result.requires_grad, storage, size)
            node.meta["has_history"] = result.requires_grad
            return node
        if not isinstance(result, tuple | list):
            return result
        parts: list[Any] = []
        for index, item in enumerate(result):
            has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(item))
            part = self._append(site, getitem, (node, index), {}, None, is_random=False) if has_tensors else None
            parts.append(item if part is None else self._bound(part, item, known, site))
        return tuple(parts)

    def _describe(self, node: fx.Node, spec: TensorSpec, has_grad: bool, storage: int | None, size: int) -> None:
        if storage is None:
            storage, self._next_storage = self._next_storage, self._next_storage + 1
        node.meta.update(spec=spec, requires_grad=has_grad, storage=storage, storage_bytes=size)

    # -- replacing ----------------------------------------------------------------------------------------

    def _take_over_memory(self, old: fx.Node, new: fx.Node) -> None:
        """Lets views of the old tensor be views of the new one, and writes into the old one be writes into the new one.

        Raises:
            LowerError: If a write would reach other memory than before.
        """
        views = self._views(old)
        if any(self._writers.get(view) for view in views) and not (_owns_memory(old) and _owns_memory(new)):
            refuse_rewrite(
                f"`{old.name}` is written in place, and `{(old if _owns_memory(new) else new).name}` is a view",
                "A write changes every tensor that shares the memory: after a replacement it would change other "
                "tensors.",
                "Replace the call that makes the memory, or clone the new tensor.",
            )
        for node in self._writers.pop(old, ()):
            node.meta["writes"] = tuple(new if w is old else w for w in node.meta["writes"])
            self._writers[new].append(node)
        for view in views:
            if view is not old and "storage" in view.meta:
                view.meta.update(storage=new.meta["storage"], storage_bytes=new.meta["storage_bytes"])

    def _views(self, node: fx.Node) -> dict[fx.Node, None]:
        """Lists a node and its views, in order, also through calls with several results.

        An added call reads the old tensor on purpose.
        """
        number = node.meta["storage"]
        views = {node: None}
        ends = [node]
        while ends:
            for user in ends.pop().users:
                is_view = user.op in CALLS and user.meta.get("storage", number) == number
                if is_view and user not in views and user not in self._added:
                    views[user] = None
                    ends.append(user)
        return views


def _check_alike(old: fx.Node, new: fx.Node) -> None:
    """Checks that all readers of `old` may read `new`."""
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


def _owns_memory(node: fx.Node) -> bool:
    """Tells whether a call has made the memory of its result, rather than one of its operands."""
    operands = [a for n in node.all_input_nodes for a in ((n,) if "storage" in n.meta else n.all_input_nodes)]
    return all(n.meta.get("storage") != node.meta["storage"] for n in operands)


def _name(target: Target) -> str:
    name = target if isinstance(target, str) else call_name(target)
    return name.strip("_") or "call"
