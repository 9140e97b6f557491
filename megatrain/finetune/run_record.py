"""RunRecord: what a folder was trained with, so that the same command goes on and another one is refused."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.errors import CheckpointError
from megatrain.files import disk
from megatrain.files.json_file import of_kind, read_json
from megatrain.finetune.fine_tuning import FineTuning, flag

NAME = "megatrain_train.json"
_VERSION = 1
# A run may go on in another folder, on another device and with another budget: its numbers stay. What is read is
# compared by its contents.
_READ = ("model", "tokenizer", "data", "data_config", "split", "eval_data", "eval_split")
_FREE = ("out", "device", "memory", "block_bytes", "chunking", *_READ)
_PIECE_BYTES = 2**24


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    settings: dict[str, Any]
    inputs: dict[str, str]
    is_finished: bool


@dataclass(slots=True)
class RunRecord:
    """The settings of a training in its folder, and whether it is finished.

    Args:
        folder: Of the training.
        settings: Options that its numbers depend on, by name.
        inputs: Fingerprints of model, data and tokenizer, by what they are.
        is_finished: The trained model is in the folder.
    """

    folder: Path
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    is_finished: bool = False

    @staticmethod
    def of(tuning: FineTuning, inputs: Mapping[str, str]) -> RunRecord:
        """Makes the record of a training, or reads that of an earlier run of the same one.

        Raises:
            CheckpointError: If the folder has something else, or a training with other settings.
        """
        folder = Path(tuning.out)
        settings = {name: value for name, value in asdict(tuning).items() if name not in _FREE}
        record = RunRecord(folder, settings, dict(inputs))
        path = folder / NAME
        if path.is_file():
            record.is_finished = record._compared(path)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"`{folder}` has other files, and no training of this command.\n"
                "  A training has a folder of its own, and goes on only with what it has written itself.\n"
                "  Give another --out, or an empty folder."
            )
        return record

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keeps other processes from training in the folder, which is made if it isn't there.

        Raises:
            CheckpointError: If another process trains there, or the system refuses the folder.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                f"`{self.folder}` can't be made: {error}.\n  A training writes its checkpoints into a folder.\n"
                "  Give another --out, in a folder where you may write."
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process trains in `{self.folder}`.\n  A folder has one training at a time.\n"
                    "  Wait for its end, or give another --out."
                ) from error
            yield
        finally:
            os.close(descriptor)

    def write(self) -> None:
        """Writes the record; a process that is killed leaves the old one or the new one."""
        content = {
            "version": _VERSION,
            "settings": self.settings,
            "inputs": self.inputs,
            "is_finished": self.is_finished,
        }
        partial = self.folder / f".{NAME}.partial"
        with partial.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / NAME)
        disk.sync_folder(self.folder)

    def _compared(self, path: Path) -> bool:
        """Returns whether the training of the folder is finished, if it is this one."""
        try:
            found: _Stored = of_kind(read_json(path), _Stored, NAME)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"`{path}` can't be read: {error}.\n  It has the settings of the training in this folder.\n"
                "  Give another --out, or remove the folder."
            ) from error
        settings, inputs, is_finished = found.settings, found.inputs, found.is_finished
        now = json.loads(json.dumps(self.settings))
        differing = [
            f"{flag(name)}: {_shown(now[name])} is given, but {_shown(settings.get(name))} was"
            for name in now
            if now[name] != settings.get(name)
        ]
        names = sorted({*inputs, *self.inputs})
        differing += [f"{name}: not the one it was" for name in names if inputs.get(name) != self.inputs.get(name)]
        # Where no checkpoint was begun, a run ended before it trained anything, by an error say.
        if differing and (is_finished or any(self.folder.glob("checkpoint-*"))):
            raise CheckpointError(
                "\n  ".join(
                    [
                        f"`{self.folder}` has the training of other settings:",
                        *differing,
                        "A training goes on with its settings; only --device, --memory, --block-bytes and\n  "
                        "--chunking may change.",
                        "Repeat the command as it was, or give another --out.",
                    ]
                )
            )
        return is_finished


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "nothing" if value is None else str(value)


def fingerprint(source: str) -> str:
    """Tells one model or tokenizer from another, by names and contents of the files in its folder.

    The weights are read whole: two models may differ in their last layers alone, and adapters belong to one of them.

    Args:
        source: A file, a folder, or a name on the hub, which stands for itself.
    """
    path = Path(source)
    if not path.exists():
        return f"hub:{source}"
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    for each in files:
        if each.suffix in (".json", ".safetensors", ".model", ".jinja", ".txt"):
            with each.open("rb") as file:
                digest.update(f"{each.name}\0{each.stat().st_size}\0".encode())
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
