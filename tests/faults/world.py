"""World: a run that is disturbed, what it should be undisturbed, and a place for its checkpoints."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain import TrainStep
from megatrain.errors import MegatrainError
from megatrain.files import load
from tests.training.resuming import BF16, CLIP, PARKED, SERIAL, Case, Run, differences, scalar, warm_up

WIDTH = 8


def layers(count: int = 3, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(count)),
    )


def points(number: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(number))


def several(number: int) -> list[torch.Tensor]:
    return [points(2 * number), points(2 * number + 1)]


# Where updates are (deferred, beside the device's work, behind all gradients), both precisions, one and two batches.
CASES: dict[str, Case] = {
    "fp32 clipped": Case(layers, several, "adamw", warm_up, ({}, {}), (CLIP, CLIP)),
    "fp32 overlap": Case(layers, points, "sgd", warm_up, (PARKED, PARKED)),
    "bf16 clipped": Case(layers, points, "adamw", warm_up, (BF16, BF16), (CLIP, CLIP)),
    "bf16 overlap": Case(layers, several, "fused", warm_up, ({**BF16, **PARKED}, {**BF16, **PARKED})),
    "fp32 serial": Case(layers, several, "fused", warm_up, ({}, {}), (SERIAL, SERIAL)),
}


@contextmanager
def apart(generators: list[Any]) -> Generator[None]:
    """Gives the body generators of its own, which it leaves in the list for the next time."""
    outside = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    if generators:
        _set(generators)
    try:
        yield
    finally:
        generators[:] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
        _set(outside)


def _set(generators: list[Any]) -> None:
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])


class Undisturbed:
    """The same run, which nothing disturbs; its state after each step is kept."""

    def __init__(self, case: Case) -> None:
        self._generators: list[Any] = []
        with apart(self._generators):
            self._run = Run(case)
            self._states = [self._run.state()]

    def at(self, count: int) -> dict[str, Any]:
        while len(self._states) <= count:
            with apart(self._generators):
                self._run.train(1)
                self._states.append(self._run.state())
        return self._states[count]


class World:
    """A run that is disturbed, one operation at a time.

    Args:
        name: Of the case.
        undisturbed: What the run should be.
        folder: For checkpoints.
    """

    def __init__(self, name: str, undisturbed: Undisturbed, folder: Path) -> None:
        self.name, self.undisturbed, self.place = name, undisturbed, folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.run = Run(CASES[name])
        self.saved: int | None = None
        self.begun_at = 0

    @property
    def count(self) -> int:
        return self.run.step.progress.count

    # -- the operations that are disturbed ------------------------------------------------------------------------

    def ready(self, kind: str) -> Callable[[], object]:
        """Does what goes before an operation, and returns it."""
        self.begun_at = self.count
        if kind in ("flush", "read"):
            self.undisturbed_step()
        if kind == "load":
            if self.saved is None or self.count - self.saved > 3:
                self.save()
            self.undisturbed_step()
        batch = self.run.case.batch(self.count)
        self.begun_at = self.count
        return {
            "step": lambda: self.run.step(batch),
            "flush": self.run.step.flush,
            "read": lambda: next(self.run.model.parameters()).detach(),
            "save": lambda: self.run.save(self.place, shard_bytes=1000),
            "load": self.back,
        }[kind]

    def undisturbed_step(self) -> None:
        self.run.train(1)

    def save(self) -> None:
        self.run.save(self.place, shard_bytes=1000)
        self.saved = self.count

    def back(self) -> None:
        run = self.run
        run.step = TrainStep.load(
            self.place, run.compiled, run.optimizer, scheduler=run.scheduler, loss=scalar, **run.case.step[0]
        )

    # -- afterwards -----------------------------------------------------------------------------------------------

    def complaint(self, kind: str) -> str | None:
        """Goes on as a user would; says what isn't as it should be, if something isn't."""
        try:
            return self._settled(kind) or self._state_differs()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " | ")
            if isinstance(error, MegatrainError) and "Load a checkpoint" in str(error) and self.saved is not None:
                self.back()  # the way out that the error names
                return self._state_differs()
            return f"unusable after {kind}: {text}"

    def _settled(self, kind: str) -> str | None:
        if kind == "step":
            taken = self.count - self.begun_at
            if taken not in (0, 1):
                return f"{taken} steps were taken"
            if taken:
                self.run.scheduler.step()
        elif kind == "save":
            return self._settled_save()
        elif kind == "load":
            self.back()  # what was half read is read again
            if self.count != self.saved:
                return f"load gave step {self.count}, saved was {self.saved}"
        elif self.count != self.begun_at:
            return f"{kind} changed the count from {self.begun_at} to {self.count}"
        return None

    def _settled_save(self) -> str | None:
        if self.saved is not None or self.place.exists():
            checkpoint = load(self.place)
            checkpoint.check()
            found = checkpoint.extra["progress"]["count"]
            if found not in (self.saved, self.count):
                return f"the checkpoint is of step {found}, not of {self.saved} or {self.count}"
        self.save()
        names = sorted(path.name for path in self.place.parent.iterdir())
        return None if names == ["run"] else f"left over: {names}"

    def _state_differs(self) -> str | None:
        differs = differences(self.undisturbed.at(self.count), self.run.state())
        return f"step {self.count} isn't the undisturbed one: {differs[:3]}" if differs else None

    def end_differs(self) -> str | None:
        """Takes two more steps, and compares."""
        try:
            self.run.train(2)
            return self._state_differs()
        except Exception as error:
            return f"no more steps: {type(error).__name__}: {error}"
