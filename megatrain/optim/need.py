"""The state and temporary memory of an optimizer, found out before it has any."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.checks import Rule
from megatrain.base.checks.several_optimizers import Optimizers, check_apart, optimizers_of, several_fault
from megatrain.base.torch_features import check_torch
from megatrain.base.torch_private import FakeTensorMode, forbid_memory, pytree
from megatrain.device import HOST
from megatrain.errors import OptionError
from megatrain.optim.fast import FastPath, fast_path
from megatrain.optim.fast.adamw_8bit import AdamW8bit
from megatrain.optim.masters.halves import Master, RoundedMaster, WholeMaster
from megatrain.optim.per_parameter import check_steps, is_per_parameter
from megatrain.optim.proxy import (
    Optimizer,
    WithoutValues,
    empty,
    faked,
    over_stand_ins,
    own_copy,
    step_code,
    unnoticed,
)
from megatrain.passes.kernels import LiveBytes
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.packing import plain_tensors
from megatrain.tracer.recording.obstacles import unprinted_failures
from megatrain.tracer.spec import TensorSpec


def made_over(
    kind: type[Optimizer] | str, specs: Mapping[str, TensorSpec]
) -> tuple[Optimizer, Mapping[str, torch.Tensor]]:
    """Makes an optimizer with its default options over parameters that have no memory.

    Args:
        kind: A class, or one of `names`.
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
        except Exception as error:  # the constructor of a user's class may raise anything
            raise OptionError(
                f"optimizer={name} can't be made over all trained parameters of the model: {error}\n"
                "  plan calls the class with all trained parameters, in one group with default options.\n"
                "  Give an optimizer over the parameters that you want to train; on meta it takes no memory."
            ) from error


def over(
    optimizer: OptimizerLike, entries: Mapping[str, StateEntry], tensors: Mapping[str, torch.Tensor]
) -> tuple[Sequence[torch.optim.Optimizer], Mapping[str, torch.Tensor]]:
    """Returns optimizers and their parameters by key: the user's, or one over tensors without memory."""
    if isinstance(optimizer, str | type):
        specs = {key: e.spec for key, e in entries.items() if e.is_trained}
        made, parameters = made_over(optimizer, specs)
        return [made], parameters
    optimizers = optimizers_of(optimizer)
    check_apart(optimizers, tensors.items())
    return optimizers, tensors


