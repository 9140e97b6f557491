"""Trial: the steps that are compared, on copies; it can repeat any step, eagerly or compiled."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.device import HOST, Device, is_on_host
from megatrain.errors import ExecuteError, OptionError
from megatrain.tools.verification.compare import Key, named_leaves
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.random_numbers import HostRng, kept_rng
from megatrain.training.compiled.compiling import compile as compile_model
from megatrain.training.compiled.module import CompiledModule

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """All that one step produced, before its update."""

    values: Mapping[Key, Any]
    result: Any

    def gradient(self, name: str) -> torch.Tensor | None:
        """Returns the gradient of a parameter; None if it got none, or is none."""
        return self.values.get(("gradient", name))

    def on_host(self) -> Observation:
        """Returns a copy that holds nothing on the device: an output keeps its history, and that the parameters."""
        copies = {
            key: on_host(value).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
            for key, value in self.values.items()
        }
        return Observation(copies, None)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A model, a call of it, and how a step of training goes.

    Args:
        model: The user's; never run, only copied.
        seed: Of step 0; step n has `seed + n`.
        learning_rate: How far an update moves a parameter, as a fraction of its largest value.
        loss: Makes a scalar of the model's output; None weighs all outputs.
    """

    model: nn.Module
    arguments: Arguments
    options: Mapping[str, Any]
    device: Device
    seed: int
    learning_rate: float
    loss: Loss | None

    def compiled(self) -> tuple[CompiledModule, nn.Module]:
        """Compiles a copy and returns it with that copy."""
        streamed = copied_model(self.model)
        return compile_model(streamed, **self.options), streamed

    def eager(self, steps: int = 0) -> nn.Module:
        """Returns a copy on the compute device that was trained for so many steps."""
        eager = copied_model(self.model).to(self.device.torch_device)
        self.train(eager, eager, steps)
        return eager

    def train(self, call: Callable[..., Any], model: nn.Module, steps: int) -> None:
        """Runs steps with their updates."""
        for step in range(steps):
            self.observe(call, model, step)
            update(model, self.learning_rate)

    def fresh_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Returns `(args, kwargs, tensors)` of the call, copied."""
        tensors = copied_tensors(self.arguments.tensors)
        args, kwargs = self.arguments.rebuild(tensors)
        return args, kwargs, tensors

    def observe(
        self,
        call: Callable[..., Any],
        model: nn.Module,
        step: int,
        *,
        after_backward: Callable[[], None] = lambda: None,
    ) -> Observation:
        """Runs forward and backward of one step."""
        args, kwargs, tensors = self.fresh_arguments()
        model.zero_grad(set_to_none=True)
        self.set_seed(step)
        result = call(*args, **kwargs)
        leaves = dict(named_leaves(result))
        total = weighted_sum(leaves) if self.loss is None else _checked(self.loss(result))
        if total is not None and total.requires_grad:
            total.backward()
        after_backward()
        # Where the caller has autocast on, the next step must not find this step's weights in its cache.
        torch.clear_autocast_cache()
        values: dict[Key, Any] = {("output", path): leaf for path, leaf in leaves.items()}
        values |= {("rng", device): state for device, state in generators(self.device).items()}
        for name, parameter in model.named_parameters():
            values["gradient", name] = parameter.grad
        for name, tensor in zip(self.arguments.names, tensors, strict=True):
            if tensor.requires_grad:
                values["input gradient", name] = tensor.grad
        for name, buffer in model.named_buffers():
            values["buffer", name] = on_host(buffer)
        return Observation(values, result)

    def set_seed(self, step: int) -> None:
        """Seeds the generators for a step, as `torch.manual_seed` and its like would; other devices' keep theirs."""
        seed = self.seed + step
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        own = self.device.seeded_state(seed)
        if own is not None:
            self.device.set_generator_state(own)
        HostRng.seeded(seed).restore()


