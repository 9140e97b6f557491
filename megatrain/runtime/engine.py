"""Engine: what all compiled variants of one model share: streams, host store, device arena, templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.dedup import template_key
from megatrain.passes.interpret import Code
from megatrain.passes.program import Program, Template
from megatrain.runtime.arena import DeviceArena, Meter
from megatrain.runtime.block import BlockRunner
from megatrain.runtime.host import BlockImage, HostStore, image
from megatrain.runtime.parks import ParkPool
from megatrain.runtime.streams import Chaos, Recording, StreamSet


class Engine:
    """The mutable half of a compiled model.

    Args:
        tensors: The model's state by key; parameters become views of the host store.
        device: Compute device.
        chaos: Random delays, poisoned slots and injected faults, for tests.
        recording: Log of what was issued and what it waited for, for tests.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
    ):
        self.tensors = dict(tensors)
        self.device = device
        self.chaos = chaos
        self.streams = StreamSet(device, chaos=chaos, recording=recording)
        self.meter = Meter()
        self.arena = DeviceArena(device)
        self.store: HostStore | None = None
        self.parks = ParkPool(device)
        # The call whose forward last used the slots; only its backward may find weights in them.
        self.slots_belong_to: Any = None
        self.is_running = False
        self._runners: dict[Any, BlockRunner] = {}

    def adopt(self, program: Program) -> list[BlockImage]:
        """Brings the state of a program's blocks into the host store and returns each block's image.

        Raises:
            ExecuteError: If a tensor of state is on the wrong device or has no storage (meta).
        """
        self._check_state(program)
        images = [image([(key, program.state[key].spec) for key in block.binding]) for block in program.blocks]
        for key, entry in program.state.items():
            if entry.kind == "constant" and key not in self.tensors:
                raise ExecuteError(f"constant `{key}` of {program.name} is unknown to this engine")
        if self.store is None:
            self.store = HostStore(images, self.tensors, self.device)
        else:
            self.store.extend(images)
        return images

    def _check_state(self, program: Program) -> None:
        for key, entry in program.state.items():
            tensor = self.tensors[key]
            if tensor.device.type == "meta":
                raise ExecuteError(
                    f"{entry.kind} `{key}` is on the meta device and has no values.\n"
                    "  A plan needs no weights, a step does.\n"
                    "  Load them (model.to_empty and load_state_dict) before the first call."
                )
            if tensor.device.type != "cpu":
                raise ExecuteError(
                    f"{entry.kind} `{key}` is on {tensor.device}.\n"
                    "  Parameters live in host memory; the device only borrows them.\n"
                    '  Move the model back with model.to("cpu").'
                )

    def runner(self, template: Template) -> BlockRunner:
        """Returns the runner of a template; variants with equal templates share it."""
        key = template_key(template)
        if key not in self._runners:
            self._runners[key] = BlockRunner(Code(template.graph), self.device, template.is_random)
        return self._runners[key]

    def close(self) -> None:
        """Ends the stream threads; a later call starts them again."""
        self.streams.close()
