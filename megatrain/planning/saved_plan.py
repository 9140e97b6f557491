"""SavedPlan: the choices of a plan as a value that is written, read, compared, and given to a training step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf

from megatrain.base.checks import Rule, checked, count, either, instance_of, number, optional, shown
from megatrain.base.sizes import format_bytes
from megatrain.errors import MegatrainError, OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.planning.options import PRECISION
from megatrain.planning.planned_step import PlannedStep
from megatrain.scheduler.bands import format_s
from megatrain.scheduler.explain import figure_lines, workload_lines
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload

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
