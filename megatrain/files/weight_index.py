"""Index: the JSON next to sharded weights that says which name is in which file."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from megatrain.checks import shown
from megatrain.errors import WeightsError
from megatrain.files.json_file import is_inside, of_kind, read_json

ENDING = ".safetensors.index.json"


class Index(TypedDict):
    """What an index holds. Those who write one add fields of their own."""

    weight_map: dict[str, str]


def indexes_of(path: Path) -> list[Path]:
    """Lists the indexes in a folder, or the one that `path` is."""
    if path.is_dir():
        return sorted(path.glob(f"*{ENDING}"))
    return [path] if path.name.endswith(ENDING) else []


def read_index(index: Path) -> dict[str, Path]:
    """Returns the file of each name that an index lists.

    Raises:
        WeightsError: If it can't be read, isn't an `Index`, or names a file that isn't there.
    """
    try:
        listed = of_kind(read_json(index), Index, "it")["weight_map"]
    except (OSError, ValueError) as error:
        raise _no_index(index, str(error)) from error
    outside = next((file for file in listed.values() if not is_inside(file)), None)
    if outside is not None:
        raise _no_index(index, f"it has {shown(outside)}, not the name of a file in this folder")
    files = {each: index.parent / file for each, file in listed.items()}
    for file in dict.fromkeys(files.values()):
        if not exists(file):
            raise WeightsError(
                f"`{file}` does not exist, but `{index.name}` names it.\n  Every file of an index is needed.\n"
                "  Copy the missing file next to the index."
            )
    return files


def exists(file: Path) -> bool:
    """Tells whether a path exists; a path that the system can't take doesn't exist."""
    try:
        return file.exists()
    except (OSError, ValueError):  # too long, say, or with a NUL in it
        return False


def _no_index(index: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"`{index}` isn't an index of safetensors files: {reason}.\n"
        '  An index is JSON that maps each name to a file in its own folder, under "weight_map".\n'
        "  Copy it again, or give weights= the list of files."
    )
