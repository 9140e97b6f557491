"""Padding: which arguments of a call have tokens, by name, what each is where there is padding, and the way back.

The names are those of Hugging Face's models. What isn't understood is refused: an argument with a value for each token
that nobody pads would be read beside others' tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_private import pytree
from megatrain.errors import TraceError
from megatrain.tracer.arguments import Arguments

Sizes = Mapping[str, tuple[int, int]]
"""Rows and tokens of a row, by the prefix of the axis of tokens."""
Axes = tuple[tuple[int, str, bool], ...]
"""Dimensions of an output that grow with tokens, the prefix of these, and whether all rows stand one after another."""
IGNORED = -100
"""The label of a position that no loss counts."""
DECODER = "decoder_"
_SEQUENCES = ("input_ids", "inputs_embeds")
_PER_TOKEN = (
    *_SEQUENCES, "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "labels", "shift_labels",
    "seq_idx",
)  # fmt: skip
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_FROM_THE_END = ("logits_to_keep", "num_logits_to_keep")
_BOUNDS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings", "max_target_positions")


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
class NamedCall:
    """A call, read by the names of its arguments.

    Args:
        arguments: As they were given.
        tokens: The axes of tokens, by prefix; a model of sounds or pictures has only that of its decoder.
        labelled: The prefix of the axis that labels have.
        mask: `"none"`; `"full"` for a single row without masked positions; else `"mask"`, as where no mask is added.
        is_flattened: Rows hold several documents, whose positions start over.
        is_known: Every tensor with a dimension has a name that is understood.
        has_ends: It has the ends of documents, of which there are as many as a padded call has.
    """

    arguments: Arguments
    tokens: Mapping[str, Tokens]
    labelled: str
    mask: str
    is_flattened: bool = False
    is_known: bool = True
    has_ends: bool = False

    @property
    def sizes(self) -> Sizes:
        """Rows and tokens of each axis."""
        return {prefix: (tokens.rows, tokens.length) for prefix, tokens in self.tokens.items()}

    def place(self, name: str, leaf: Any) -> tuple[str, str] | None:
        """Splits a name of something that has a value for each token: the prefix of its axis, and the plain name."""
        prefix = DECODER if name.startswith(DECODER) and DECODER in self.tokens else ""
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


def bounds_of(config: Any) -> list[int]:
    """Numbers of positions from which on a model may compute otherwise, or has no embedding; ascending.

    Args:
        config: The model's; None for one that has none.
    """
    values = [getattr(config, name, None) for name in _BOUNDS]
    values += [each.get(name) for each in _dicts(config) for name in _BOUNDS]
    return sorted({value for value in values if isinstance(value, int) and value > 0})


def _dicts(config: Any) -> Iterator[dict[str, Any]]:
    """What a configuration says of rotary embeddings: of all layers, or by their kind."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            given: dict[str, Any] = found
            yield given
            yield from (each for each in given.values() if isinstance(each, dict))


