"""trace(): captures any nn.Module by running its own forward once on fake state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.errors import TraceError
from megatrain.tracer.modules import followed_modules, recorded_functions, repeated_modules
from megatrain.tracer.recorder import MakeFakeError, Recorder, Site
from megatrain.tracer.sandbox import fake_state, kept_rng, scalar_attributes, swapped_state
from megatrain.tracer.source import user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.state import StateEntry, inventory
from megatrain.tracer.structure import Arguments, Structure
from megatrain.tracer.traced import TracedModule
from megatrain.tracer.watch import StrayWatch


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> TracedModule:
    """Captures one call `model(*args, **kwargs)` as a flat graph of torch calls.

    The model's own forward runs once with fake parameters and buffers (nothing is allocated, models on the
    meta device work) and clones of the inputs. The model, its buffers and every random generator are left as
    they were.

    Args:
        model: Any module; its parameters may be real or on the meta device.
        args: Example positional arguments; tensors on `device`, or on meta.
        kwargs: Example keyword arguments, likewise.
        device: Compute device that the graph will run on; default: the device of the first real input, else the CPU.

    Returns:
        The capture, checked.

    Raises:
        TraceError: If the forward can't be captured faithfully. Exceptions of the model's own code pass unchanged.
    """
    arguments = Arguments.of(tuple(args), dict(kwargs or {}))
    target = torch.device(device) if device is not None else _device_of(arguments)
    make_fake: set[Site] = set()
    while True:
        try:
            traced = _Capture(model, arguments, target, make_fake).run()
            break
        except MakeFakeError as error:
            assert error.site not in make_fake
            make_fake.add(error.site)
    traced.check()
    return traced


def _device_of(arguments: Arguments) -> torch.device:
    real = [t.device for t in arguments.tensors if t.device.type != "meta"]
    return real[0] if real else torch.device("cpu")


class _Capture:
    """One run of a model's forward under the recorder."""

    def __init__(self, model: nn.Module, arguments: Arguments, device: torch.device, make_fake: set[Site]):
        self._model = model
        self._arguments = arguments
        self._device = device
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entries, self._tensors = inventory(model)
        self._fakes = fake_state(self._tensors, self._fake_mode, device)
        self._by_id = {id(t): self._fakes[key] for key, t in self._tensors.items()}
        self._recorder = Recorder(self._fake_mode, self._by_id, make_fake)

    def run(self) -> TracedModule:
        inputs = self._bind_inputs()
        for key, fake in self._fakes.items():
            self._recorder.bind_state(fake, key)
        args, kwargs = self._arguments.rebuild(inputs)
        scalars = scalar_attributes(self._model)
        with kept_rng() as moved, swapped_state(self._model, self._by_id):
            result = self._run_forward(args, kwargs)
            rebound = self._rebound_buffers()
            changed = {k: v for k, v in scalar_attributes(self._model).items() if scalars.get(k, v) != v}
        self._refuse_host_state(moved, changed)
        outputs = Structure.of(result)
        nodes = tuple(self._recorder.node_of(t) for t in outputs.placeholders)
        self._recorder.graph.output(nodes)
        return self._finish(outputs, rebound)

    def _bind_inputs(self) -> list[torch.Tensor]:
        copies: list[torch.Tensor] = []
        for name, tensor in zip(self._arguments.names, self._arguments.tensors, strict=True):
            node = self._recorder.graph.placeholder(name)
            copies.append(self._copy_input(tensor))
            self._recorder.bind_input(copies[-1], node)
        return copies

    def _copy_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta" and not tensor.requires_grad:
            return tensor.detach().clone(memory_format=torch.preserve_format)
        with self._fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return fake.requires_grad_(tensor.requires_grad)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        with ExitStack() as stack:
            stack.enter_context(StrayWatch(lambda: recorder.is_recording, self._refuse_stray))
            stack.enter_context(followed_modules(recorder, self._model))
            stack.enter_context(recorded_functions(recorder))
            stack.enter_context(recorder)
            return self._model(*args, **kwargs)

    def _refuse_stray(self, func: Any, args: Any) -> None:
        raise TraceError(
            f"the operation `{func}` ran at {user_line()} outside any torch function.\n"
            "  A capture records torch functions; what TorchScript, C++ extensions or numpy compute would become a "
            "constant.\n  Call the operation through torch.ops or a torch.library.custom_op."
        )

    def _refuse_host_state(self, moved: list[str], changed: dict[str, Any]) -> None:
        if moved:
            raise TraceError(
                f"the model draws from Python's `{moved[0]}` generator in its forward.\n"
                "  A capture would freeze the number drawn.\n  Draw with torch instead, on a tensor."
            )
        if changed:
            name, value = next(iter(changed.items()))
            raise TraceError(
                f"the forward changes the Python attribute `{name}` (now {value!r}).\n"
                "  A capture would freeze it at its first value.\n  Keep counters in a buffer."
            )

    def _rebound_buffers(self) -> dict[str, torch.Tensor]:
        """Finds buffers that the forward re-assigned (`self.ema = ...`) rather than wrote in place."""
        known = {id(fake): key for key, fake in self._fakes.items()}
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for name, tensor in module._buffers.items():
                key = f"{prefix}.{name}" if prefix else name
                if tensor is not None and id(tensor) not in known and key in self._entries:
                    found[key] = tensor
        return found

    def _finish(self, outputs: Structure, rebound: dict[str, torch.Tensor]) -> TracedModule:
        recorder = self._recorder
        entries = dict(self._entries)
        for key, tensor in recorder.constants.items():
            entries[key] = StateEntry(key, "constant", TensorSpec.of(tensor), False, persistent=False)
        read = {n.target: n for n in recorder.graph.nodes if n.op == "get_attr"}
        return TracedModule(
            name=type(self._model).__name__,
            graph=recorder.graph,
            arguments=self._arguments,
            outputs=outputs,
            state={k: e for k, e in entries.items() if k in read},
            constants=dict(recorder.constants),
            writes_back=(*self._written_state(read), *((k, recorder.node_of(t)) for k, t in rebound.items())),
            guards=tuple(recorder.guards),
            block_modules=repeated_modules(self._model),
            device=self._device,
        )

    def _written_state(self, read: dict[Any, fx.Node]) -> list[tuple[str, fx.Node]]:
        """Lists state that the forward wrote in place, with the node that stands for it (its memory, afterwards)."""
        written = {w for node in self._recorder.graph.nodes for w in node.meta.get("writes", ())}
        return [(str(key), node) for key, node in read.items() if node in written]
