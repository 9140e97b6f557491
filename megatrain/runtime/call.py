"""Call: the tensors that one call of the model holds between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.errors import ExecuteError
from megatrain.runtime.arena import Meter
from megatrain.runtime.block import LocalGraph
from megatrain.runtime.parks import Parks
from megatrain.runtime.rng import RngState

OPEN, DONE, FAILED = "open", "done", "failed"


class Call:
    """Values, gradients, retained graphs, parked activations and generator states of one call.

    Every tensor goes in and out through `hold` and `drop`, so that the meter sees what is really on the device.

    Args:
        meter: Counts the bytes held.
        parks: Host memory for this call's parked activations.
    """

    def __init__(self, meter: Meter, parks: Parks):
        self._meter = meter
        self.parks = parks
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.parameter_gradients: dict[int, list[torch.Tensor | None]] = {}
        self.graphs: dict[int, LocalGraph] = {}
        self.slot_of: dict[int, int | None] = {}
        self.parameter_versions: dict[str, int] = {}
        self.rng: dict[int, RngState | None] = {}
        self.outputs: list[torch.Tensor] = []
        self.status = OPEN
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def hold(self, kind: str, name: str | int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Counts tensors as held until `drop` of the same kind and name."""
        self._meter.hold((id(self), kind, name), [t for t in tensors if t is not None])

    def set_value(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps a value on the device."""
        self.values[name] = tensor
        self.hold("value", name, [tensor])

    def set_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Keeps the gradient of a value; replaces the partial sum it continues."""
        self.gradients[name] = gradient
        self.hold("gradient", name, [gradient])

    def drop(self, kind: str, name: str | int) -> None:
        """Lets go of what `hold` counted."""
        if kind == "value":
            self.values.pop(str(name), None)
        elif kind == "gradient":
            self.gradients.pop(str(name), None)
        elif kind == "parameters":
            self.parameter_gradients.pop(int(name), None)
        elif kind == "saved":
            self.graphs.pop(int(name), None)
        self._meter.release((id(self), kind, name))

    def remember_versions(self) -> None:
        """Notes how often each value was written in place, now that the caller gets hold of some of them."""
        self._versions = [(n, t, t._version) for n, t in self.values.items() if not t.is_inference()]

    def check_versions(self) -> None:
        """Checks that nobody wrote into a value between forward and backward.

        Raises:
            ExecuteError: Naming the value. Eager autograd refuses the same with a version counter.
        """
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise ExecuteError(
                    f"value `{name}` was modified in place between forward and backward.\n"
                    "  The backward needs it as the forward left it.\n"
                    "  Clone inputs and outputs before writing into them."
                )
        self._versions = []

    def __del__(self) -> None:
        # The caller dropped the outputs without a backward.
        if self.status == OPEN:
            self.close(DONE)

    def close(self, status: str) -> None:
        """Ends the call and gives all it held back."""
        self.status = status
        kinds = ("value", self.values), ("gradient", self.gradients)
        held = [(kind, name) for kind, names in kinds for name in names]
        held += [("parameters", b) for b in self.parameter_gradients]
        held += [("saved", b) for b in self.graphs]
        for kind, name in held:
            self.drop(kind, name)
        self.rng.clear()
        self._versions = []
        self.parks.give()
