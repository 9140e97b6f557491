"""Lengths: calls are brought to the next multiple of so many tokens, so that batches of any length share few captures.

Padding stands at the right end: masked positions and ignored labels, or, in a flattened batch, one more document. What
is padded, and how, goes by the names of arguments, which are those of Hugging Face's models. That the model's real
tokens don't notice the padding is tried (`length_trial.py`) before a kind of call is padded for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatrain.compiled.length_trial import Axes, Outcome, Sizes, cut, difference, first_module, grown_axes, zeros
from megatrain.errors import TraceError
from megatrain.torch_private import pytree
from megatrain.tracer.arguments import Arguments, positions_of
from megatrain.tracer.traced import TracedModule

IGNORED = -100
"""The label of a position that no loss counts."""
_DECODER = "decoder_"
_SEQUENCES = ("input_ids", "inputs_embeds")
_PER_TOKEN = (
    *_SEQUENCES, "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "labels", "shift_labels",
    "seq_idx",
)  # fmt: skip
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_FROM_THE_END = ("logits_to_keep", "num_logits_to_keep")
_BOUNDS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")
_TRIED = 32
"""Tokens of a row in a trial, at most."""


def _mask_of(names: Mapping[str, Any], prefix: str) -> torch.Tensor | None:
    return names.get(f"{prefix}attention_mask")


@dataclass(frozen=True, slots=True)
class Tokens:
    """One axis of tokens: the model's, or with the prefix `decoder_` that of a decoder.

    Args:
        rows: Of the batch.
        length: Of each row.
    """

    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, read by the names of its arguments.

    Args:
        arguments: As they were given.
        tokens: The axes of tokens, by prefix.
        labelled: The prefix of the axis that labels have.
        mask: `"none"`; `"full"` for a single row without masked positions; else `"mask"`.
        is_flattened: Rows hold several documents, whose positions start over.
        is_known: Every tensor with a dimension has a name that is understood.
    """

    arguments: Arguments
    tokens: Mapping[str, Tokens]
    labelled: str
    mask: str
    is_flattened: bool
    is_known: bool

    @property
    def sizes(self) -> Sizes:
        """Rows and tokens of each axis."""
        return {prefix: (tokens.rows, tokens.length) for prefix, tokens in self.tokens.items()}

    def place(self, name: str, leaf: Any) -> tuple[str, str] | None:
        """Splits a name of something that has a value for each token: the prefix of its axis, and the plain name."""
        prefix = _DECODER if name.startswith(_DECODER) and _DECODER in self.tokens else ""
        plain = name.removeprefix(prefix)
        if plain in ("labels", "shift_labels"):
            prefix = self.labelled
        if plain not in _PER_TOKEN or prefix not in self.tokens or not isinstance(leaf, torch.Tensor):
            return None
        rows, length = self.tokens[prefix].rows, self.tokens[prefix].length
        if plain in ("labels", "shift_labels"):  # else of a whole sequence, or numbers to come near to
            is_of_tokens = tuple(leaf.shape) == (rows, length) and not leaf.is_floating_point()
            return (prefix, plain) if is_of_tokens else None
        return prefix, plain


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of one kind are padded.

    Args:
        is_open: Padding isn't masked: no real token sees what comes after it.
        axes: Of each output, which of its dimensions grow with which tokens.
    """

    is_open: bool
    axes: Sequence[Axes]


@dataclass(frozen=True, slots=True)
class Padded:
    """The arguments of a padded call, and the way back.

    Args:
        arguments: With padding.
        added: Tokens that were added to each axis, by prefix; none if nothing is to be cut.
        sizes: Of the caller's batch.
        axes: As in `Rule`.
    """

    arguments: Arguments
    added: Mapping[str, int]
    sizes: Sizes = field(default_factory=dict[str, tuple[int, int]])
    axes: Sequence[Axes] = ()

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cuts the tensors of a result to the caller's lengths; gradients of what is cut off are zeros.

        Args:
            tensors: As the capture returns them: those of the result come first.

        Raises:
            TraceError: If the result has other tensors than in the trial.
        """
        if not any(self.added.values()) or not self.axes:
            return list(tensors)
        if len(tensors) < len(self.axes):
            raise TraceError(
                f"the model returned {len(self.axes)} tensors when lengths= was tried, and {len(tensors)} now.\n"
                "  Outputs are cut to the caller's length as the trial has shown.\n"
                "  Return the same outputs for each batch, or leave lengths= out."
            )
        found = [cut(t, axes, self.sizes, self.added) for t, axes in zip(tensors, self.axes, strict=False)]
        return [*found, *tensors[len(found) :]]