def update(model: nn.Module, learning_rate: float) -> None:
    """Moves each parameter against its gradient, its largest change being a fraction of its largest value.

    So a step changes every parameter visibly, however large its gradient is, and no parameter diverges. A gradient of
    less than a hundredth of the model's largest moves its parameter by less: some are zero except for rounding.
    """
    with torch.no_grad():
        slopes = {p: _slope(p) for p in model.parameters()}
        steepest = max((slope for slope in slopes.values() if slope < float("inf")), default=0.0)
        for parameter, slope in slopes.items():
            gradient = parameter.grad
            # If it is infinite or NaN there is no step of that size; all zero needs none.
            if gradient is not None and 0 < slope < float("inf"):
                largest = float(parameter.abs().max()) or 1.0
                scale = max(slope, steepest / 100)
                # On the host for both: devices round a multiplication and an addition differently.
                moved = parameter.cpu().add_(gradient.cpu(), alpha=-learning_rate * largest / scale)
                if not is_on_host(parameter):
                    parameter.copy_(moved)


def _slope(parameter: torch.Tensor) -> float:
    """The largest element of a gradient; 0 if there is none."""
    gradient = parameter.grad
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.to_dense().abs().max())


def weighted_sum(leaves: Mapping[str, Any]) -> torch.Tensor | None:
    """Sums all differentiable outputs with fixed random weights, so that every element matters; None if none is."""
    total: torch.Tensor | None = None
    for path, tensor in leaves.items():
        if not (isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.numel()):
            continue
        dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        real = real if real.dtype == torch.float64 else real.float()
        generator = torch.Generator(real.device).manual_seed(zlib.crc32(path.encode()))
        weights = torch.rand(real.shape, generator=generator, dtype=real.dtype, device=real.device).add_(0.5)
        weights.mul_(torch.randint(0, 2, real.shape, generator=generator, device=real.device).mul_(2).sub_(1))
        # The square root keeps gradients of large outputs from vanishing next to those of small outputs.
        term = (real * weights).sum() / real.numel() ** 0.5
        total = term if total is None else total + term
    return total


def _checked(total: Any) -> torch.Tensor:
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or total.is_complex():
        what = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else repr(total)
        raise OptionError(
            f"loss returned {what}.\n  A loss is a real tensor with one element.\n"
            "  Return for example `output.logits.square().mean()`, or leave `loss` out."
        )
    return total


def generators(device: Device) -> dict[str, torch.Tensor]:
    """Returns the states of the generators: torch's, on the CPU and the compute device, Python's and NumPy's."""
    states = {"cpu": torch.get_rng_state()}
    states["python"] = torch.tensor(random.getstate()[1])
    _, words, position, *_ = np.random.get_state()
    states["numpy"] = torch.tensor([*np.asarray(words).tolist(), position])
    own = device.generator_state()
    if own is not None:
        states[str(device)] = own
    return states


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy without a history."""
    return tensor.detach().to("cpu", copy=True)


# -- copies -----------------------------------------------------------------------------------------------------------


@contextmanager
def left_alone(model: nn.Module) -> Generator[None]:
    """Puts back what the body changes around the model: the host's random generators, attributes, gradients.

    The body works on copies; what it can still reach are globals, and the model itself by way of a closure.

    Raises:
        ExecuteError: If a copy's step left gradients in `model` itself: then the copies aren't copies.
    """
    with ExitStack() as stack:
        # Parameters made in inference mode would count no versions.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(kept_rng(HOST))
        stack.callback(Snapshot(model, Outer.of(model)).restore)
        gradients = [(p, p.grad) for p in model.parameters()]
        stack.callback(_give_back, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        yield
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                raise ExecuteError(
                    f"a step of a copy of the model left a gradient in the model's own `{name}`.\n"
                    "  verify trains copies; a function that refers to the model itself, such as a replaced "
                    "`forward`, isn't copied with it.\n"
                    "  Bind such functions to modules, or build a model without them."
                )


def _give_back(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def copied_model(model: nn.Module) -> nn.Module:
    """Returns a deep copy without gradients.

    Raises:
        ExecuteError: If the model can't be copied.
    """
    try:
        copied = copy.deepcopy(model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ExecuteError(
            f"the model can't be copied ({type(error).__name__}: {error}).\n"
            "  verify trains copies, so that the model itself stays as it is.\n"
            "  Its attributes must not hold objects that copy.deepcopy refuses: tensors with a history, locks, "
            "open files."
        ) from error
    copied.zero_grad(set_to_none=True)
    return copied


def copied_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies inputs as leaves of their own, strides included; one that stands twice is copied once."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor.detach()).requires_grad_(tensor.requires_grad)
    return [copies[id(t)] for t in tensors]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return tensor.clone()
    # Only the elements that it spans: an input may be a small slice of a whole data set.
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
