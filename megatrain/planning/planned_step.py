"""PlannedStep: a training step on paper, as a value; SavedPlan: its choices, which are written and given to a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, TypeVar

from megatrain.base.checks import Rule, checked, count, either, instance_of, number, optional, shown
from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError, MegatrainError, OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware, of_weights
from megatrain.optim.moments import MomentLayout
from megatrain.optim.need import OptimizerLike
from megatrain.passes.program import Program
from megatrain.passes.rewrites.masked_attention import BandedAttention
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.planning.from_files import FileReads, MomentTraffic
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.loss_bytes import Loss
from megatrain.planning.model_sizes import ModelSizes
from megatrain.planning.options import PRECISION, Limits
from megatrain.scheduler.bands import format_s
from megatrain.scheduler.builder.bound import StepBound, step_bound
from megatrain.scheduler.explain import figure_lines, workload_lines
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Simulation
from megatrain.scheduler.step_kind import MOST_MICRO_BATCHES
from megatrain.scheduler.workload import Workload

UNBOUNDED = 1 << 60
"""Host memory of a machine that nobody has named: more than any has, so that a plan says what it takes."""


@dataclass(frozen=True, slots=True)
class StepLimits(Limits):
    """What is given for the plan of a step; the other arguments are those of `megatrain.plan`."""

    has_device: bool = False
    host_memory: int | None = None
    optimizer: OptimizerLike | None = None
    micro_batches: int = 1
    max_grad_norm: float | None = None
    overlap: bool = True
    loss: Loss | None = None
    offload: bool = False
    layout: MomentLayout | None = field(default=None, hash=False, repr=False)

    @property
    def knows_host(self) -> bool:
        """Whether somebody has said what memory the host has for the step."""
        return self.host_memory not in (None, UNBOUNDED)

    @property
    def is_on_host(self) -> bool:
        """Whether the device is the host, so that its memory is the host's."""
        return self.has_device and self.device.is_host

    @property
    def may_compile(self) -> bool:
        """Whether a compiler makes kernels for the device, or for a card that isn't there."""
        return not self.has_device or self.device.has_inductor


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step was planned for, and how it is planned again.

    Args:
        sizes: The sizes that can change, such as `micro_batch` and `sequence`.
        fixed: Of the sizes that can't change: why, in words.
        num_tokens: Tokens of a micro-batch; None if its example has no token ids.
        plan: Plans a step of these sizes, of the same model or of that of another source.
    """

    limits: StepLimits
    sizes: Mapping[str, int]
    fixed: Mapping[str, str]
    num_tokens: int | None
    plan: Callable[[StepLimits, Mapping[str, int], ModelSizes | None], PlannedStep]

    def again(self, changes: Mapping[str, Any], source: ModelSizes | None = None) -> PlannedStep:
        """Plans the same step with other limits and sizes, by name; of another model with its own sizes."""
        names = {part.name for part in fields(self.limits)}
        limits = replace(self.limits, **{name: value for name, value in changes.items() if name in names})
        others = {name: value for name, value in changes.items() if name not in names}
        if source is not None:
            return self.plan(limits, source.sizes, source)
        assert set(others) <= set(self.sizes), f"nothing is called {set(others) - set(self.sizes)}"
        return self.plan(limits, {**self.sizes, **others}, None)


@dataclass(frozen=True)
class PlannedStep:
    """A training step on paper; `Plan` says what its parts are."""

    program: Program
    schedule: Schedule
    host: HostPlan
    device_memory: int | None
    host_memory: int | None
    precision: str
    too_small: str | None = field(default=None, repr=False)
    asked: Asked | None = field(default=None, repr=False, compare=False)
    kernels: str = ""
    why_host: str = ""
    reads: FileReads | None = None
    moments: MomentTraffic | None = None

    @cached_property
    def hardware(self) -> Hardware | None:
        """The machine whose time is predicted, with the rates that such weights have there; None if none was given."""
        machine = None if self.asked is None else self.asked.limits.hardware
        if machine is None:
            return None
        return of_weights(machine, self.program.weights_bytes) if self.reads is None else self.reads.on(machine)

    @cached_property
    def simulation(self) -> Simulation | None:
        """The step on paper, with its seconds; None without `hardware`."""
        return None if self.hardware is None else self.schedule.simulate(self.hardware)

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of a step, predicted; None without `hardware`."""
        return None if self.simulation is None else self.simulation.step_s

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, predicted; None without `hardware`, or if the example has no token ids."""
        return self.tokens_per_step / self.step_s if self.tokens_per_step and self.step_s else None

    @cached_property
    def lower_bound(self) -> StepBound | None:
        """Seconds that no plan of the same blocks and micro-batches takes less than in `device_memory`.

        None without `hardware`, and if the step doesn't fit.
        """
        if self.hardware is None or self.too_small is not None:
            return None
        return step_bound(self.schedule.effects(), self.device_memory, self.hardware)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of all micro-batches; None if the example has no token ids: no whole numbers in two dimensions."""
        number = None if self.asked is None else self.asked.num_tokens
        return None if number is None else number * self.schedule.kind.micro_batches

    @property
    def missing_device_bytes(self) -> int:
        """How much more memory of the device the step needs than there is; 0 if it fits."""
        return 0 if self.device_memory is None else max(0, self.schedule.device_bytes - self.device_memory)

    @property
    def missing_host_bytes(self) -> int:
        """The same of the host. Without `host_memory` this machine's free memory is what there is."""
        return self.host.missing_bytes(self.host_memory)

    @property
    def fits(self) -> bool:
        """Whether `check` passes."""
        return self.too_small is None and self.missing_host_bytes == 0

    def refused(self) -> ScheduleError | ExecuteError | None:
        """The error of a step that doesn't fit, without ways out that must be planned first; None if it fits."""
        try:
            if self.too_small is not None:
                raise ScheduleError(self.too_small)
            self.host.check(self.host_memory)
        except (ScheduleError, ExecuteError) as error:
            return error
        return None


