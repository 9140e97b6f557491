"""LR schedulers in a checkpoint: one, or several in their order, as there may be one for each optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from megatrain import files as saving
from megatrain.base.checks import Rule, named, sequence_of, shown
from megatrain.base.counts import counted
from megatrain.errors import CheckpointError
from megatrain.files.optimizers import misfits


class Scheduler(Protocol):
    """An LR scheduler, or another object with a state of this kind."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads a state."""
        ...


Schedulers = Scheduler | Sequence[Scheduler]
"""One, or several in a fixed order."""


def _has_no_state(value: Any) -> str | None:
    methods = [getattr(value, method, None) for method in ("state_dict", "load_state_dict")]
    return None if not isinstance(value, type) and all(map(callable, methods)) else f"is {named(value)}"


_ONE = Rule(
    "an LR scheduler, or another object with state_dict() and load_state_dict()", "{name} such an object", _has_no_state
)
_LIST = sequence_of(_ONE)


def _fault(value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return _ONE.fault(value)
    fault = _LIST.fault(value)
    if fault is not None or not value:
        return fault or "is empty"
    several = cast(Sequence[Any], value)
    twice = next((i for i, each in enumerate(several) if any(each is other for other in several[:i])), None)
    return None if twice is None else f"has one scheduler twice: as item {twice}, and before"


SCHEDULERS = Rule(f"{_ONE.text}, or a list of different ones", "{name} such an object", _fault)


def stored(schedulers: Schedulers | None) -> dict[str, Any]:
    """Returns what a checkpoint holds of schedulers; of one in a list the same as of one.

    Raises:
        CheckpointError: If the state of one is no dict.
    """
    several = _several(schedulers)
    states, classes = [_state_of(each) for each in several], [_class_of(each) for each in several]
    if len(several) > 1:
        return {"scheduler": states, "scheduler_class": classes}
    return {"scheduler": states[0] if states else None, "scheduler_class": classes[0] if classes else None}


def fault(extra: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of schedulers, each of which is right by itself."""
    states, classes = extra["scheduler"], extra.get("scheduler_class")
    if not isinstance(states, list) and not isinstance(classes, list):
        return None
    if not isinstance(states, list) or not isinstance(classes, list):
        return "extra.scheduler and extra.scheduler_class are not of as many schedulers"
    known = cast(Sequence[Any], states), cast(Sequence[Any], classes)
    is_right = len(known[0]) == len(known[1]) > 1
    return None if is_right else "extra.scheduler is a list of another length than it can have"


def check(checkpoint: saving.Checkpoint, extra: Mapping[str, Any], schedulers: Schedulers | None) -> None:
    """Compares what a checkpoint holds of schedulers with those that are to continue.

    Raises:
        CheckpointError: If one is missing or too many, or doesn't fit, with all differences.
    """
    several, saved = _several(schedulers), _saved(extra)
    if len(several) != len(saved):
        there, here = _said([kind for _, kind in saved]), _said(map(_class_of, several))
        raise CheckpointError(
            f"the checkpoint `{checkpoint.folder}` has {there}; load() has {here}.\n"
            "  Learning rates would continue wrongly.\n"
            "  Give the same schedulers to save and load, in the same order."
        )
    wrong: list[str] = []
    for number, (scheduler, (state, kind)) in enumerate(zip(several, saved, strict=True)):
        place = "scheduler" if len(several) == 1 else f"scheduler.{number}"
        wrong += _differences(checkpoint, state, kind, scheduler, place)
    if wrong:
        lines = [
            f"the schedulers of `{checkpoint.folder}` don't fit these: {counted(len(wrong), 'difference')}.",
            *wrong,
            "State can only continue in an object like the one that was saved, and in the order of the save.",
            "Build the scheduler as it was; or load an older checkpoint, or single values with megatrain.files.load.",
        ]
        raise CheckpointError("\n  ".join(lines))


def _said(classes: Iterable[str | None]) -> str:
    names = [name or "a scheduler" for name in classes]
    return f"{counted(len(names), 'scheduler')} ({', '.join(names)})" if names else "none"


def restore(checkpoint: saving.Checkpoint, extra: Mapping[str, Any], schedulers: Schedulers | None) -> None:
    """Continues with the saved states, in their order; `check` comes before.

    Raises:
        CheckpointError: If a scheduler refuses its state.
    """
    for scheduler, (state, _) in zip(_several(schedulers), _saved(extra), strict=True):
        try:
            scheduler.load_state_dict(state)
        except Exception as error:  # the scheduler's own code, which may raise anything
            raise CheckpointError(
                f"{_class_of(scheduler)} refuses its state in `{checkpoint.folder}`: {error!r}.\n"
                "  The model and its optimizer already have the values of the checkpoint.\n"
                "  Load an older checkpoint, or build the scheduler as it was."
            ) from error


def _several(schedulers: Schedulers | None) -> Sequence[Scheduler]:
    if schedulers is None:
        return ()
    return tuple(cast(Sequence[Scheduler], schedulers)) if isinstance(schedulers, list | tuple) else (
        cast(Scheduler, schedulers),
    )  # fmt: skip


def _saved(extra: Mapping[str, Any]) -> Sequence[tuple[dict[str, Any], str | None]]:
    """State and class of each."""
    states, classes = extra["scheduler"], extra["scheduler_class"]
    if states is None:
        return ()
    return list(zip(states, classes or (), strict=True)) if isinstance(states, list) else [(states, classes)]


def _differences(
    checkpoint: saving.Checkpoint, saved: dict[Any, Any], kind: str | None, scheduler: Scheduler, place: str
) -> Iterator[str]:
    own = scheduler.state_dict()
    if kind != _class_of(scheduler):
        what = "class" if place == "scheduler" else f"class of {place}"
        yield f"{what}: {kind} in the checkpoint, but {_class_of(scheduler)} here"
        return
    yield from misfits(own, saved, place, is_whole=checkpoint.is_of_this_torch)
    for key in saved.keys() - own.keys():
        if not isinstance(key, str) or hasattr(scheduler, key):
            yield f"`{place}.{key}` is state in the checkpoint, but not here"


def _state_of(scheduler: Scheduler) -> dict[str, Any]:
    state = scheduler.state_dict()
    if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"the state of {_class_of(scheduler)} is {shown(state)}, not a dict.\n"
            "  Its values are stored by their names.\n  Let its state_dict() return a dict."
        )
    return state


def _class_of(scheduler: Scheduler) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
