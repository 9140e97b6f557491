"""The step of a torch optimizer over masters: by a fast path where there is one, or by its own code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from megatrain.errors import OptimizerError
from megatrain.optim.fast import FastPath, ParameterUpdate, fast_path
from megatrain.optim.masters.halves import (
    Master,
    WholeMaster,
    in_memory,
    laid_out_like,
    memory_order,
    out_of_memory_order,
    read_,
    write_,
)
from megatrain.optim.masters.registry import Masters
from megatrain.optim.per_parameter import is_per_parameter
from megatrain.optim.prepared import AsItWas, FastGroups, PreparedBlock, form_of
from megatrain.optim.proxy import Optimizer, StepCode, step_code

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


class MasterStep:
    """Updates the masters of the parameters in an optimizer's groups: `code` of a `BlockOptimizer`.

    Where a `FastPath` matches (AdamW has one), it updates one master after the other. For any other
    optimizer the halves of one call are joined to fp32, its own code updates them, and they are split again: that
    takes eight bytes per element of a block, and has the bits of that code over fp32 parameters. State is fp32 either
    way, and is in `optimizer.state`.

    Note that torch's `load_state_dict` converts state to the dtype of its parameter: load fp32 moments in another way.

    Attributes:
        scale: Factor of every gradient, such as the coefficient of clipping; set it before the updates of a step.

    Args:
        masters: By parameter, whose memory is that of the master (of the high half, if it has halves), in the order
            of that memory. Parameters without one are updated by the optimizer's own code, and so are whole ones
            that the fast path leaves to it.
        gradient_of: Returns a parameter's gradient, of its shape; None is `.grad`.
        threads: Of a native kernel.
        scaled: The parameters whose gradients `scale` concerns; None is all.
    """

    def __init__(
        self,
        masters: Mapping[torch.Tensor, Master],
        *,
        gradient_of: GradientOf | None = None,
        threads: int | None = None,
        scaled: Container[torch.Tensor] | None = None,
    ):
        self.scale = 1.0
        self._scaled = scaled
        self._masters = masters
        self._gradient_of: GradientOf = gradient_of or _grad
        self._threads = threads

    def __call__(self, optimizer: Optimizer) -> None:
        """Updates all parameters in the optimizer's groups that have a gradient."""
        # Code that may do anything may look at all parameters, so none is taken from it.
        fast = list(self._fast(optimizer)) if is_per_parameter(optimizer) else []
        # All work that can fail comes before the first write.
        with torch.no_grad():
            self._in_one_pass(_prepared(optimizer, fast), optimizer.state)
        _without(optimizer, [item.parameter for item in fast], self._by_its_own_code)

    def cannot_fail(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
        """Tells whether the update of these parameters, once it writes, is sure to reach its end."""
        asked = set(parameters)
        sure = {
            item.parameter
            for item in self._fast(optimizer, asked)
            if item.path.is_sure(type(item.master), item.gradient.dtype)
        }
        return all(p in sure or self._gradient_of(p) is None for p in asked)

    def _fast(self, optimizer: Optimizer, among: Set[torch.Tensor] | None = None) -> Iterator[_Fast]:
        """The parameters that have a gradient, a master and a fast path; all, or those among a few of a model."""
        # By identity: to hash each parameter of the model for each block takes longer than the update of a small block.
        chosen = None if among is None else {id(parameter) for parameter in among}
        for group in optimizer.param_groups:
            known: dict[bool, tuple[FastPath, Any] | None] = {}
            for parameter in group["params"]:
                if chosen is not None and id(parameter) not in chosen:
                    continue
                master, gradient = self._masters.get(parameter), self._gradient_of(parameter)
                if master is None or gradient is None:
                    continue
                is_whole = isinstance(master, WholeMaster)
                if is_whole not in known:
                    path = fast_path(optimizer, group, is_whole=is_whole)
                    known[is_whole] = None if path is None else (path, path.options(group))
                if (found := known[is_whole]) is not None:
                    yield _Fast(parameter, master, gradient, *found)

    def _in_one_pass(self, items: Sequence[_Fast], states: Mapping[torch.Tensor, Any]) -> None:
        try:
            for parameter, master, gradient, path, options in items:
                given = self._given(parameter, master, gradient, path, options, states[parameter])
                path.update(given)
        finally:
            for item in items:
                self._wrote(item.parameter)

    def _given(
        self,
        parameter: torch.Tensor,
        master: Master,
        gradient: torch.Tensor,
        path: FastPath,
        options: Any,
        state: Mapping[str, Any],
    ) -> ParameterUpdate:
        order = memory_order(parameter)
        moments = tuple(in_memory(state[name], order) for name in path.moments)
        numbers = tuple(state[name] for name in path.numbers)
        return ParameterUpdate(master, gradient, moments, numbers, options, self._scale_of(parameter), self._threads)

    def prepare(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        groups: FastGroups,
        states: Mapping[torch.Tensor, Any],
    ) -> PreparedBlock | None:
        """Prepares the next update of parameters that have just been updated; None if their update can't be."""
        masters = self._masters
        if not isinstance(masters, Masters):
            return None
        found: list[AsItWas | None] = []
        given: list[ParameterUpdate] = []
        paths: list[FastPath] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                found.append(None)
                continue
            master, stamp = masters.get(parameter), masters.stamps([parameter])
            if master is None or stamp is None or parameter.is_inference():
                return None
            is_whole = isinstance(master, WholeMaster)
            fast, flat = groups.of(parameter, is_whole=is_whole), in_memory(gradient, memory_order(parameter))
            is_plain = gradient.layout == torch.strided and gradient.shape == parameter.shape
            if fast is None or not is_plain or not flat.is_contiguous():
                return None
            path, options = fast
            state = states[parameter]
            given.append(self._given(parameter, master, flat, path, options, state))
            paths.append(path)
            group = groups.members.group_of[id(parameter)]
            assert group is not None, "it has a fast path"
            held = [state[name] for name in (*path.numbers, *path.moments)]
            refs, addresses = [weakref.ref(each) for each in held], [each.data_ptr() for each in held]
            found.append(AsItWas((group, is_whole), self._is_scaled(parameter), refs, addresses, form_of(gradient)))
        if not given or any(path is not paths[0] for path in paths):
            return None
        update = paths[0].prepare(given)
        if update is None:
            return None
        return PreparedBlock(paths[0], masters, parameters, found, groups.members, update)

    def run(
        self,
        prepared: PreparedBlock,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        groups: FastGroups,
        states: Mapping[torch.Tensor, Any],
    ) -> bool:
        """Runs a prepared update, unless something isn't as it was; see `PreparedBlock.run`."""
        return prepared.run(parameters, gradients, groups, states, self.scale)

    def _scale_of(self, parameter: torch.Tensor) -> float:
        return self.scale if self._is_scaled(parameter) else 1.0

    def _is_scaled(self, parameter: torch.Tensor) -> bool:
        return self._scaled is None or parameter in self._scaled

    def _by_its_own_code(self, optimizer: Optimizer) -> None:
        taken: list[_Taken] = []
        # Code that may do anything may keep gradients, which lie where the next step's will; and read parameters that
        # have none, of which the values are the masters'.
        may_keep = not is_per_parameter(optimizer)
        try:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                gradient, master = self._gradient_of(parameter), self._masters.get(parameter)
                narrow = None if isinstance(master, WholeMaster) else master
                if gradient is None and not (may_keep and narrow is not None):
                    continue
                if narrow is not None:
                    _check_state(optimizer, parameter)
                elif may_keep and gradient is not None:
                    gradient = gradient.clone()
                taken.append(_Taken(parameter, parameter.data, parameter.grad, narrow))
                self._prepare(taken[-1], gradient)
            step_code(type(optimizer))(optimizer)
            for item in taken:
                if item.master is not None:
                    write_(item.master, in_memory(item.parameter.detach(), memory_order(item.home)))
        finally:
            for item in taken:
                item.parameter.grad = None
                item.parameter.data = item.home
                item.parameter.grad = item.gradient
                if item.master is not None:
                    self._wrote(item.parameter)

    def _prepare(self, item: _Taken, gradient: torch.Tensor | None) -> None:
        """Gives a parameter its gradient, both fp32 if it has halves, for the time of the optimizer's own code."""
        item.parameter.grad = None
        scale = self._scale_of(item.parameter)
        if item.master is not None:
            values = read_(torch.empty(item.master.shape), item.master)
            item.parameter.data = out_of_memory_order(values, memory_order(item.home))
            if gradient is not None:
                item.parameter.grad = gradient.to(torch.float32, copy=True).mul_(scale)
        elif gradient is not None:
            # Not in place: after a failure the same gradient comes once more.
            item.parameter.grad = gradient if scale == 1.0 else gradient * scale

    def _wrote(self, parameter: torch.Tensor) -> None:
        """Counts up the parameter's version; its masters know that this write was an update."""
        try:
            increment_version(parameter)
        except RuntimeError:
            if not parameter.is_inference():  # which has none; asked only here, as torch lets other threads run for it
                raise
        if isinstance(self._masters, Masters):
            self._masters.wrote(parameter)


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """A parameter during an optimizer's own code, with the memory and the gradient to restore afterwards."""

    parameter: torch.Tensor
    home: torch.Tensor
    gradient: torch.Tensor | None
    master: Master | None


class _Fast(NamedTuple):
    """A parameter for a fast path, and its gradient: in its own layout, and in the master's once it is prepared."""

    parameter: torch.Tensor
    master: Master
    gradient: torch.Tensor
    path: FastPath
    options: Any


def _prepared(optimizer: Optimizer, fast: Sequence[_Fast]) -> list[_Fast]:
    """Brings gradients and state into the form that fast paths need; if that fails, no new state is left.

    Raises:
        OptimizerError: If a gradient or state isn't one of its parameter.
    """
    new = [item.parameter for item in fast if not optimizer.state.get(item.parameter)]
    try:
        return [_prepare(item, optimizer.state[item.parameter]) for item in fast]
    except BaseException:
        for parameter in new:
            optimizer.state.pop(parameter, None)
        raise


def _prepare(item: _Fast, state: dict[str, Any]) -> _Fast:
    parameter, path = item.parameter, item.path
    if not state:
        state.update(path.new_state(parameter))
    check_names(parameter, path, state)
    for name, tensor in {"gradient": item.gradient, **{name: state[name] for name in path.moments}}.items():
        if tensor.shape != parameter.shape or tensor.layout != torch.strided:
            raise OptimizerError(
                f"`{name}` of a {tuple(parameter.shape)} parameter is {tuple(tensor.shape)}, {tensor.layout}.\n"
                "  An update takes dense tensors of the parameter's shape.\n"
                "  Check hooks on gradients, and values that were put into optimizer.state."
            )
    for name in path.moments:  # loaded state may have another layout
        state[name] = laid_out_like(state[name], parameter)
    flat = in_memory(item.gradient, memory_order(parameter)).contiguous()
    return item._replace(gradient=flat)


def check_names(parameter: torch.Tensor, path: FastPath, state: Mapping[str, Any]) -> None:
    """Refuses state without one of a fast path's names, and moments of another dtype: usually they are fp32."""
    missing = [name for name in (*path.numbers, *path.moments) if not isinstance(state.get(name), torch.Tensor)]
    if missing:
        raise OptimizerError(
            f"the state of a {tuple(parameter.shape)} parameter has no tensor `{missing[0]}`.\n"
            f"  {type(path).__name__} needs this tensor.\n"
            "  Put it into optimizer.state, or clear the parameter's state to begin anew."
        )
    dtypes = {name: path.dtypes.get(name, torch.float32) for name in path.moments}
    others = [name for name, dtype in dtypes.items() if state[name].dtype != dtype]
    if others:
        wanted = str(dtypes[others[0]]).removeprefix("torch.").replace("float32", "fp32")
        raise OptimizerError(
            f"the moments of a {tuple(parameter.shape)} parameter are {state[others[0]].dtype}.\n"
            f"  Over masters, moments must stay {wanted}; load_state_dict converts state to the parameter's dtype.\n"
            f"  Put the {wanted} tensors into optimizer.state after loading."
        )


def _check_state(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Refuses state in the parameter's dtype instead of its master's: sums would lose their last bits.

    Raises:
        OptimizerError: Naming the state.
    """
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            raise OptimizerError(
                f"the state `{name}` of a {tuple(parameter.shape)} parameter is {value.dtype}, its master is fp32.\n"
                "  Over bf16 parameters with masters, an optimizer's state has the same dtypes as over fp32 "
                "parameters.\n"
                '  Make the optimizer before compile(precision="bf16"). If load_state_dict converted the state to the '
                "parameter's\n  dtype, put the fp32 tensors into optimizer.state after loading."
            )


def _grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _without(optimizer: Optimizer, done: list[torch.Tensor], code: StepCode) -> None:
    """Runs code on the optimizer without the finished parameters; everything else in the groups stays."""
    if not done:
        code(optimizer)
        return
    left = set(done)
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if p not in left]
        if any(group["params"] for group in groups):
            code(optimizer)
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