def brought_to(length: int, multiple: int, bounds: Sequence[int]) -> int:
    """The length to which rows of a length are brought: the next multiple, or a bound of the model's before that."""
    found = -(-length // multiple) * multiple
    return next((bound for bound in bounds if length <= bound < found), found)


def refused(what: str, rule: str) -> TraceError:
    """The error that says why a call can't be padded, the rule, and the way out."""
    return TraceError(
        f"lengths= can't be used: {what}.\n  {rule}\n"
        "  Leave lengths= out: then each shape of a batch is captured by itself. docs/trainers.md has more ways."
    )


class Padding:
    """Reads and pads the calls of one model.

    Args:
        model: The user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._unknown: dict[str, bool] = {}  # names of tensors that aren't understood, and whether they have tokens

    @cached_property
    def _whole_config(self) -> Any:
        """The configuration of the model; None if it has none."""
        found = (vars(module).get("config") for module in self._model.modules())
        return next((config for config in found if config is not None), None)

    @cached_property
    def _config(self) -> Any:
        """That of the text which the model reads."""
        config = self._whole_config
        text = getattr(config, "get_text_config", None)
        return text() if callable(text) and not getattr(config, "is_encoder_decoder", False) else config

    @property
    def bounds(self) -> list[int]:
        """Those of the model; see `bounds_of`."""
        return bounds_of(self._config)

    def _pad_id(self) -> int | None:
        ids = [getattr(config, "pad_token_id", None) for config in (self._config, self._whole_config)]
        return next((found for found in ids if isinstance(found, int) and found >= 0), None)

    def read(self, arguments: Arguments) -> NamedCall:
        """Reads a call by the names of its arguments.

        Raises:
            TraceError: If it has no tokens, or an argument that can't be padded or isn't understood.
        """
        leaves = dict(zip(arguments.leaf_names, arguments.leaves, strict=True))
        has_decoder = bool(getattr(self._config, "is_encoder_decoder", False))
        tokens = dict[str, Tokens]()
        for prefix in ("", DECODER) if has_decoder else ("",):
            found = [leaves.get(prefix + name) for name in _SEQUENCES]
            if prefix:
                found.append(leaves.get("labels"))
            for tensor in found:
                if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                    tokens.setdefault(prefix, Tokens(tensor.shape[0], tensor.shape[1]))
        if not tokens:
            raise refused(
                f"the call has no argument with tokens: it has {', '.join(leaves) or 'none'}",
                "Tokens are `input_ids` [rows, tokens] or `inputs_embeds` [rows, tokens, width], by name.",
            )
        labelled = DECODER if has_decoder else ""
        if "" in tokens:
            self._check_rope(tokens[""].length)
        call = NamedCall(arguments, tokens, labelled, self._mask(leaves, tokens) if "" in tokens else "mask")
        is_known = all([self._understood(call, name, leaf) for name, leaf in leaves.items()])
        has_ends = any(leaves.get(name) is not None for name in _ENDS)
        return replace(call, is_flattened=_is_flattened(call, leaves), is_known=is_known, has_ends=has_ends)

    def _check_rope(self, length: int) -> None:
        """Refuses rotary embeddings that depend on how many positions there are, where they do."""
        ropes = [each for each in _dicts(self._config) if "dynamic" in (each.get("rope_type"), each.get("type"))]
        most = getattr(self._config, "max_position_embeddings", None)
        if ropes and isinstance(most, int) and length > most:
            raise refused(
                f'a row has {length} tokens, and rope_type="dynamic" depends on this number from {most} on',
                "Padding would be counted.",
            )

    def _mask(self, leaves: Mapping[str, Any], tokens: Mapping[str, Tokens]) -> str:
        """See `NamedCall.mask`; a single row is looked at, because in most models it then needs no mask."""
        mask = leaves.get("attention_mask")
        if mask is None:
            return "none"
        rows, length = tokens[""].rows, tokens[""].length
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (rows, length):
            shape = f"has the shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask)}"
            raise refused(
                f"`attention_mask` {shape}, and the tokens [{rows}, {length}]",
                "A mask says which tokens of each row there are. What pairs of tokens see isn't padded.",
            )
        return "full" if rows == 1 and bool(mask.all()) else "mask"

    def _understood(self, call: NamedCall, name: str, leaf: Any) -> bool:
        """Whether the name of an argument says how it is padded, or that it has no tokens.

        Raises:
            TraceError: If it can't be padded, or the argument seems to have tokens and has another name.
        """
        is_all = leaf is None or (isinstance(leaf, int) and leaf == 0)
        if name in _FROM_THE_END and not is_all:
            raise refused(f"`{name}` counts positions from the right end", "Padding stands at that end.")
        if name.endswith("past_key_values") and leaf is not None:
            raise refused(f"the call has a cache, `{name}`", "A cache has tokens of its own, which aren't padded.")
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
            raise refused(
                f"`{name}` {list(leaf.shape)} may have a value for each token, and its name isn't known",
                f"These are padded: {', '.join(_PER_TOKEN)}.",
            )
        return False

    def _check_shape(self, call: NamedCall, name: str, leaf: torch.Tensor, prefix: str, plain: str) -> None:
        rows, length = call.tokens[prefix].rows, call.tokens[prefix].length
        is_right = leaf.dim() >= 2 and (
            leaf.shape[-1] == length and leaf.shape[-2] in (1, rows)
            if plain == "position_ids"
            else leaf.shape[1] == length and leaf.shape[0] == rows and leaf.dim() == 2 + (plain == "inputs_embeds")
        )
        if not is_right:
            raise refused(
                f"`{name}` has the shape {list(leaf.shape)}, and the tokens [{rows}, {length}]",
                "It has a value for each token of each row.",
            )

    # -- padding ------------------------------------------------------------------------------------------------

    def padded(
        self, call: NamedCall, added: Mapping[str, int], *, is_open: bool, is_garbage: bool = False
    ) -> Arguments:
        """Returns a call with so many tokens more on each axis.

        Args:
            call: As it is.
            added: By prefix.
            is_open: Padding isn't masked.
            is_garbage: The padding has other tokens than usual, if no number stands for padding by name.
        """
        given = call.arguments
        leaves = [
            self._leaf(call, name, leaf, added, is_open=is_open, is_garbage=is_garbage)
            for name, leaf in zip(given.leaf_names, given.leaves, strict=True)
        ]
        more = dict[str, Any]()
        if not is_open and call.mask == "none":
            rows, length = call.tokens[""].rows, call.tokens[""].length
            some = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2)
            mask = _filled(torch.ones(rows, length, dtype=torch.long, device=some.device), 1, added[""], 0)
            if "attention_mask" in given.leaf_names:  # None
                leaves[given.leaf_names.index("attention_mask")] = mask
            else:
                more["attention_mask"] = mask
        args, kwargs = pytree.tree_unflatten(leaves, given.tree)
        return Arguments.of(self._model, args, {**kwargs, **more})

    def few(self, call: NamedCall, tokens: Mapping[str, Tokens]) -> Arguments:
        """Returns a call with the first rows and tokens of a call, all of them real."""
        given = call.arguments
        leaves = [_few(call, name, leaf, tokens) for name, leaf in zip(given.leaf_names, given.leaves, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, given.tree)
        return Arguments.of(self._model, args, kwargs)

    def _leaf(
        self, call: NamedCall, name: str, leaf: Any, added: Mapping[str, int], *, is_open: bool, is_garbage: bool
    ) -> Any:
        total = call.tokens[""].length + added[""] if "" in call.tokens else 0
        if name in _ENDS and isinstance(leaf, torch.Tensor):
            return _ends(leaf, total)
        if name in _LONGEST and leaf is not None:
            return torch.full_like(leaf, total) if isinstance(leaf, torch.Tensor) else total
        place = call.place(name, leaf)
        if place is None or not isinstance(leaf, torch.Tensor):
            return leaf
        return self._longer(call, leaf, *place, added[place[0]], is_open, is_garbage)

    def _longer(
        self, call: NamedCall, leaf: torch.Tensor, prefix: str, plain: str, count: int, is_open: bool, is_garbage: bool
    ) -> torch.Tensor:
        """Adds to a tensor with a value for each token what it has for padding."""
        is_open = is_open and not prefix
        if plain == "position_ids":
            return self._positions(call, leaf, count, is_open=is_open)
        if plain == "seq_idx":
            return torch.cat([leaf, leaf[:, -1:].expand(-1, count) + 1], 1)
        if plain == "inputs_embeds" and is_garbage:
            return torch.cat([leaf, -2 * leaf[:, :1].expand(-1, count, -1)], 1)
        pad_id = self._pad_id()
        values = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": int(is_open)}
        if plain == "input_ids":
            values[plain] = pad_id if pad_id is not None else int(leaf.max()) if is_garbage else 0
        return _filled(leaf, 1, count, values.get(plain, 0))

    def _positions(self, call: NamedCall, leaf: torch.Tensor, count: int, *, is_open: bool) -> torch.Tensor:
        ascending = torch.arange(count, dtype=leaf.dtype, device=leaf.device)
        if call.is_flattened:
            more = ascending % min(self.bounds, default=max(1, count))
        else:
            more = leaf[..., -1:] + 1 + ascending if is_open else torch.zeros_like(ascending)
        return torch.cat([leaf, more.expand(*leaf.shape[:-1], count)], -1)


def _is_flattened(call: NamedCall, leaves: Mapping[str, Any]) -> bool:
    positions = leaves.get("position_ids")
    if call.mask != "none" or DECODER in call.tokens:
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


def _ends(ends: torch.Tensor, total: int) -> torch.Tensor:
    """Ends of documents with that of the padding, in as many entries as a batch of so many tokens has.

    How many there are must not depend on the batch: one for 64 tokens, or twice as often where that isn't enough. An
    entry that repeats the one before it is a document without tokens.
    """
    entries = total // 64 + 2
    while entries < len(ends) + 1:
        entries *= 2
    return torch.cat([ends, ends.new_full((entries - len(ends),), total)])


def _few(call: NamedCall, name: str, leaf: Any, tokens: Mapping[str, Tokens]) -> Any:
    """An argument of a trial: of two documents, if rows have several."""
    rows, length = (first := next(iter(tokens.values()))).rows, first.length
    half = length // 2
    if name in _ENDS and isinstance(leaf, torch.Tensor):
        return leaf.new_tensor(sorted({0, half, length}))
    if name in _LONGEST and leaf is not None:
        return torch.full_like(leaf, length - half) if isinstance(leaf, torch.Tensor) else length - half
    place = call.place(name, leaf)
    if place is None or not isinstance(leaf, torch.Tensor):
        return leaf[:rows] if name == "labels" and isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
    prefix, plain = place
    rows, length = tokens[prefix].rows, tokens[prefix].length
    found = leaf[..., :rows, :length] if plain == "position_ids" else leaf[:rows, :length]
    ascending = torch.arange(length, dtype=leaf.dtype, device=leaf.device)
    if plain == "attention_mask":
        found = torch.ones_like(found)
    elif plain in ("labels", "shift_labels"):
        found = found.clamp(min=0)
    elif plain == "seq_idx":
        found = (ascending >= half).to(leaf.dtype).expand_as(found).contiguous()
    elif plain == "position_ids" and call.is_flattened:
        found = torch.where(ascending < half, ascending, ascending - half).expand_as(found).contiguous()
    return found


# -- the way back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Padded:
    """The arguments of a padded call, and the way back.

    Args:
        arguments: With padding.
        added: Tokens that were added to each axis, by prefix; none if nothing is to be cut.
        sizes: Of the caller's batch.
        axes: Of each output, as in `PaddingRule`; None if nobody has tried, because the model has no values.
    """

    arguments: Arguments
    added: Mapping[str, int]
    sizes: Sizes = field(default_factory=dict[str, tuple[int, int]])
    axes: Sequence[Axes] | None = None

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cuts the tensors of a result to the caller's lengths; gradients of what is cut off are zeros.

        Args:
            tensors: As the capture returns them: those of the result come first.

        Raises:
            TraceError: If nobody has tried how outputs grow.
        """
        if not any(self.added.values()):
            return list(tensors)
        if self.axes is None:
            raise TraceError(
                "nobody has tried lengths= on this model: its parameters have no values.\n"
                "  Outputs are cut to the caller's length as a trial has shown.\n"
                "  Give the parameters values, or leave lengths= out."
            )
        found = [cut(t, axes, self.sizes, self.added) for t, axes in zip(tensors, self.axes, strict=False)]
        return [*found, *tensors[len(found) :]]


def cut(tensor: torch.Tensor, axes: Axes, sizes: Sizes, added: Mapping[str, int]) -> torch.Tensor:
    """Cuts an output to its length without padding.

    Args:
        tensor: With padding.
        axes: Of the output.
        sizes: Without padding.
        added: How much longer rows are, by prefix.
    """
    found = tensor
    for dim, prefix, is_flat in axes:
        (rows, length), more = sizes[prefix], added[prefix]
        if more and is_flat:
            found = found.unflatten(dim, (rows, length + more)).narrow(dim + 1, 0, length).flatten(dim, dim + 1)
        elif more:
            found = found.narrow(dim, 0, found.shape[dim] - more)
    # As eager's: a loss may call `view`.
    return found if found is tensor or not tensor.is_contiguous() else found.contiguous()