def names() -> dict[str, type[Optimizer]]:
    """The optimizers that a name may stand for: those of `torch.optim`, and ours."""
    found = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    theirs = {name: kind for name, kind in found.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    return theirs | {AdamW8bit.__name__: AdamW8bit}


def _class_of(kind: object) -> object:
    return names().get(kind) if isinstance(kind, str) else kind


def _nearest(value: object) -> str | None:
    """The name that is like a misspelt one."""
    by_small = {name.lower(): name for name in names()}
    found = difflib.get_close_matches(value.lower(), by_small, 1) if isinstance(value, str) else []
    return f'{{name}}="{by_small[found[0]]}"' if found else None


def _fault(value: object) -> str | None:
    if isinstance(value, list | tuple):
        return several_fault(value)
    kind = _class_of(value)
    is_known = isinstance(kind, Optimizer) or (isinstance(kind, type) and issubclass(kind, Optimizer))
    return None if is_known else "is not known"


OPTIMIZER = Rule(
    "an optimizer over the model's parameters, a list of several, a class, or the name of one: AdamW8bit, or of "
    "torch.optim",
    '{name}="AdamW"',
    _fault,
    _nearest,
)
"""What `made_over` takes, and optimizers themselves."""
OptimizerLike = Optimizers | type[torch.optim.Optimizer] | str
"""An optimizer or several, or a class of optimizers, or the class's name in `torch.optim`."""
_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """A parameter as its update sees it.

    Args:
        parameter: The object in the optimizer's groups.
        spec: Of the values that are updated, and of the gradient: fp32 where the parameter is bf16 and has a master.
        master: What kind of master it has; `WholeMaster` where its own values are updated.
    """

    parameter: torch.Tensor
    spec: TensorSpec
    master: type[Master] = WholeMaster

    @property
    def is_narrow(self) -> bool:
        """Whether it is bf16 and has a master."""
        return self.master is not WholeMaster

    @property
    def written_bytes(self) -> int:
        """Bytes that its update writes, state aside: a rounded master is the bf16 parameter and nothing more."""
        return self.spec.nbytes // 2 if self.master is RoundedMaster else self.spec.nbytes


@dataclass(frozen=True, slots=True)
class OptimizerNeed:
    """The host memory of an optimizer, or of the update of some parameters, besides parameters and gradients.

    Args:
        state: Bytes by their name in a parameter's state (`exp_avg`), in order of first appearance.
        scratch_bytes: The largest temporary memory of one block's update, with the copies made before it.
        undo_bytes: Of these the copies; their memory stays from block to block.
        is_estimate: The optimizer's code wasn't run, or failed on tensors without memory.
        at_once: The class whose code has all parameters at once, as it isn't known to be per parameter.
    """

    state: Mapping[str, int]
    scratch_bytes: int
    undo_bytes: int = 0
    is_estimate: bool = False
    at_once: str | None = None


def optimizer_need(
    optimizer: Optimizer, blocks: Sequence[Sequence[Updated]], *, undoes: bool = False, scales: bool = False
) -> OptimizerNeed:
    """Finds out the memory that the steps of an optimizer take, without allocating it.

    A fast path makes its state on fake tensors of the real shapes. Else the class's own code takes two steps on them,
    once for each kind of block. A number that it reads is one half where no fake tensor can know it. State that exists
    already counts as it is. Of code that fails there, for it needs its tensors' memory, and of code that isn't
    known to be per parameter, which isn't run, new state is taken to be that of AdamW.

    Args:
        optimizer: The user's; left as it is.
        blocks: The parameters that each block updates. Those that the optimizer doesn't have are passed over.
        undoes: A block is copied before its update, if that may fail; see `Updates`.
        scales: Gradients are scaled.

    Raises:
        OptimizerError: If its `step` can't be called without arguments.
    """
    check_steps(optimizer)
    groups = {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    known: dict[Hashable, OptimizerNeed] = {}

    def found(members: Sequence[Updated], path: FastPath | None = None) -> OptimizerNeed:
        kind = (path, *(_kind_of(optimizer, member, groups[member.parameter]) for member in members))
        if kind not in known:
            step = _step_on_stand_ins(optimizer, members) if path is None else _state_made(optimizer, members, path)
            known[kind] = step
        return known[kind]

    state: dict[str, int] = {}
    scratch = undo = 0
    is_at_once = not is_per_parameter(optimizer)
    if is_at_once:
        members = [member for block in blocks for member in block if member.parameter in groups]
        state = dict(_guessed(optimizer, members))
        # The code gets copies of all gradients, and of halves the values.
        scratch = _prepared_bytes(members, scales=True) + 2 * max((m.spec.nbytes for m in members), default=0)
        undo = sum(member.written_bytes for member in members) + sum(state.values()) if undoes else 0
    for block in () if is_at_once else blocks:
        paths = {m: _path(optimizer, m, groups[m.parameter]) for m in block if m.parameter in groups}
        by_code = [m for m, path in paths.items() if path is None]
        parts = [found([m], path) for m, path in paths.items() if path is not None]
        parts += [found(by_code)] if by_code else []
        for part in parts:
            _add(state, part.state)
        dropped = parts[-1].scratch_bytes + _prepared_bytes(by_code, scales=scales) if by_code else 0
        if undoes and not all(_is_sure(m, path) for m, path in paths.items()):
            copied = sum(m.written_bytes for m in paths) + sum(sum(part.state.values()) for part in parts)
            undo = max(undo, copied)
        scratch = max(scratch, dropped)
    seen = {member.parameter for block in blocks for member in block}
    for parameter, held in dict(optimizer.state).items():
        if parameter not in seen:
            _add(state, _bytes_by_name(held))
    is_estimate = is_at_once or any(part.is_estimate for part in known.values())
    return OptimizerNeed(state, scratch + undo, undo, is_estimate, type(optimizer).__name__ if is_at_once else None)


def _guessed(optimizer: Optimizer, members: Sequence[Updated]) -> Mapping[str, int]:
    """State of code that isn't run: what exists, and of other parameters that of AdamW."""
    state: dict[str, int] = {}
    for member in members:
        held = optimizer.state.get(member.parameter)
        _add(state, _bytes_by_name(held) if held else {"state": 2 * member.spec.nbytes})
    return state


def joint_need(
    optimizers: Sequence[Optimizer], blocks: Sequence[Sequence[Updated]], *, undoes: bool = False, scales: bool = False
) -> OptimizerNeed:
    """Finds out the memory that optimizers take whose updates follow each other; see `optimizer_need`.

    Returns:
        The state of all by class and name (`AdamW.exp_avg`), and of the rest the largest.
    """
    needs = [optimizer_need(each, blocks, undoes=undoes, scales=scales) for each in optimizers]
    state: dict[str, int] = {}
    for optimizer, need in zip(optimizers, needs, strict=True):
        _add(state, {f"{type(optimizer).__name__}.{name}": nbytes for name, nbytes in need.state.items()})
    undo = max(need.undo_bytes for need in needs)
    scratch = undo + max(need.scratch_bytes - need.undo_bytes for need in needs)
    at_once = next((need.at_once for need in needs if need.at_once is not None), None)
    return OptimizerNeed(state, scratch, undo, any(need.is_estimate for need in needs), at_once)


def _path(optimizer: Optimizer, member: Updated, group: int) -> FastPath | None:
    if not member.is_narrow and member.spec.dtype != torch.float32:
        return None  # it has no master
    return fast_path(optimizer, optimizer.param_groups[group], is_whole=not member.is_narrow)


def _is_sure(member: Updated, path: FastPath | None) -> bool:
    gradient = torch.bfloat16 if member.is_narrow else member.spec.dtype
    return path is not None and path.is_sure(member.master, gradient)


def _state_made(optimizer: Optimizer, members: Sequence[Updated], path: FastPath) -> OptimizerNeed:
    """The state of a fast path: existing state, or new state of a parameter without memory."""
    total: dict[str, int] = {}
    with FakeTensorMode():
        for member in members:
            held = optimizer.state.get(member.parameter)
            state = pytree.tree_map_only(torch.Tensor, faked, held) if held else path.new_state(empty(member.spec))
            _add(total, _bytes_by_name(state))
    return OptimizerNeed(total, 0)


def _prepared_bytes(members: Sequence[Updated], *, scales: bool) -> int:
    """What the optimizer's own code is given: of halves, values and gradients in fp32; of others scaled gradients."""
    return sum(2 * m.spec.nbytes if m.is_narrow else m.spec.nbytes * scales for m in members)


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds bytes to those of the same name."""
    for name, nbytes in more.items():
        total[name] = total.get(name, 0) + nbytes


def _kind_of(optimizer: Optimizer, member: Updated, group: int) -> Hashable:
    """Returns a key that is equal for parameters whose updates take the same memory."""
    held = pytree.tree_map_only(torch.Tensor, TensorSpec.of, optimizer.state.get(member.parameter, {}))
    return group, member.spec, member.master, str(held)


def _step_on_stand_ins(optimizer: Optimizer, members: Sequence[Updated]) -> OptimizerNeed:
    """Takes two steps on tensors without memory."""
    check_torch()
    with unnoticed():
        try:
            with unprinted_failures():
                return _on_fakes(optimizer, members)
        except Exception:  # the optimizer's code may raise anything on tensors without memory
            scratch = 2 * max(member.spec.nbytes for member in members)
            return OptimizerNeed(_guessed(optimizer, members), scratch, is_estimate=True)


def _on_fakes(optimizer: Optimizer, members: Sequence[Updated]) -> OptimizerNeed:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        with mode:
            return faked(value) if isinstance(value, torch.Tensor) else own_copy(value)

    with mode:
        stand_ins = {member.parameter: _stand_in(empty(member.spec), member) for member in members}
        for member in members:
            stand_ins[member.parameter].grad = empty(member.spec)
    runner = over_stand_ins(optimizer, stand_ins, of_state=fake, of_option=fake)
    gradients = [p.grad for p in stand_ins.values() if p.grad is not None]
    states = {index: runner.state.get(p) for index, p in enumerate(stand_ins.values())}
    given = [*stand_ins.values(), *gradients, *_tensors(states)]
    for tensor in given:
        forbid_memory(tensor)
    with mode, WithoutValues(), LiveBytes(given, HOST.torch_device) as live:
        for _ in range(_STEPS):
            step_code(type(optimizer))(runner)
    total: dict[str, int] = {}
    for stand_in in stand_ins.values():
        _add(total, _bytes_by_name(runner.state.get(stand_in, {})))
    return OptimizerNeed(total, max(0, live.peak - live.current))


def _stand_in(values: torch.Tensor, member: Updated) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=member.parameter.requires_grad)


def _tensors(value: Mapping[Any, Any]) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(dict(value)) if isinstance(leaf, torch.Tensor)]
    return [tensor for leaf in leaves for tensor in plain_tensors(leaf)]


def _bytes_by_name(state: Any) -> dict[str, int]:
    """Returns the bytes of a parameter's state, each memory once, under the first of its names."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
        for tensor in _tensors({name: value}):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[str(name)] = found.get(str(name), 0) + storage.nbytes()
    return found
