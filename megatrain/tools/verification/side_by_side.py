"""verify(): compares a model with itself, compiled and eager."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import Rule, checked, count, mapping_of, number, one_of, optional
from megatrain.device import Device
from megatrain.errors import OptionError
from megatrain.passes.distance import has_nan
from megatrain.tools.command_options import OF_COMPILE
from megatrain.tools.command_targets import command_target, importable, users_failures
from megatrain.tools.verification.bisect import Owners, find_first_difference
from megatrain.tools.verification.compare import Tolerance, compare
from megatrain.tools.verification.report import Difference, FirstDifference, Report
from megatrain.tools.verification.trial import Observation, Trial, copied_model, left_alone, update
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.recording.random_numbers import kept_rng
from megatrain.tracer.source_line import original
from megatrain.tracer.spec import MODEL
from megatrain.training.compiled.compiling import compile as compile_model


def verify(  # the options of compile() and its own
    model: nn.Module,
    *args: Any,
    steps: int = 2,
    seed: int = 0,
    learning_rate: float = 0.05,
    tolerance: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    device: Device | torch.device | str | None = None,
    memory: int | str | None = None,
    activations: str | None = None,
    transfer: str | None = None,
    block_bytes: int | str | None = None,
    compile_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Trains a copy of `model` compiled and another eagerly, side by side, and compares everything.

    Both run `steps` steps of forward, backward and update on the same arguments, from the same seed. `verify` compares
    the outputs (tensors and all other values), every gradient and whether it exists, the gradients of the arguments,
    every buffer, the state of torch's generators, and the parameters after each update, which moves every parameter by
    up to `learning_rate` of its largest value. If a step isn't equal, it is repeated to find the first block that went
    wrong (`report.first_difference`), and the steps after it are left out.

    `model`, its gradients, the arguments and all random generators stay as they were. `verify` needs memory for one
    copy of the model on the host and another on the compute device, each with gradients, and the activations of an
    eager step. Finding the first difference takes as much of the device once more, and on the host all values between
    blocks.

    Args:
        model: Any module that `compile` takes; its mode, train or eval, is kept.
        *args: Arguments of its forward, on the compute device, or on the CPU where the model takes them there.
        steps: Training steps.
        seed: Seed set before each step, for dropout.
        learning_rate: Of the update between steps.
        tolerance: Relative difference that still counts as equal; 0 asks for the same bits. None goes by dtype:
            1e-5 for single precision, 1e-13 for double, 4e-3 for half, 3e-2 for bfloat16 (also for regions under
            autocast). The numbers have the same bits, except where a sum associates differently; then they differ by a
            few units in the last place. Whole numbers, flags and texts must be equal in any case.
        loss: Computes a scalar from the model's output; default: the sum of all differentiable outputs with fixed
            random weights, so that every element of every output matters.
        device: See `compile`; None of these five is the default there.
        memory: See `compile`.
        activations: See `compile`.
        transfer: See `compile`.
        block_bytes: See `compile`.
        compile_options: More options of `compile`; options given directly win. With `precision="bf16"`, eager is a bf16
            copy as well, and gets the inputs in bf16.
        **kwargs: Keyword arguments of its forward.

    Returns:
        The report; `report.ok` is the verdict.

    Raises:
        OptionError: If an option has a wrong value, or could also be an argument of the forward.
        TraceError: And any other error of `compile` or a compiled step, unchanged.
        ExecuteError: If the model can't be copied.
    """
    named = {
        "device": device,
        "memory": memory,
        "activations": activations,
        "transfer": transfer,
        "block_bytes": block_bytes,
    }
    own: dict[str, tuple[Any, float]] = {"steps": (steps, 2), "seed": (seed, 0), "learning_rate": (learning_rate, 0.05)}
    # A tensor for the forward has no truth, so a number is compared with a number only.
    given = [k for k, (v, default) in own.items() if not isinstance(v, int | float) or v != default]
    given += [k for k, v in {**named, "tolerance": tolerance, "loss": loss}.items() if v is not None]
    _refuse_ambiguous(model, args, given)
    return verify_call(
        model,
        args,
        kwargs,
        _options(compile_options, named),
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        tolerance=tolerance,
        loss=loss,
    )


