"""Course: the progress of a demo's training, and its record in the checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import megatrain
from megatrain import saving
from megatrain.demo.recipe import Recipe
from megatrain.demo.text import digest, read_corpus
from megatrain.errors import CheckpointError, OptionError
from megatrain.files.replace import present
from megatrain.interrupts import Interrupts

FOLDER = Path("megatrain-demo")
# A resumed run may have another device or budget: neither is part of what is trained.
_FREE = ("device", "memory")
# Of the seconds that a recipe gives, so that the last steps, with their low learning rates, are not cut off.
_PLANNED = 0.95


@dataclass(slots=True)
class Course:
    """A training of the demo, from its first step to its last, in as many processes as it takes.

    Args:
        recipe: The recipe of the training.
        folder: The folder of its checkpoint.
        text: Digest of the text it is trained on.
        num_steps: How many steps it will have; None until the speed is known.
        seconds: How long it has trained.
        saved: How many steps its checkpoint has; None if there is none.
    """

    recipe: Recipe
    folder: Path
    text: str
    num_steps: int | None = None
    seconds: float = 0.0
    saved: int | None = None

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder has a checkpoint, or something else."""
        # A save that was ended between its two renames left the checkpoint next to its place.
        return present(folder.resolve()).exists()

    @staticmethod
    def begin(recipe: Recipe, folder: Path) -> Course:
        """Begins a training; its first checkpoint will replace that of an earlier demo.

        Raises:
            CheckpointError: If the folder holds anything else.
        """
        if Course.exists(folder):
            _recorded(folder)
        return Course(recipe, folder, digest(read_corpus()[0]))

    @staticmethod
    def resume(folder: Path, given: Mapping[str, Any]) -> Course:
        """Continues the training of a checkpoint.

        Args:
            folder: Its folder.
            given: Fields of the recipe that the caller insists on.

        Raises:
            CheckpointError: If there is no checkpoint of a demo, or it was trained on another text.
            OptionError: If the checkpoint's recipe differs from what is given.
        """
        if not Course.exists(folder):
            raise CheckpointError(
                f"there is no checkpoint in `{folder}`.\n"
                "  The demo writes one every minute, when it is interrupted, and at its end.\n"
                f"  Begin without --resume{'' if folder == FOLDER else ', or name its folder with --folder'}."
            )
        count, user = _recorded(folder)
        recipe = Recipe(**user["recipe"])
        _check_same(folder, recipe, given)
        if user["text"] != digest(read_corpus()[0]):
            raise CheckpointError(
                f"the training in `{folder}` used another text.\n"
                "  The demo trains on Python's own help pages, which differ between versions of Python.\n"
                "  Resume with the Python version of that training, or begin without --resume."
            )
        recipe = replace(recipe, **{name: given[name] for name in _FREE if name in given})
        return Course(recipe, folder, user["text"], user["num_steps"], user["seconds"], saved=count)

    @property
    def total(self) -> int:
        """How many steps it will have, by the present knowledge."""
        return self.recipe.steps if self.num_steps is None else self.num_steps

    def goes_on(self, count: int) -> bool:
        """Whether another step follows `count` of them; at least one is made."""
        return count == 0 or (count < self.total and self.seconds < self.recipe.seconds)

    def spend(self, count: int, seconds: float) -> None:
        """Notes that `count` steps took these seconds.

        The number of steps is fixed when the warm-up has shown the speed. Later learning rates don't depend on a clock,
        so the same steps have the same bits on any day.
        """
        self.seconds = seconds
        recipe = self.recipe
        if self.num_steps is None and (count >= recipe.warmup_steps or seconds >= recipe.seconds / 4):
            affordable = int(count * _PLANNED * recipe.seconds / seconds)
            self.num_steps = min(recipe.steps, max(count, affordable))

    def save(self, step: megatrain.TrainStep, more: Any = None) -> None:
        """Writes the checkpoint, unless it is there already. Ctrl-C waits for the end of it."""
        count = step.progress.count
        if count == self.saved:
            return
        user = {"recipe": asdict(self.recipe), "text": self.text, "num_steps": self.num_steps, "seconds": self.seconds}
        with Interrupts():
            step.save(self.folder, user=user, more=more)
            self.saved = count

    def describe_saved(self) -> str:
        """Says what is saved, and how to continue."""
        folder = "" if self.folder == FOLDER else f" --folder {shlex.quote(str(self.folder))}"
        return (
            f"step {self.saved} of {self.total} is saved in `{self.folder}`, and nothing is still running.\n"
            f"  Continue with: megatrain demo --resume{folder}"
        )


def _recorded(folder: Path) -> tuple[int, dict[str, Any]]:
    """Returns how many steps a checkpoint has, and the other values that `Course.save` wrote."""
    extra = saving.load(folder).extra
    found: Any = extra.get("user")
    user: dict[str, Any] = found if isinstance(found, dict) else {}
    recipe: Any = user.get("recipe")
    if not isinstance(recipe, dict) or set(recipe) != {field.name for field in fields(Recipe)}:
        raise CheckpointError(
            f"`{folder}` is a checkpoint, but not of this version's demo.\n"
            "  The demo resumes and replaces only its own checkpoints.\n"
            "  Name another folder with --folder, or remove this one."
        )
    return extra["progress"]["count"], user


def _check_same(folder: Path, recipe: Recipe, given: Mapping[str, Any]) -> None:
    differing = [name for name in given if name not in _FREE and given[name] != getattr(recipe, name)]
    if differing:
        found = [f"--{n.replace('_', '-')} {given[n]} is given, but {getattr(recipe, n)} was" for n in differing]
        raise OptionError(
            "\n  ".join(
                [
                    f"the options contradict the checkpoint in `{folder}`:",
                    *found,
                    "A resumed run keeps its recipe; only --device and --memory may change.",
                    "Leave the options out, or begin anew without --resume.",
                ]
            )
        )
