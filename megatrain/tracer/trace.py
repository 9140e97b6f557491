"""trace(): captures any nn.Module by running its own forward once on fake state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.errors import TraceError
from megatrain.tracer.modules import followed_modules, recorded_functions, repeated_modules
from megatrain.tracer.recorder import Recorder
from megatrain.tracer.restart import MakeFakeError, Site
from megatrain.tracer.sandbox import Attributes, fake_state, kept_rng, swapped_state
from megatrain.tracer.source import user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.state import StateEntry, inventory
from megatrain.tracer.structure import Arguments, Structure, holds_tensors
from megatrain.tracer.targets import call_text
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
        device: Compute device of the graph; default: that of the first real input, else the CPU.

    Returns:
        The capture, checked.

    Raises:
        TraceError: If the forward can't be captured faithfully. The model's own exceptions pass unchanged.
    """
    arguments = Arguments.of(tuple(args), dict(kwargs or {}))
    _refuse_hidden_inputs(arguments)
    target = torch.device(device) if device is not None else _device_of(arguments)
    make_fake: set[Site] = set()
    while True:
        try:
            traced = _Capture(model, arguments, target, make_fake).run()
            break
        except MakeFakeError as error:
            is_known = error.site in make_fake
            assert not is_known, "a call that was made fake gave real tensors"
            make_fake.add(error.site)
    traced.check()
    return traced


# Values of these types never change, and equal ones make equal captures.
_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, frozenset, type,
)  # fmt: skip


def _refuse_hidden_inputs(arguments: Arguments) -> None:
    for name, leaf in zip(arguments.leaf_names, arguments.leaves, strict=True):
        if isinstance(leaf, (torch.Tensor, Enum, *_IMMUTABLE)):
            continue
        if holds_tensors(leaf):
            raise TraceError(
                f"the argument `{name}` is a {type(leaf).__qualname__} with tensors in it.\n"
                "  Inputs are found in tuples, lists, dicts and classes known to torch.utils._pytree.\n"
                "  Pass the tensors themselves, or register the class."
            )
        raise TraceError(
            f"the argument `{name}` is a {type(leaf).__qualname__}, which may change between calls.\n"
            "  A capture stands for calls with equal arguments: plain values, dtypes, devices and enums compare.\n"
            "  Pass what the forward needs of it as plain values or tensors."
        )


def _device_of(arguments: Arguments) -> torch.device:
    real = [t.device for t in arguments.tensors if t.device.type != "meta"]
    return real[0] if real else torch.device("cpu")


