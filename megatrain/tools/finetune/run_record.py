"""What a training leaves in its folder: the record by which the same command goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointError
from megatrain.files import disk
from megatrain.tools.command_options import flag
from megatrain.tools.finetune.train_options import TrainOptions

NAME = "megatrain_train.json"
_LOCK = ".megatrain_train.lock"
_VERSION = 2
# A run may go on in another folder, on another device and with another budget: its numbers stay. What is read is
# compared by its contents.
_FREE = ("out", "device", "memory", "host_memory", "offload", "block_bytes", "chunking", "report_to")
_READ = ("model", "tokenizer", "data", "data_config", "split", "eval", "eval_split", "eval_fraction", "documents")


@dataclass(slots=True)
class RunRecord:
    """The settings of a training in its folder, and whether it is finished."""

    folder: Path
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    is_finished: bool = False

    @staticmethod
    def of(options: TrainOptions, inputs: Mapping[str, str]) -> RunRecord:
        """Makes the record of a training, or reads that of an earlier run of the same one.

        Raises:
            CheckpointError: If the folder has something else, or a training with other settings.
        """
        folder = Path(options.out)
        settings = {name: value for name, value in asdict(options).items() if name not in (*_FREE, *_READ)}
        made = RunRecord(folder, settings, dict(inputs))
        if (folder / NAME).is_file():
            made._compare(folder / NAME)
        elif folder.exists() and (not folder.is_dir() or any(path.name != _LOCK for path in folder.iterdir())):
            raise CheckpointError(
                f"`{folder}` has other files, and no training of this command.\n"
                "  A training has a folder of its own, and goes on only with what it has written itself.\n"
                "  Give another --out, or an empty folder."
            )
        return made

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keeps other processes from training in the folder, which is made if it isn't there.

        Raises:
            CheckpointError: If another process trains there, or the system refuses the folder.
        """
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(disk.locked(self.folder / _LOCK))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process trains in `{self.folder}`.\n  A folder has one training at a time.\n"
                    "  Wait for its end, or give another --out."
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"`{self.folder}` can't be made: {error}.\n  A training writes its checkpoints into a folder.\n"
                    "  Give another --out, in a folder where you may write."
                ) from error
            yield

    def write(self) -> None:
        """Writes the record; a process that is killed leaves the old one or the new one."""
        content = {"version": _VERSION, **{name: value for name, value in asdict(self).items() if name != "folder"}}
        partial = self.folder / f".{NAME}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / NAME)
        disk.sync_folder(self.folder)

    def _compare(self, path: Path) -> None:
        """Takes over whether the training of the folder is finished, if it is this one."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            before, inputs, self.is_finished = (
                dict(found["settings"]),
                dict(found["inputs"]),
                found["is_finished"] is True,
            )
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"`{path}` can't be read: {error!r}.\n  It has the settings of the training in this folder.\n"
                "  Give another --out, or remove the folder."
            ) from error
        differing = [
            f"{flag(name)}: {_shown(value)} is given, but {_shown(before.get(name))} was"
            for name, value in self.settings.items()
            if value != before.get(name)
        ]
        names = sorted({*inputs, *self.inputs})
        differing += [f"{name}: not the one it was" for name in names if inputs.get(name) != self.inputs.get(name)]
        # Where no checkpoint was begun, a run ended before it trained anything, by an error say.
        if differing and (self.is_finished or any(self.folder.glob("checkpoint-*"))):
            lines = [f"`{self.folder}` has the training of other settings:", *differing]
            lines += ["A training goes on with its settings; only --device, --memory, --host-memory, --offload,"]
            lines += [
                "--block-bytes, --chunking and --report-to may change.",
                "Repeat the command as it was, or give another --out.",
            ]
            raise CheckpointError("\n  ".join(lines))


def recorded_batch(folder: Path) -> int | None:
    """Sequences in a micro-batch of the training in a folder; None if there is none, or its record can't be read."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))["settings"]["batch"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # what is wrong with it is said when it is compared
    return found if isinstance(found, int) else None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "nothing" if value is None else str(value)


def fingerprint(source: str) -> str:
    """Tells one model from another, by names and contents of the files in its folder; a hub's name stands for itself.

    The weights are read whole: two models may differ in their last layers alone, and adapters belong to one of them.
    """
    path = Path(source)
    if not path.exists():
        return f"hub:{source}"
    digest = hashlib.sha256()
    for each in sorted(each for each in path.iterdir() if each.suffix in (".json", ".safetensors")):
        digest.update(f"{each.name}\0{each.stat().st_size}\0".encode())
        with each.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
