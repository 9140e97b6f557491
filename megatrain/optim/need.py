"""What an optimizer will keep and use, found out before it has anything."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from megatrain.checks import Rule
from megatrain.errors import OptionError
from megatrain.optim.fast import FastPath, fast_path
from megatrain.optim.impostor import Optimizer
from megatrain.optim.masters.halves import SplitMaster, WholeMaster
from megatrain.optim.per_parameter import check_per_parameter
from megatrain.optim.stand_ins import Found, Updated, add, bytes_by_name, empty, faked, kind_of, step_on_stand_ins
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class OptimizerNeed:
    """What the host holds for an optimizer, beside parameters and gradients.

    Args:
        state: Bytes by their name in a parameter's state (`exp_avg`), in order of first appearance.
        scratch_bytes: Most bytes that the update of one block makes and drops, and what it copies before.
        is_estimate: The optimizer's code ran on corners of parameters only, for it needs memory behind its tensors.
    """

    state: Mapping[str, int]
    scratch_bytes: int
    is_estimate: bool = False


def optimizer_need(
    optimizer: Optimizer, blocks: Sequence[Sequence[Updated]], *, undoes: bool = False, scales: bool = False
) -> OptimizerNeed:
    """Finds out what the steps of an optimizer take, without allocating it.

    A fast path makes its state on fake tensors of the real shapes. Else the class's own code takes two steps on them,
    once for each kind of block. A number that it reads is one half where no fake tensor can know it. State that exists
    already counts as it is. Code that needs memory behind its tensors steps on small corners of the parameters
    instead; its state is then taken to grow with the parameter.

    Args:
        optimizer: The user's; left as it is.
        blocks: The parameters that each block updates. Those that the optimizer doesn't have are passed over.
        undoes: A block is copied before its update, if that may fail; see `Updates`.
        scales: Gradients are scaled.

    Raises:
        OptimizerError: If it needs all parameters at once, or can't step on stand-ins either.
    """
    check_per_parameter(optimizer, probe=False)
    groups = {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    known: dict[Hashable, Found] = {}

    def found(members: Sequence[Updated], path: FastPath | None = None) -> Found:
        kind = (path, *(kind_of(optimizer, member, groups[member.parameter]) for member in members))
        if kind not in known:
            step = step_on_stand_ins(optimizer, members) if path is None else _state_made(optimizer, members, path)
            known[kind] = step
        return known[kind]

    state: dict[str, int] = {}
    scratch = undo = 0
    for block in blocks:
        paths = {m: _path(optimizer, m, groups[m.parameter]) for m in block if m.parameter in groups}
        by_code = [m for m, path in paths.items() if path is None]
        parts = [found([m], path) for m, path in paths.items() if path is not None]
        parts += [found(by_code)] if by_code else []
        for part in parts:
            add(state, part.state)
        dropped = parts[-1].scratch_bytes + _prepared_bytes(by_code, scales=scales) if by_code else 0
        if undoes and not all(_is_sure(m, path) for m, path in paths.items()):
            copied = sum(m.spec.nbytes for m in paths) + sum(sum(part.state.values()) for part in parts)
            undo = max(undo, copied)
        scratch = max(scratch, dropped)
    seen = {member.parameter for block in blocks for member in block}
    for parameter, held in dict(optimizer.state).items():
        if parameter not in seen:
            add(state, bytes_by_name(held))
    return OptimizerNeed(state, scratch + undo, any(part.is_estimate for part in known.values()))


def _path(optimizer: Optimizer, member: Updated, group: int) -> FastPath | None:
    if not member.is_split and member.spec.dtype != torch.float32:
        return None  # it has no master
    return fast_path(optimizer, optimizer.param_groups[group], is_whole=not member.is_split)


def _is_sure(member: Updated, path: FastPath | None) -> bool:
    kind, gradient = (SplitMaster, torch.bfloat16) if member.is_split else (WholeMaster, member.spec.dtype)
    return path is not None and path.is_sure(kind, gradient)


def _state_made(optimizer: Optimizer, members: Sequence[Updated], path: FastPath) -> Found:
    """What a fast path keeps: the state that exists, or what it makes of a parameter without memory."""
    total: dict[str, int] = {}
    with FakeTensorMode():
        for member in members:
            held = optimizer.state.get(member.parameter)
            state = pytree.tree_map_only(torch.Tensor, faked, held) if held else path.new_state(empty(member.spec))
            add(total, bytes_by_name(state))
    return Found(total)


def _prepared_bytes(members: Sequence[Updated], *, scales: bool) -> int:
    """What the optimizer's own code is given: of halves, values and gradients in fp32; of others scaled gradients."""
    return sum(2 * m.spec.nbytes if m.is_split else m.spec.nbytes * scales for m in members)


def made_over(
    kind: type[Optimizer] | str, specs: Mapping[str, TensorSpec]
) -> tuple[Optimizer, Mapping[str, torch.Tensor]]:
    """Makes an optimizer with its default options over parameters that have no memory.

    Args:
        kind: A class, or the name of one in `torch.optim`.
        specs: The parameters by key.

    Returns:
        The optimizer, and its parameters by key.

    Raises:
        OptionError: If it can't be made so.
    """
    make: Any = _class_of(kind)
    name = make.__name__
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = {key: torch.nn.Parameter(empty(spec)) for key, spec in specs.items()}
        try:
            return make(list(parameters.values())), parameters
        except Exception as error:  # whatever the constructor of a user's class raises
            raise OptionError(
                f"optimizer={name} can't be made over all trained parameters of the model: {error}\n"
                "  A class gets all of them, in one group with its default options.\n"
                "  Give an optimizer over those that it shall have; on meta neither takes memory."
            ) from error


def _class_of(kind: object) -> object:
    return getattr(torch.optim, kind, None) if isinstance(kind, str) else kind


def _fault(value: object) -> str | None:
    kind = _class_of(value)
    is_known = isinstance(kind, Optimizer) or (isinstance(kind, type) and issubclass(kind, Optimizer))
    return None if is_known else "is not known"


OPTIMIZER = Rule(
    "an optimizer over the model's parameters, its class, or the name of a class in torch.optim",
    '{name}="AdamW"',
    _fault,
)
"""What `made_over` takes, and an optimizer itself."""