def bounds_of(config: Any) -> list[int]:
    """Numbers of positions from which on a model may compute otherwise, or has no embedding; ascending.

    Args:
        config: The model's; None for one that has none.
    """
    found: set[int] = set()
    for each in (config, *(getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))):
        values = [each.get(name) if isinstance(each, dict) else getattr(each, name, None) for name in _BOUNDS]  # pyright: ignore
        found.update(value for value in values if isinstance(value, int) and value > 0)
    return sorted(found)


def brought_to(length: int, multiple: int, bounds: Sequence[int]) -> int:
    """The length to which rows of a length are brought: the next multiple, or a bound of the model's before that."""
    found = -(-length // multiple) * multiple
    return next((bound for bound in bounds if length <= bound < found), found)


class Lengths:
    """Pads the calls of one model.

    Args:
        model: The user's.
        multiple: Of how many tokens a row has so many.
        run: Runs the model's own code, without gradients, and leaves no trace; with other numbers in place of parameters
            of zeros, if the second argument says so.
    """

    def __init__(self, model: nn.Module, multiple: int, run: Callable[[Arguments, bool], Outcome]) -> None:
        self.multiple = multiple
        self._model = model
        self._run = run
        self._rules: dict[Hashable, Rule] = {}
        self._unknown: dict[str, bool] = {}  # names of tensors that aren't understood, and whether they have tokens
        self._least = 0

    # -- the calls of users -----------------------------------------------------------------------------------

    def learn(self, arguments: Arguments) -> None:
        """Tries padding for a kind of call, if this is the first of the kind that needs some.

        Raises:
            TraceError: If the model notices padding, or an argument isn't understood.
        """
        call = self._read(arguments)
        if self._needs(call) and self._kind(call) not in self._rules:
            if any(p.is_meta for p in nn.Module.parameters(self._model)):
                return  # there is nothing to try, and nothing will run
            self._rules[self._kind(call)] = self._tried(call)

    def padded(self, arguments: Arguments) -> Padded:
        """Pads a call; before `learn` as if nobody could see the padding, and its outputs can't be cut.

        Raises:
            TraceError: If an argument isn't understood.
        """
        call = self._read(arguments)
        if not self._needs(call):
            return Padded(arguments, {})
        rule = self._rules.get(self._kind(call)) or Rule(call.mask != "mask", ())
        added = {prefix: self._target(each.length, prefix) - each.length for prefix, each in call.tokens.items()}
        return Padded(self._with_padding(call, added, is_open=rule.is_open), added, call.sizes, rule.axes)

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
        return self._read(arguments).is_flattened

    def check(self, traced: TracedModule, padded: Padded) -> None:
        """Looks whether a capture of padded arguments leaves tensors elsewhere than in its result.

        Raises:
            TraceError: If it writes into an argument, or leaves a tensor with the tokens of the call in an attribute.
        """
        if not any(padded.added.values()):
            return
        if traced.written_inputs.indices:
            name = traced.written_inputs.names[0]
            raise _refused(f"the model writes into `{name}`", "It would write into a copy with padding.")
        sizes = {length + padded.added[prefix] for prefix, (_, length) in padded.sizes.items()}
        count = len(traced.outputs.placeholders)
        for name, node in zip(traced.side_outputs.names, traced.results[count:], strict=False):
            if sizes & set(node.meta["spec"].shape):
                raise _refused(f"the model leaves a tensor of all tokens in `{name}`", "It would have padding.")

    # -- what a call is -----------------------------------------------------------------------------------------

    @property
    def _config(self) -> Any:
        """The configuration of the text that the model reads; None for a model that has none."""
        for module in self._model.modules():
            config = vars(module).get("config")
            if config is not None:
                text = getattr(config, "get_text_config", None)
                return text() if callable(text) and not getattr(config, "is_encoder_decoder", False) else config
        return None

    def _bounds(self) -> list[int]:
        return bounds_of(self._config)

    def _target(self, length: int, prefix: str = "") -> int:
        return brought_to(length if prefix else max(length, self._least), self.multiple, self._bounds())

    def _pad_id(self) -> int | None:
        found = getattr(self._config, "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else None

    def _needs(self, call: _Call) -> bool:
        names = call.arguments.leaf_names
        return any(name in _ENDS for name in names) or any(
            self._target(tokens.length, prefix) != tokens.length for prefix, tokens in call.tokens.items()
        )

    def _read(self, arguments: Arguments) -> _Call:
        leaves = dict(zip(arguments.leaf_names, arguments.leaves, strict=True))
        has_decoder = bool(getattr(self._config, "is_encoder_decoder", False))
        tokens = dict[str, Tokens]()
        for prefix in ("", _DECODER) if has_decoder else ("",):
            found = [leaves.get(prefix + name) for name in _SEQUENCES]
            if prefix:
                found.append(leaves.get("labels"))
            for tensor in found:
                if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                    tokens.setdefault(prefix, Tokens(tensor.shape[0], tensor.shape[1]))
        if "" not in tokens:
            raise _refused(
                f"the call has no argument with tokens: it has {', '.join(leaves) or 'none'}",
                "Tokens are `input_ids` [rows, tokens] or `inputs_embeds` [rows, tokens, width], by name.",
            )
        labelled = _DECODER if has_decoder else ""
        call = _Call(arguments, tokens, labelled, self._mask(leaves, tokens), False, True)
        is_known = all([self._understood(call, name, leaf) for name, leaf in leaves.items()])
        return _Call(arguments, tokens, labelled, call.mask, _is_flattened(call, leaves), is_known)

    def _mask(self, leaves: Mapping[str, Any], tokens: Mapping[str, Tokens]) -> str:
        mask = _mask_of(leaves, "")
        if mask is None:
            return "none"
        rows, length = tokens[""].rows, tokens[""].length
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (rows, length):
            shape = f"has the shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask)}"
            raise _refused(
                f"`attention_mask` {shape}, and the tokens [{rows}, {length}]",
                "A mask says which tokens of each row there are. What pairs of tokens see isn't padded.",
            )
        return "full" if rows == 1 and bool(mask.all()) else "mask"

    def _understood(self, call: _Call, name: str, leaf: Any) -> bool:
        """Whether the name of an argument says how it is padded, or that it has no tokens.

        Raises:
            TraceError: If it can't be padded, or the argument seems to have tokens and has another name.
        """
        if name in _FROM_THE_END and not (isinstance(leaf, int) and leaf == 0):
            if leaf is not None:
                raise _refused(f"`{name}` counts positions from the right end", "Padding stands at that end.")
        if name.endswith("past_key_values") and leaf is not None:
            raise _refused(f"the call has a cache, `{name}`", "A cache has tokens of its own, which aren't padded.")
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 1:
            return True
        place = call.place(name, leaf)
        if place is not None:
            self._check_shape(call, name, leaf, *place)
            return True
        if name in _ENDS or leaf.dim() == 0 or (name == "labels" and leaf.dim() == 1):
            return True
        sizes = {tokens.length for tokens in call.tokens.values()}
        has_tokens = self._unknown.setdefault(name, any(size in sizes for size in leaf.shape[min(1, leaf.dim() - 1) :]))
        if has_tokens:
            raise _refused(
                f"`{name}` {list(leaf.shape)} may have a value for each token, and its name isn't known",
                f"These are padded: {', '.join(_PER_TOKEN)}.",
            )
        return False

    def _check_shape(self, call: _Call, name: str, leaf: torch.Tensor, prefix: str, plain: str) -> None:
        rows, length = call.tokens[prefix].rows, call.tokens[prefix].length
        is_right = leaf.dim() >= 2 and (
            leaf.shape[-1] == length and leaf.shape[-2] in (1, rows)
            if plain == "position_ids"
            else leaf.shape[1] == length and leaf.shape[0] == rows and leaf.dim() == 2 + (plain == "inputs_embeds")
        )
        if not is_right:
            raise _refused(
                f"`{name}` has the shape {list(leaf.shape)}, and the tokens [{rows}, {length}]",
                "It has a value for each token of each row.",
            )

    def _kind(self, call: _Call) -> Hashable:
        """Calls of one kind are padded alike, and have the same outputs but for their lengths."""
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
        is_several = call.tokens[""].rows > 1
        return arguments.layout, arguments.leaf_names, leaves, modes, is_several, call.mask, call.is_flattened

    # -- padding ------------------------------------------------------------------------------------------------

    def _with_padding(
        self, call: _Call, added: Mapping[str, int], *, is_open: bool, is_garbage: bool = False
    ) -> Arguments:
        """Returns a call with so many tokens more on each axis.

        Args:
            call: As it is.
            added: By prefix.
            is_open: See `Rule`.
            is_garbage: The padding has other tokens than usual, if no number stands for padding by name.
        """
        given = call.arguments
        leaves = [
            self._leaf(call, name, leaf, added, is_open=is_open, is_garbage=is_garbage)
            for name, leaf in zip(given.leaf_names, given.leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, given.tree)
        if not is_open and call.mask == "none":
            rows, length = call.tokens[""].rows, call.tokens[""].length
            some = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2)
            mask = torch.ones(rows, length, dtype=torch.long, device=some.device)
            kwargs = {**kwargs, "attention_mask": _filled(mask, 1, added[""], 0)}
        return Arguments.of(self._model, args, kwargs)

    def _leaf(
        self, call: _Call, name: str, leaf: Any, added: Mapping[str, int], *, is_open: bool, is_garbage: bool
    ) -> Any:
        if name in _ENDS and isinstance(leaf, torch.Tensor):
            return _ends(leaf, call.tokens[""].length, added[""])
        if name in _LONGEST and leaf is not None:
            longest = call.tokens[""].length + added[""]
            return torch.full_like(leaf, longest) if isinstance(leaf, torch.Tensor) else longest
        place = call.place(name, leaf)
        if place is None:
            return leaf
        prefix, plain = place
        count = added[prefix]
        match plain:
            case "input_ids":
                pad_id = self._pad_id()
                own = int(leaf.max()) if is_garbage and pad_id is None else 0
                return _filled(leaf, 1, count, own if pad_id is None else pad_id)
            case "inputs_embeds":
                filled = _filled(leaf, 1, count, 0)
                return filled - 2 * _filled(leaf - leaf, 1, count, 1) * filled[:, :1] if is_garbage else filled
            case "labels" | "shift_labels":
                return _filled(leaf, 1, count, IGNORED)
            case "attention_mask":
                return _filled(leaf, 1, count, int(is_open and not prefix))
            case "position_ids":
                return self._positions(call, leaf, count, is_open=is_open and not prefix)
            case "seq_idx":
                return torch.cat([leaf, leaf[:, -1:].expand(-1, count) + 1], 1)
            case _:
                return _filled(leaf, 1, count, 0)

    def _positions(self, call: _Call, leaf: torch.Tensor, count: int, *, is_open: bool) -> torch.Tensor:
        ascending = torch.arange(count, dtype=leaf.dtype, device=leaf.device)
        if call.is_flattened:
            more = ascending % min(self._bounds(), default=max(1, count))
        else:
            more = leaf[..., -1:] + 1 + ascending if is_open else torch.zeros_like(ascending)
        return torch.cat([leaf, more.expand(*leaf.shape[:-1], count)], -1)

    # -- the trial ------------------------------------------------------------------------------------------------

    def _tried(self, call: _Call) -> Rule:
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
                return Rule(is_open, found)
            first = first or noticed
        raise _refused(
            f"padding isn't harmless for this model: {first}",
            "Rows are brought to a multiple of so many tokens, and real tokens must not notice.",
        )

    def _trial(self, call: _Call, small: _Call, *, is_open: bool, replaces: bool) -> list[Axes] | str:
        """Returns how outputs grow with tokens; or what is different with padding."""
        added = list(self._added(call, small))
        padded = [
            self._with_padding(small, each, is_open=is_open, is_garbage=bool(which)) for which, each in enumerate(added)
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
                own, run = small.arguments, self._run
                return reason + first_module(self._model, lambda: run(own, replaces), lambda: run(each, replaces))  # noqa: B023  # called here
        return axes

    def _ways(self, call: _Call) -> Sequence[bool]:
        if call.mask == "mask":
            return (False,)
        may_mask = call.mask == "full" or "attention_mask" in positions_of(self._model).names
        return (True, False) if may_mask and not call.is_flattened else (True,)

    def _small(self, call: _Call) -> _Call:
        """A call with a few of the same tokens, all of them real; the call itself if it has other tensors as well."""
        if not call.is_known:
            return call
        tokens = {
            prefix: Tokens(min(2, each.rows), max(1, min(each.length, _TRIED, self._target(each.length, prefix) // 2)))
            for prefix, each in call.tokens.items()
        }
        given = call.arguments
        leaves = [_few(call, n, leaf, tokens) for n, leaf in zip(given.leaf_names, given.leaves, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, given.tree)
        arguments = Arguments.of(self._model, args, kwargs)
        return _Call(arguments, tokens, call.labelled, call.mask, call.is_flattened, True)

    def _added(self, call: _Call, small: _Call) -> Iterator[Mapping[str, int]]:
        """Two paddings, the second of which is as long as may be: what it changes must be seen."""
        room = {p: self._target(each.length, p) - small.tokens[p].length for p, each in call.tokens.items()}
        most = {prefix: min(room[prefix], each.length + 5) for prefix, each in small.tokens.items()}
        # The tokens that an output grows with are told by their number.
        if len(most) > 1 and len(set(most.values())) == 1:
            most[_DECODER] = max(1, most[_DECODER] - 1)
        yield {prefix: min(3, count // 2) for prefix, count in most.items()}
        yield most


def _refused(what: str, rule: str) -> TraceError:
    return TraceError(
        f"lengths= can't be used: {what}.\n  {rule}\n"
        "  Leave lengths= out, and let your collator pad (pad_to_multiple_of=); docs/trainers.md has more."
    )


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _is_flattened(call: _Call, leaves: Mapping[str, Any]) -> bool:
    positions = leaves.get("position_ids")
    if call.mask != "none" or _DECODER in call.tokens:
        return False
    if any(leaves.get(name) is not None for name in (*_ENDS, "seq_idx")):
        return True
    if not isinstance(positions, torch.Tensor):
        return False
    return call.tokens[""].rows == 1 or bool((positions[..., 1:] <= positions[..., :-1]).any())


def _filled(tensor: torch.Tensor, dim: int, count: int, value: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = count
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _ends(ends: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Ends of documents with that of the padding, in as many entries as a batch of the padded length has.

    How many there are must not depend on the batch: one for 64 tokens, or twice as often where that isn't enough. An
    entry that repeats the one before it is a document without tokens.
    """
    total = length + count
    entries = total // 64 + 2
    while entries < len(ends) + 1:
        entries *= 2
    return torch.cat([ends, ends.new_full((entries - len(ends),), total)])


def _few(call: _Call, name: str, leaf: Any, tokens: Mapping[str, Tokens]) -> Any:
    """An argument of a trial."""
    rows, length = tokens[""].rows, tokens[""].length
    half = length // 2
    if name in _ENDS and isinstance(leaf, torch.Tensor):
        return leaf.new_tensor(sorted({0, half, length}))
    if name in _LONGEST and leaf is not None:
        return torch.full_like(leaf, length - half) if isinstance(leaf, torch.Tensor) else length - half
    place = call.place(name, leaf)
    if place is None:
        return leaf[:rows] if name == "labels" and isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
    prefix, plain = place
    rows, length = tokens[prefix].rows, tokens[prefix].length
    if plain == "position_ids":
        few = leaf[..., :rows, :length]
        ascending = torch.arange(length, dtype=leaf.dtype, device=leaf.device)
        restarted = torch.where(ascending < half, ascending, ascending - half)
        return restarted.expand_as(few).contiguous() if call.is_flattened else few
    few = leaf[:rows, :length]
    match plain:
        case "attention_mask":
            return torch.ones_like(few)
        case "labels" | "shift_labels":
            return few.clamp(min=0)
        case "seq_idx":
            return (torch.arange(length, device=leaf.device) >= half).to(leaf.dtype).expand_as(few).contiguous()
        case _:
            return few
