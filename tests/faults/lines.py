"""SIGINT at a chosen line of megatrain, in steps, flushes, reads, saves, loads, captures and compile."""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatrain
from megatrain.errors import MegatrainError
from tests.faults.children import Trial, asked, in_children
from tests.faults.tally import Tally
from tests.faults.world import CASES, Undisturbed, World
from tests.training.resuming import OPTIMIZERS, Case, Run, differences, scalar, text_of
from tests.training.resuming import seed as seed_all

ROOT = str(Path(megatrain.__file__).parent)
BEGUN = ("fp32 clipped", "bf16 overlap", "bf16 clipped")
# A place: file, line, and how often the line runs before.
Place = tuple[str, int, int]
PER_WORLD = 60


@contextmanager
def ctrl_c() -> Generator[None]:
    """Makes SIGINT raise KeyboardInterrupt, also where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Finalizers:
    """Counts the interrupts that Python lost because they came in a `__del__`: nobody else hears of those."""

    def __init__(self) -> None:
        self.lost = 0

    def __enter__(self) -> Finalizers:
        self._before, sys.unraisablehook = sys.unraisablehook, self._note
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._before

    def _note(self, found: Any) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            self.lost += 1
        else:
            self._before(found)


class Tracer:
    """Follows the lines of megatrain that the main thread runs, and interrupts at one of them.

    Args:
        at: Where; None only counts.
    """

    def __init__(self, at: Place | None = None) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.has_fired = False
        self._at = at

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not self.has_fired:
            key = (frame.f_code.co_filename, frame.f_lineno)
            times, self.seen[key] = self.seen[key], self.seen[key] + 1
            if self._at == (*key, times):
                self.has_fired = True
                signal.raise_signal(signal.SIGINT)
        return self._line


def places(tracer: Tracer, dice: random.Random, *, both: bool = True) -> list[Place]:
    """Each line once, where it runs first, and for some of those that run more often a later time as well."""
    found: list[Place] = []
    for (file, line), times in tracer.seen.items():
        found.append((file, line, 0))
        if both and times > 1 and dice.random() < 0.3:
            found.append((file, line, dice.randrange(1, times)))
    return found


def described(place: Place) -> str:
    file, line, times = place
    return f"megatrain{file.removeprefix(ROOT)}:{line}" + (f", time {times + 1}" if times else "")


def interrupted(act: Callable[[], object], place: Place) -> tuple[bool, str | None]:
    """Runs something; returns whether the line was reached, and what is wrong with how it ended, if something is."""
    tracer, finalizers, wrong = Tracer(place), Finalizers(), "the interrupt was lost"
    try:
        with finalizers, tracer:
            act()
    except KeyboardInterrupt:
        wrong = None
    except Exception as error:
        wrong = f"it came out as {type(error).__name__}: {error}".replace("\n", " | ")
    finally:
        sys.settrace(None)
    return tracer.has_fired, None if finalizers.lost else wrong


# -- a run in progress ---------------------------------------------------------------------------------------------


def lines_of_operations(
    tally: Tally, folder: Path, *, first: int, stride: int, kinds: Sequence[str], names: Sequence[str] = tuple(CASES)
) -> None:
    """Interrupts steps, flushes, reads, saves and loads at every `stride`-th line, the cases by turns."""
    with ctrl_c():
        for number, name in enumerate(names):
            for kind in kinds:
                found = asked(lambda name=name, kind=kind: _lines_of(name, folder, kind))
                chosen = [tuple(place) for place in found[(first + number) % stride :: stride]]
                in_children(
                    chosen,
                    lambda name=name, kind=kind: Interrupted(name, folder, kind),
                    tally,
                    named=lambda place, name=name, kind=kind: _trial(name, kind, place, None),
                    folder=folder.with_name("logs"),
                )


def _trial(name: str, kind: str, place: Place, complaint: str | None) -> Trial:
    return Trial(f"line of a {kind}", complaint, f"{kind} in `{name}` at {described(place)}")


def _lines_of(name: str, folder: Path, kind: str) -> list[Place]:
    world = _fresh(name, Undisturbed(CASES[name]), folder, kind)
    act = world.ready(kind)
    with Tracer() as tracer:
        act()
    return places(tracer, random.Random(f"{name} {kind}"))


def _fresh(name: str, undisturbed: Undisturbed, folder: Path, kind: str) -> World:
    world = World(name, undisturbed, folder)
    for _ in range(2):  # what only the first time does is over
        world.ready(kind)()
        complaint = world.complaint(kind)
        assert complaint is None, complaint
    return world


class Interrupted:
    """Interrupts one kind of operation of one run, again and again."""

    def __init__(self, name: str, folder: Path, kind: str) -> None:
        self._name, self._folder, self._kind = name, folder, kind
        self._undisturbed = Undisturbed(CASES[name])
        self._world = _fresh(name, self._undisturbed, folder, kind)
        self._trials = 0

    def __call__(self, place: Place) -> list[Trial]:
        self._trials += 1
        if self._trials % PER_WORLD == 0:
            self._world = _fresh(self._name, self._undisturbed, self._folder, self._kind)
        act = self._world.ready(self._kind)
        is_reached, wrong = interrupted(act, place)
        complaint = self._world.complaint(self._kind) or (wrong if is_reached else None)
        return [_trial(self._name, self._kind, place, complaint)] if is_reached or complaint else []


# -- compile and capture -------------------------------------------------------------------------------------------


class Begun:
    """A model and an optimizer that are about to be compiled, or stepped for the first time."""

    def __init__(self, case: Case, *, is_compiled: bool) -> None:
        seed_all(0)
        self.case = case
        self.model = case.build()
        self.compiled: Any = self._compile() if is_compiled else None
        self.optimizer = OPTIMIZERS[case.optimizer](self.model)
        self.scheduler = case.scheduler(self.optimizer) if case.scheduler else None

    def _compile(self) -> Any:
        batch = self.case.batch(0)
        example = batch[0] if isinstance(batch, list) else batch
        return megatrain.compile(self.model, device="cpu", example_args=(example,), **self.case.compile[0])

    def compile(self) -> None:
        self.compiled = self._compile()

    def act(self, kind: str) -> None:
        if kind == "compile":
            self.compile()
        else:
            self.first_step()

    def first_step(self) -> None:
        self.step = megatrain.TrainStep(self.compiled, self.optimizer, loss=scalar, **self.case.step[0])
        self.step(self.case.batch(0))

    def seen(self) -> dict[str, Any]:
        """What compile must leave as it was, if it fails; of a process and of a model."""
        found: dict[str, Any] = {f"weight {name}": text_of(p) for name, p in self.model.named_parameters()}
        found |= {f"object {name}": id(p) for name, p in self.model.named_parameters()}
        found |= {f"type {name}": type(p).__name__ for name, p in self.model.named_parameters()}
        for name, module in self.model.named_modules():
            found[f"class {name}"] = type(module)
            found[f"attributes {name}"] = sorted(module.__dict__)
            found[f"hooks {name}"] = [len(v) for k, v in module.__dict__.items() if k.endswith("hooks")]
        found["modes"] = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
        found["dtype"] = (torch.get_default_dtype(), torch.is_grad_enabled())
        found["generator"] = text_of(torch.get_rng_state())
        found["function"] = "apply" in vars(torch.autograd.Function)
        found["patched"] = [
            f"{k}" for k, v in vars(torch).items() if "megatrain" in (getattr(v, "__module__", "") or "")
        ]
        return found

    def state(self) -> dict[str, Any]:
        run: Any = object.__new__(Run)
        run.case, run.model, run.compiled, run.optimizer = self.case, self.model, self.compiled, self.optimizer
        run.scheduler, run.step = self.scheduler, self.step
        return run.state()


def lines_of_beginnings(
    tally: Tally, folder: Path, *, first: int, stride: int, kinds: Sequence[str], names: Sequence[str] = BEGUN
) -> None:
    """Interrupts `compile` and the first step, a capture included, at every `stride`-th line; then does them again."""
    with ctrl_c():
        for number, name in enumerate(names):
            for kind in kinds:
                found = asked(lambda name=name, kind=kind: _lines_of_beginning(name, kind))
                chosen = [tuple(place) for place in found[(first + number) % stride :: stride]]
                in_children(
                    chosen,
                    lambda name=name, kind=kind: _Beginnings(name, kind),
                    tally,
                    named=lambda place, name=name, kind=kind: _trial(name, kind, place, None),
                    folder=folder.with_name("logs"),
                )


def _lines_of_beginning(name: str, kind: str) -> list[Place]:
    begun = Begun(CASES[name], is_compiled=kind != "compile")
    with Tracer() as tracer:
        begun.act(kind)
    return places(tracer, random.Random(f"{name} {kind}"), both=False)


class _Beginnings:
    """Interrupts the beginning of one run, again and again."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind
        self._undisturbed = Undisturbed(CASES[name])
        self._undisturbed.at(1)

    def __call__(self, place: Place) -> list[Trial]:
        is_compile = self._kind == "compile"
        begun = Begun(CASES[self._name], is_compiled=not is_compile)
        before = begun.seen()
        is_reached, wrong = interrupted(lambda: begun.act(self._kind), place)
        if not is_reached:
            return []
        if is_compile and begun.compiled is None:
            differs = differences(before, begun.seen())
            wrong = f"compile left behind: {differs[:3]}" if differs else wrong
        return [_trial(self._name, self._kind, place, wrong or _goes_on(begun, self._undisturbed))]


def _goes_on(begun: Begun, undisturbed: Undisturbed) -> str | None:
    """Does again what was interrupted, as a user would, and compares the state after one step."""
    try:
        if begun.compiled is None:
            begun.compile()
        if not hasattr(begun, "step") or begun.step.progress.count == 0:
            begun.first_step()
        if begun.scheduler is not None:
            begun.scheduler.step()
        differs = differences(undisturbed.at(1), begun.state())
    except Exception as error:
        kind = "says" if isinstance(error, MegatrainError) else "unusable:"
        return f"{kind} {type(error).__name__}: {error}".replace("\n", " | ")
    return f"step 1 isn't the undisturbed one: {differs[:3]}" if differs else None
