"""TrainedModel: the state of a model and the optimizers that update it, as a step has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatrain.optim.masters.halves import Master, RoundedMaster, SplitMaster, WholeMaster
from megatrain.optim.masters.narrow_model import narrow_entries
from megatrain.optim.masters.registry import Kind
from megatrain.optim.need import OptimizerLike, OptimizerNeed, Updated, joint_need, over
from megatrain.tracer.inventory import StateEntry, inventory

_MASTER_OF: Mapping[str, type[Master]] = {"whole": WholeMaster, "exact": SplitMaster, "rounded": RoundedMaster}


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """The state of a model and the optimizers that update it, as a step has them.

    Args:
        entries: The model's state by key, in the dtypes in which a step has it.
        tensors: The same, as it is; it may be on meta.
        is_narrow: fp32 parameters are bf16 in a step.
        master: Of bf16 parameters that are trained.
        optimizers: In the order of their steps; none without an optimizer.
        parameters: By key, what the optimizers hold: the model's tensors, or others without memory.
    """

    entries: Mapping[str, StateEntry]
    tensors: Mapping[str, torch.Tensor]
    is_narrow: bool
    master: type[Master]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @staticmethod
    def of(model: nn.Module, masters: Kind = "whole", optimizer: OptimizerLike | None = None) -> TrainedModel:
        """Takes a model apart.

        Args:
            model: Its parameters may be on meta.
            masters: The kind of masters of bf16 parameters; `"whole"` where a step computes in fp32.
            optimizer: The user's, or several; or a class, or its name in `torch.optim`, over tensors without memory.

        Raises:
            OptionError: If packed parameters can't become bf16, or the class can't be made over all that is trained.
            OptimizerError: If two optimizers hold the same parameter.
        """
        own, tensors = inventory(model)
        entries = own if masters == "whole" else narrow_entries(own)
        optimizers, parameters = ((), {}) if optimizer is None else over(optimizer, entries, tensors)
        return TrainedModel(entries, tensors, entries != own, _MASTER_OF[masters], optimizers, parameters)

    @property
    def trained(self) -> dict[str, StateEntry]:
        """The parameters that are trained."""
        return {key: e for key, e in self.entries.items() if e.is_trained}

    def has_master(self, key: str) -> bool:
        """Whether it is a bf16 parameter that is trained, and has a master of more bits or other rounding."""
        entry = self.entries[key]
        return self.master is not WholeMaster and entry.is_trained and entry.spec.dtype == torch.bfloat16

    @property
    def low_bytes(self) -> dict[str, int]:
        """The bytes of low halves, by key."""
        keys = self.entries if self.master is SplitMaster else ()
        return {key: 2 * self.entries[key].spec.numel for key in keys if self.has_master(key)}

    def need(self, blocks: Sequence[Sequence[str]], *, undoes: bool, scales: bool) -> OptimizerNeed:
        """The memory that the optimizers take; see `joint_need`.

        Args:
            blocks: The keys of what each update writes. What an earlier one writes isn't written again.
            undoes: A block is copied before its update, if that may fail.
            scales: Gradients are scaled.

        Raises:
            OptimizerError: If an optimizer's `step` needs a closure.
        """
        seen: set[str] = set()
        found: list[list[Updated]] = []
        for keys in blocks:
            found.append([self._updated(key) for key in keys if key not in seen])
            seen.update(keys)
        return joint_need(self.optimizers, found, undoes=undoes, scales=scales)

    def _updated(self, key: str) -> Updated:
        spec, has_master = self.entries[key].spec, self.has_master(key)
        wide = replace(spec, dtype=torch.float32) if has_master else spec
        return Updated(self.parameters[key], wide, self.master if has_master else WholeMaster)
