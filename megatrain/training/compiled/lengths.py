"""Lengths: calls are brought to the next multiple of so many tokens, so that batches of any length share few captures.

Padding stands at the right end: masked positions and ignored labels, or, in a flattened batch, one more document
(`padding.py`). That the model's real tokens don't notice the padding is tried (`length_trial.py`) before a kind of call
is padded for the first time. Decision 102 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from megatrain.base.counts import counted
from megatrain.tracer.arguments import Arguments, positions_of
from megatrain.tracer.traced import TracedModule
from megatrain.training.compiled.length_trial import (
    OwnRun,
    difference,
    first_module,
    grown_axes,
    zeros,
)
from megatrain.training.compiled.padding import (
    DECODER,
    Axes,
    NamedCall,
    Padded,
    Padding,
    Tokens,
    brought_to,
    refused,
)

_TRIED = 32
"""Tokens of a row in a trial, at most."""


@dataclass(frozen=True, slots=True)
class PaddingRule:
    """How calls of one kind are padded.

    Args:
        is_open: Padding isn't masked: no real token sees what comes after it.
        axes: Of each output, which of its dimensions grow with which tokens.
    """

    is_open: bool
    axes: Sequence[Axes]


class Lengths:
    """Pads the calls of one model.

    Args:
        model: The user's.
        multiple: Of how many tokens a row has so many.
        run: Runs the model's own code, without gradients, and leaves no trace; with other numbers in place of
            parameters of zeros, if the second argument says so.
    """

    def __init__(self, model: nn.Module, multiple: int, run: Callable[[Arguments, bool], OwnRun]) -> None:
        self.multiple = multiple
        self._model = model
        self._padding = Padding(model)
        self._run = run
        self._rules: dict[Hashable, PaddingRule] = {}
        self._least = 0

    # -- the calls of users -----------------------------------------------------------------------------------

    def learn(self, arguments: Arguments) -> None:
        """Tries padding for a kind of call, if this is the first of the kind that needs some.

        Raises:
            TraceError: If the model notices padding, or an argument isn't understood.
        """
        call = self._padding.read(arguments)
        if self._needs(call) and self._kind(call) not in self._rules:
            self._rules[self._kind(call)] = self._tried(call)

    def padded(self, arguments: Arguments) -> Padded:
        """Pads a call; before `learn` as if no real token could see the padding, and its outputs can't be cut.

        Raises:
            TraceError: If an argument isn't understood.
        """
        call = self._padding.read(arguments)
        if not self._needs(call):
            return Padded(arguments, {})
        rule = self._rules.get(self._kind(call))
        is_open = call.mask != "mask" if rule is None else rule.is_open
        added = {prefix: self._target(each.length, prefix) - each.length for prefix, each in call.tokens.items()}
        arguments = self._padding.padded(call, added, is_open=is_open)
        return Padded(arguments, added, call.sizes, None if rule is None else rule.axes)

    @contextmanager
    def at_least(self, length: int) -> Generator[None]:
        """Within the body rows are brought to the length that rows of so many tokens have; not those of a decoder."""
        before, self._least = self._least, length
        try:
            yield
        finally:
            self._least = before

    def is_flattened(self, arguments: Arguments) -> bool:
        """Whether rows of a call hold several documents."""
        return self._padding.read(arguments).is_flattened

    def check(self, traced: TracedModule, padded: Padded) -> None:
        """Looks whether a capture of padded arguments has the outputs of the trial, and leaves no tokens elsewhere.

        Raises:
            TraceError: If it has others, writes into an argument, or leaves a tensor with the tokens of the call in an
                attribute.
        """
        if not any(padded.added.values()):
            return
        num_outputs = len(traced.outputs.placeholders)
        if padded.axes is not None and num_outputs != len(padded.axes):
            raise refused(
                f"the model returns {counted(num_outputs, 'tensor')}, and returned {len(padded.axes)} in its trial",
                "Outputs are cut to the length of the batch as the trial has shown.",
            )
        if traced.written_inputs.indices:
            name = traced.written_inputs.names[0]
            raise refused(f"the model writes into `{name}`", "It would write into a copy with padding.")
        sizes = {length + padded.added[prefix] for prefix, (_, length) in padded.sizes.items()}
        for name, node in zip(traced.side_outputs.names, traced.results[num_outputs:], strict=False):
            if sizes & set(node.meta["spec"].shape):
                raise refused(f"the model leaves a tensor of all tokens in `{name}`", "It would have padding.")

    # -- what a call is -----------------------------------------------------------------------------------------

    def _target(self, length: int, prefix: str = "") -> int:
        return brought_to(length if prefix else max(length, self._least), self.multiple, self._padding.bounds)

    def _needs(self, call: NamedCall) -> bool:
        targets = [(self._target(tokens.length, prefix), tokens.length) for prefix, tokens in call.tokens.items()]
        return call.has_ends or any(target != length for target, length in targets)

    def _kind(self, call: NamedCall) -> Hashable:
        """Calls of one kind are padded alike, and have the same outputs except for their lengths."""
        arguments = call.arguments
        leaves = tuple(
            (leaf.dim(), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else type(leaf)
            if type(leaf) in (int, float)
            else repr(leaf)
            for leaf in arguments.leaves
        )
        modes = tuple(module.training for module in self._model.modules())
        is_several = max(each.rows for each in call.tokens.values()) > 1
        return arguments.layout, arguments.leaf_names, leaves, modes, is_several, call.mask, call.is_flattened

    # -- the trial ------------------------------------------------------------------------------------------------

    def _tried(self, call: NamedCall) -> PaddingRule:
        """Finds how calls of a kind are padded.

        Raises:
            TraceError: If padding changes what the model makes of real tokens, however it is done.
        """
        small = self._small(call)
        first = ""
        for is_open in self._ways(call):
            found = self._trial(call, small, is_open=is_open, replaces=False)
            again = not isinstance(found, str) and zeros(self._model)
            noticed = self._trial(call, small, is_open=is_open, replaces=True) if again else found
            if not isinstance(noticed, str):
                assert not isinstance(found, str)
                return PaddingRule(is_open, found)
            first = first or noticed
        raise refused(
            f"padding isn't harmless for this model: {first}",
            "Rows are brought to a multiple of so many tokens, and real tokens must not notice.",
        )

    def _trial(self, call: NamedCall, small: NamedCall, *, is_open: bool, replaces: bool) -> list[Axes] | str:
        """Returns how outputs grow with tokens; or what is different with padding."""
        added = list(self._added(call, small))
        padded = [
            # Another token may stand for a part of a picture, of which there are so many.
            self._padding.padded(small, each, is_open=is_open, is_garbage=bool(which) and call.is_known)
            for which, each in enumerate(added)
        ]
        plain = self._run(small.arguments, replaces)
        try:
            outcomes = [self._run(each, replaces) for each in padded]
        except Exception as error:  # the model's own code raises anything where it can't take such a batch
            text = str(error).strip().partition("\n")[0]
            return f"it raises {_article(type(error).__name__)} for a padded batch ({text})"
        axes = grown_axes(plain, outcomes, small.sizes, added)
        if isinstance(axes, str):
            return axes
        for outcome, more, each in zip(outcomes, added, padded, strict=True):
            reason = difference(plain, outcome, axes, small.sizes, more)
            if reason is not None:
                runs = [partial(self._run, arguments, replaces) for arguments in (small.arguments, each)]
                return reason + first_module(self._model, *runs)
        return axes

    def _ways(self, call: NamedCall) -> Sequence[bool]:
        if call.mask == "mask":
            return (False,)
        may_mask = call.mask == "full" or "attention_mask" in positions_of(self._model).names
        return (True, False) if may_mask and not call.is_flattened else (True,)

    def _small(self, call: NamedCall) -> NamedCall:
        """A call with a few of the same tokens, all of them real; the call itself if it has other tensors as well."""
        if not call.is_known:
            return call
        tokens = {
            prefix: Tokens(min(2, each.rows), max(1, min(each.length, _TRIED, self._target(each.length, prefix) // 2)))
            for prefix, each in call.tokens.items()
        }
        return replace(call, arguments=self._padding.few(call, tokens), tokens=tokens)

    def _added(self, call: NamedCall, small: NamedCall) -> Iterator[Mapping[str, int]]:
        """Two paddings, the second of which is as long as may be: what it changes must be seen."""
        room = {p: self._target(each.length, p) - small.tokens[p].length for p, each in call.tokens.items()}
        room = {
            p: count or self._target(call.tokens[p].length + 1, p) - call.tokens[p].length for p, count in room.items()
        }
        most = {prefix: min(room[prefix], each.length + 5) for prefix, each in small.tokens.items()}
        # The tokens that an output grows with are told by their number.
        if len(most) > 1 and len(set(most.values())) == 1:
            most[DECODER] = max(1, most[DECODER] - 1)
        yield {prefix: min(3, count // 2) for prefix, count in most.items()}
        yield most


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