# Of the sizes with which the samples of a step can be split, so many are planned, the smallest.
_MOST_SIZES = 6
# A step shorter by less than this part isn't worth larger micro-batches.
_NEAR = 0.002
# A step that trains all weights, and that its compute bounds, ends the search if it is longer than its bound by less.
_NEAR_BOUND = 0.025
_TILED = TiledRegion, BandedAttention

_Planned = TypeVar("_Planned", bound=PlannedStep)


def micro_batch_sizes(samples: int) -> Sequence[int]:
    """How many samples of a step its micro-batches may have, all of them as many."""
    return [n for n in range(1, samples + 1) if samples % n == 0 and samples // n <= MOST_MICRO_BATCHES][:_MOST_SIZES]


def shortest_step(
    sizes: Sequence[int], plan: Callable[[int], _Planned], *, has_adapters: bool
) -> tuple[int, _Planned, Sequence[int]]:
    """Plans micro-batches of some sizes, and takes the shortest step that fits; of nearly equal ones the smallest.

    Large micro-batches come first: their plans have fewer rows, and each copy of weights serves more tokens. Smaller
    ones are planned until some in a row make no step shorter. (Of 10 models and machines whose five sizes were all
    planned, this found the shortest step of the 6 that train all weights after one longer step, and of the 4 with
    adapters after two.) Where all weights are trained, a step close to its bound by compute ends the search as well,
    unless smaller micro-batches may spare it tiles, which are computed twice. (Of 8 others, this changed none of what
    was found.) Returns the size, its plan, and the sizes that were planned. If none fits, it is the one that lacks
    least.
    """
    most_longer = 2 if has_adapters else 1
    found = sizes[-1], plan(sizes[-1])
    seen, longer, least_s = [found[0]], 0, found[1].step_s or 0.0
    for size in reversed(sizes[:-1]):
        if not has_adapters and _is_near_bound(found[1]):
            break
        other, best = plan(size), found[1]
        seen.insert(0, size)
        if not best.fits:
            is_better = other.fits or _missing(other) < _missing(best)
            least_s = other.step_s or 0.0
        else:
            is_better = other.fits and (other.step_s or 0.0) * (1 - _NEAR) <= least_s
            least_s = min(least_s, other.step_s or 0.0) if is_better else least_s
        if is_better:
            found, longer = (size, other), 0
        elif best.fits and other.simulation is not None:
            longer += 1
            if longer == most_longer:
                break
    return *found, tuple(seen)


def _is_near_bound(step: PlannedStep) -> bool:
    bound = step.lower_bound if step.fits else None
    nodes = (node for template in step.program.templates.values() for node in template.graph.nodes)
    if bound is None or not bound.reason.startswith("compute") or any(isinstance(n.target, _TILED) for n in nodes):
        return False
    return bound.above(step.step_s or 0.0) < _NEAR_BOUND


def _missing(step: PlannedStep) -> int:
    return step.missing_device_bytes + step.missing_host_bytes


FORMAT = 2
EQUAL = "the plans are equal"


@checked(device_memory=optional(count(1)), precision=PRECISION, step_s=optional(number(least=0, below=inf)))
@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The choices of a plan: `plan.saved()` or `step.plan`. A `TrainStep(plan=)` takes exactly these.

    Args:
        model: The name of the model's class.
        precision: `"fp32"` or `"bf16"`.
        schedule: Of the whole step; it knows its workload.
        device_memory: Bytes of the device for which the step was planned, or None.
        hardware: The name of the machine for which it was planned; empty without one.
        step_s: Seconds of a step there, predicted, or None.
    """

    model: str
    precision: str
    schedule: Schedule
    device_memory: int | None = None
    hardware: str = ""
    step_s: float | None = None

    def __post_init__(self) -> None:
        self.schedule.known_workload()

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads the same plan."""
        named = {name: getattr(self, name) for name in _NAMES}
        workload = self.schedule.known_workload().to_dict()
        return json.dumps({"format": FORMAT, **named, "schedule": str(self.schedule), "workload": workload})

    @staticmethod
    @checked(text=instance_of(str))
    def from_json(text: str) -> SavedPlan:
        """Reads what `to_json` wrote.

        Raises:
            ScheduleError: If the text isn't a plan, or its schedule isn't safe.
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ScheduleError(
                    f"format {shown(data['format'])} of a plan is unknown.\n  This version reads format {FORMAT}.\n"
                    "  Save the plan again with this version."
                )
            schedule = Schedule.parse(data["schedule"], Workload.from_dict(data["workload"]))
            schedule.check()
            return SavedPlan(schedule=schedule, **{name: data[name] for name in _NAMES})
        except (ValueError, KeyError, TypeError, RecursionError, OptionError) as error:
            said = str(error).splitlines()[0] if isinstance(error, MegatrainError) else error
            raise ScheduleError(
                f"this JSON isn't a plan: {type(error).__name__}: {said}\n"
                "  The JSON must come from to_json of a plan.\n  Give the result of to_json, unchanged."
            ) from error

    @checked()
    def diff(self, other: SavedPlan) -> str:
        """Says how another plan differs: what was asked, its time, and its choices, each figure before and after."""
        if self == other and self.schedule.workload == other.schedule.workload:
            return EQUAL
        lines = [
            f"{what}: {here} -> {there}"
            for (what, here), (_, there) in zip(_facts(self), _facts(other), strict=True)
            if here != there
        ]
        lines += figure_lines(self.schedule, other.schedule)
        changed = workload_lines(self.schedule.known_workload(), other.schedule.known_workload())
        lines += [f"the model or its shapes: {line}" for line in changed]
        if not lines:
            lines = ["the same ops at other ticks"]
        return "\n".join(["the other plan:", *(f"  {line}" for line in lines)])

    def __str__(self) -> str:
        facts = ", ".join(f"{what} {value}" for what, value in _facts(self))
        return f"saved plan: {facts}; {self.schedule!r}"


PLAN: Rule = either(
    instance_of(PlannedStep, "a Plan", "what megatrain.plan returns"), instance_of(SavedPlan, way="plan.saved()")
)

AnyPlan = PlannedStep | SavedPlan


def timed_choices(
    model: str, precision: str, schedule: Schedule, device_memory: int | None, hardware: Hardware | None
) -> SavedPlan:
    """The choices of a step, with its time on a machine."""
    if hardware is None:
        return SavedPlan(model, precision, schedule, device_memory)
    step_s = schedule.simulate(hardware).step_s
    return SavedPlan(model, precision, schedule, device_memory, hardware.name, step_s)


def saved_plan(plan: AnyPlan) -> SavedPlan:
    """The choices of a plan, or the saved plan itself."""
    if isinstance(plan, SavedPlan):
        return plan
    if plan.too_small is not None:
        raise ScheduleError(plan.too_small)
    return timed_choices(plan.program.name, plan.precision, plan.schedule, plan.device_memory, plan.hardware)


_NAMES = ("model", "precision", "device_memory", "hardware", "step_s")


def _facts(plan: SavedPlan) -> list[tuple[str, str]]:
    """What was asked, and what a step takes, in words."""
    return [
        ("model", plan.model),
        ("precision", plan.precision),
        ("budget", "none" if plan.device_memory is None else format_bytes(plan.device_memory)),
        ("machine", plan.hardware or "none"),
        ("predicted", "no time" if plan.step_s is None else format_s(plan.step_s)),
    ]