@checked(compile_options=optional(mapping_of(key_rule=one_of(*inspect.signature(compile_model).parameters))))
def _options(compile_options: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `compile`, which checks them one by one."""
    return {**(compile_options or {}), **{name: value for name, value in named.items() if value is not None}}


CALL: Mapping[str, Rule] = {
    # A report has a line for each tensor of each step, and the weights move on with each.
    "steps": count(1, 10_000),
    "seed": count(-(2**63), 2**63 - 1),
    "learning_rate": number(least=0, below=math.inf, example=0.05),
    "tolerance": optional(number(least=0, below=math.inf, example=1e-5)),
}
"""What the options of a comparison may be, besides those of `compile`."""


@checked(model=MODEL, **CALL)
def verify_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    steps: int = 2,
    seed: int = 0,
    learning_rate: float = 0.05,
    tolerance: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Report:
    """Does what `verify` does, for a call whose arguments stay apart from the options of `compile`."""
    model = original(model)
    # Reads the options without touching the model; precision="bf16" would change it.
    compiled = None if _is_narrowing(model, options) else compile_model(model, **options)
    with left_alone(model):
        tried = copied_model(model) if compiled is None else model
        compiled = compiled or compile_model(tried, **options)
        arguments = compiled.megatrain.cast(Arguments.of(tried, args, dict(kwargs)))
        target = compiled.megatrain.options.device
        with kept_rng(target):
            trial = Trial(tried, arguments, options, target, seed, learning_rate, loss)
            return _report(trial, steps, tolerance)


def _is_narrowing(model: object, options: Mapping[str, Any]) -> bool:
    return isinstance(model, nn.Module) and options.get("precision") == "bf16"


@dataclass(frozen=True, slots=True)
class _Compared:
    """What the steps gave."""

    differences: tuple[Difference, ...]
    tolerance: Tolerance
    num_blocks: int
    notes: tuple[str, ...]

    @property
    def failed(self) -> int | None:
        """The step that wasn't equal."""
        return next((d.step for d in self.differences if not d.ok), None)


def _report(trial: Trial, steps: int, given: float | None) -> Report:
    # The two models go when this returns: the search needs their memory.
    compared = _compared(trial, steps, given)
    notes = list(compared.notes)
    first: FirstDifference | None = None
    if compared.failed is not None:
        gc.collect()
        try:
            first = find_first_difference(trial, compared.failed, compared.tolerance)
        except Exception as error:
            # The verdict holds even if the search fails (it takes more memory than the comparison).
            notes.append(f"the search for the first difference failed: {type(error).__name__}: {error}")
    differences = sorted(compared.differences, key=lambda d: (*(-x for x in d.severity), d.step, d.kind, d.name))
    coarsest = max((d.tolerance for d in differences), default=0.0) if given is None else given
    return Report(tuple(differences), coarsest, type(trial.model).__name__, compared.num_blocks, first, tuple(notes))


def _compared(trial: Trial, steps: int, given: float | None) -> _Compared:
    """Runs both models in step and compares after each; ends with the first step that isn't equal."""
    compiled, streamed = trial.compiled()
    eager: nn.Module | None = None
    differences: list[Difference] = []
    notes: dict[str, None] = {}
    tolerance = Tolerance(given)
    for step in range(steps):
        found = trial.observe(compiled, streamed, step)
        # Only now, so that compile's errors come before anything moves to the device.
        eager = trial.eager() if eager is None else eager
        expected = trial.observe(eager, eager, step)
        inside = compiled.megatrain
        tolerance = Tolerance.of(given, inside.program, inside.options.kernels)
        owners = Owners(compiled.megatrain.variant, found.result)
        notes |= dict.fromkeys(_notes(expected))
        here = list(compare(expected.values, found.values, step, tolerance, owners))
        update(streamed, trial.learning_rate)
        update(eager, trial.learning_rate)
        here += compare(_parameters(eager), _parameters(streamed), step, tolerance, owners)
        differences += here
        if not all(d.ok for d in here):
            break
    return _Compared(tuple(differences), tolerance, len(compiled.megatrain.program.blocks), tuple(notes))


def _parameters(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {("parameter", name): parameter for name, parameter in model.named_parameters()}


def _notes(expected: Observation) -> list[str]:
    tensors = {k: v for k, v in expected.values.items() if isinstance(v, torch.Tensor)}
    found: list[str] = []
    if not any(t.requires_grad for (kind, _), t in tensors.items() if kind == "output"):
        found.append("no output is differentiable, so there are no gradients to compare")
    lost = [f"{kind} {name}" for (kind, name), t in tensors.items() if has_nan(t)]
    if lost:
        found.append(f"eager PyTorch itself has NaN, which equals NaN, in {lost[0]}" + " and others" * (len(lost) > 1))
    return found


def _refuse_ambiguous(model: nn.Module, args: tuple[Any, ...], given: list[str]) -> None:
    """Refuses an option that the forward takes as an argument too, unless that stands among `args` already."""
    forward: Any = getattr(model, "forward", None)
    try:
        signature = inspect.signature(forward)
        filled = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return  # the call itself will say what is wrong with it
    for name in given:
        if name in signature.parameters and name not in filled:
            raise OptionError(
                f"{name}=... is both an option of verify and an argument of the model's forward.\n"
                "  verify can't tell which one is meant.\n"
                "  Give the forward's argument by position, and options of compile in `compile_options`."
            )


def run(target: str, *, json: bool = False, **given: Any) -> int:
    """`megatrain verify module:function`: compares, and prints the report."""
    of_compile = {name: given.pop(name) for name in OF_COMPILE if name in given}
    with importable(target):
        model, args, kwargs = command_target(target)
        with users_failures(f"a step of the model of `{target}`"):
            report = verify_call(model, args, kwargs, of_compile, **given)
    print(report.to_json() if json else report)
    return 0 if report.ok else 1
