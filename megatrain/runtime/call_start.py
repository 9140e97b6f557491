"""Start: the starting state of a call, enough to run its forward again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.runtime.rng import RngState


class Stamp(NamedTuple):
    """How often a tensor of the model's state was written, to tell later whether it was written again.

    Args:
        tensor: The user's tensor.
        place: Its place in the host store, written when the user replaced the memory or the tensor.
        versions: Version counters of both.
    """

    tensor: torch.Tensor
    place: torch.Tensor
    versions: tuple[int, int]

    @staticmethod
    def of(tensor: torch.Tensor, place: torch.Tensor) -> Stamp:
        """Reads the counters."""
        return Stamp(tensor, place, (version(tensor), version(place)))

    @property
    def is_current(self) -> bool:
        """Whether nobody wrote since."""
        return self.versions == (version(self.tensor), version(self.place))


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The inputs of a call, and the other state that its forward read or changed.

    Args:
        inputs: The caller's tensors, where the capture had them, by the value they enter as.
        versions: Their version counters.
        buffers: Buffers that the forward writes, as they were, on the host, by the value they enter as.
        state: A stamp per tensor of state that some block reads.
        rng: The generators' state; None if nothing is drawn.
    """

    inputs: Mapping[str, torch.Tensor]
    versions: Mapping[str, int]
    buffers: Mapping[str, torch.Tensor]
    state: Mapping[str, Stamp]
    rng: RngState | None

    @staticmethod
    def of(
        program: Program,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        places: Mapping[str, torch.Tensor],
        device: Device,
    ) -> Start:
        """Notes the starting state of a call.

        Args:
            program: The program that it will run.
            inputs: The model's tensor inputs, in order.
            tensors: The model's state by key.
            places: The place of each tensor of the blocks' state in the host store.
            device: The compute device.
        """
        named = {name: tensor.detach() for name, tensor in zip(program.inputs, inputs, strict=True)}
        is_random = any(template.is_random for template in program.templates.values())
        return Start(
            inputs=named,
            versions={name: version(tensor) for name, tensor in named.items()},
            buffers={name: tensors[key].detach().clone() for name, key in program.buffers},
            state={key: Stamp.of(tensors[key], place) for key, place in places.items()},
            rng=RngState.now(device, program.opaque_calls) if is_random else None,
        )

    def check_state(self, keys: Iterable[str]) -> None:
        """Checks that the weights are those of the forward.

        Raises:
            ExecuteError: Naming the tensor that was modified.
        """
        for key in keys:
            if not self.state[key].is_current:
                kind = "parameter" if isinstance(self.state[key].tensor, nn.Parameter) else "buffer"
                raise ExecuteError(
                    f"{kind} `{key}` was modified between forward and backward.\n"
                    "  The backward needs the parameters and buffers that the forward read.\n"
                    "  Call backward first: before optimizer.step(), load_state_dict() or a call that updates buffers."
                )

    def check_inputs(self) -> None:
        """Checks that the inputs haven't changed.

        Raises:
            ExecuteError: Naming the input that was modified.
        """
        for name, tensor in self.inputs.items():
            if version(tensor) != self.versions[name]:
                raise ExecuteError(
                    f"value `{name}` was modified in place between forward and backward.\n"
                    "  A second backward of a call repeats the forward, from the same inputs.\n"
                    "  Clone inputs before writing into them."
                )


def version(tensor: torch.Tensor) -> int:
    """The tensor's version counter; tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