class _Capture:
    """One run of a model's forward under the recorder."""

    def __init__(self, model: nn.Module, arguments: Arguments, device: torch.device, make_fake: set[Site]):
        self._model = model
        self._arguments = arguments
        self._device = device
        self._make_fake = make_fake
        self._stray: TraceError | None = None
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entries, self._tensors = inventory(model)
        self._fakes = fake_state(self._tensors, self._fake_mode, device)
        self._by_id = {id(t): self._fakes[key] for key, t in self._tensors.items()}
        self._recorder = Recorder(self._fake_mode, self._by_id, make_fake)

    def run(self) -> TracedModule:
        with kept_rng() as moved, swapped_state(self._model, self._by_id) as start:
            result = self._run_forward(self._recorder)
            rebound = self._rebound_buffers()
            self._refuse_kept_state(start)
        if moved:
            raise TraceError(
                f"the model draws from or seeds `{moved[0]}` in its forward.\n"
                "  A capture would freeze the number drawn.\n  Draw with torch instead, unseeded."
            )
        outputs = Structure.of(result)
        nodes = tuple(self._recorder.node_of(t) for t in outputs.placeholders)
        self._recorder.graph.output(nodes)
        return self._finish(outputs, rebound)

    def _bind_inputs(self, recorder: Recorder) -> list[torch.Tensor]:
        copies: list[torch.Tensor] = []
        for name, tensor in zip(self._arguments.names, self._arguments.tensors, strict=True):
            node = recorder.graph.placeholder(name)
            copies.append(self._copy_input(tensor))
            recorder.bind_input(copies[-1], node)
        return copies

    def _copy_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta" and not tensor.requires_grad:
            return tensor.detach().clone(memory_format=torch.preserve_format)
        with self._fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return fake.requires_grad_(tensor.requires_grad)

    def _run_forward(self, recorder: Recorder) -> Any:
        args, kwargs = self._arguments.rebuild(self._bind_inputs(recorder))
        for key, fake in self._fakes.items():
            recorder.bind_state(fake, key)
        with ExitStack() as stack:
            stack.enter_context(StrayWatch(lambda: recorder.is_recording, self._refuse_stray))
            stack.enter_context(followed_modules(recorder, self._model))
            stack.enter_context(recorded_functions(recorder))
            stack.enter_context(recorder)
            try:
                result = self._model(*args, **kwargs)
            except Exception:
                # An interpreter that ran the operation (TorchScript) wraps the refusal in its own error.
                if self._stray is not None:
                    raise self._stray from None
                raise
        if self._stray is not None:
            raise self._stray
        return result

    def _refuse_stray(self, func: Any, args: Any) -> None:
        self._stray = TraceError(
            f"the operation `{func}` ran at {user_line()} outside any torch function.\n"
            "  A capture records torch functions; what TorchScript or C++ extensions compute would become a "
            "constant.\n  Call the operation through torch.ops or a torch.library.custom_op."
        )
        raise self._stray

    def _refuse_kept_state(self, start: Attributes) -> None:
        """Runs a forward that changed attributes again, to see whether the next call would do something else.

        Raises:
            TraceError: If it would: then one graph can't stand for all calls.
        """
        changes = start.changes()
        for change in changes:
            if isinstance(change.before, torch.Tensor) and id(change.before) in self._fake_ids():
                change.holder[change.label] = change.before
        changes = start.changes()
        if not changes:
            return
        between = Attributes(self._model)
        again = Recorder(self._fake_mode, self._by_id, self._make_fake, earlier=self._recorder)
        self._run_forward(again)
        counted = [c for c in between.changes() if c.is_plain]
        flags = [c for c in changes if c.is_plain and _calls(again) != _calls(self._recorder)]
        for change in (*counted, *flags):
            raise TraceError(
                f"the forward changes the Python attribute `{change.name}` (now {change.now!r}).\n"
                "  A capture would freeze it at its first value.\n  Keep counters in a buffer."
            )

    def _fake_ids(self) -> set[int]:
        return {id(fake) for fake in self._fakes.values()}

    def _rebound_buffers(self) -> dict[str, torch.Tensor]:
        """Finds buffers that the forward re-assigned (`self.ema = ...`) rather than wrote in place."""
        owners = {alias: e.key for e in self._entries.values() for alias in (e.key, *e.ties)}
        held: dict[str, list[torch.Tensor | None]] = {}
        for prefix, module in self._model.named_modules():
            for name, tensor in module._buffers.items():
                key = owners.get(f"{prefix}.{name}" if prefix else name)
                if key is not None:
                    held.setdefault(key, []).append(tensor)
        found: dict[str, torch.Tensor] = {}
        for key, (tensor, *others) in held.items():
            if tensor is None or any(other is not tensor for other in others):
                raise TraceError(
                    f"the forward unties or removes the buffer `{key}`.\n"
                    "  A capture keeps the model's buffers as they are registered.\n"
                    "  Write into the buffer in place."
                )
            if tensor is not self._fakes[key]:
                # A copy of its own, in case the new value is an input or another buffer.
                with torch.no_grad():
                    found[key] = self._recorder.record(torch.Tensor.clone, (tensor,), {})
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
            writes_back=self._written_state(read, rebound),
            guards=tuple(recorder.guards),
            block_modules=repeated_modules(self._model),
            device=self._device,
        )

    def _written_state(
        self, read: dict[Any, fx.Node], rebound: dict[str, torch.Tensor]
    ) -> tuple[tuple[str, fx.Node], ...]:
        """Lists state that the forward wrote or re-assigned, with the node that stands for it afterwards."""
        written = {w for node in self._recorder.graph.nodes for w in node.meta.get("writes", ())}
        in_place = {str(key): node for key, node in read.items() if node in written}
        return tuple((in_place | {k: self._recorder.node_of(t) for k, t in rebound.items()}).items())


def _calls(recorder: Recorder) -> list[str]:
    return [call_text(n) for n in recorder.graph.nodes if n.op in ("call_function", "call_method")]
