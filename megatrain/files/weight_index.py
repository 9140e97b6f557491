"""Index: the JSON next to sharded weights that says which name is in which file."""

from __future__ import annotations

from pathlib import Path

from megatrain.errors import WeightsError
from megatrain.files.json_rules import anything, inside, mapping, name, problems, read_json, record

ENDING = ".safetensors.index.json"

SCHEMA = record({"weight_map": mapping(name, inside)}, others=anything)
"""What an index may hold. Those who write one add fields of their own."""


def indexes_of(path: Path) -> list[Path]:
    """Lists the indexes in a folder, or the one that `path` is."""
    if path.is_dir():
        return sorted(path.glob(f"*{ENDING}"))
    return [path] if path.name.endswith(ENDING) else []


def read_index(index: Path) -> dict[str, Path]:
    """Returns the file of each name that an index lists.

    Raises:
        WeightsError: If it can't be read, isn't what `SCHEMA` says, or names a file that isn't there.
    """
    try:
        document = read_json(index)
    except (OSError, ValueError) as error:
        raise _no_index(index, str(error)) from error
    wrong = problems(SCHEMA, document, "it")
    if wrong:
        raise _no_index(index, "; ".join(wrong))
    files = {each: index.parent / file for each, file in document["weight_map"].items()}
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
