"""need_libraries(): says which optional dependency a fine-tuning lacks."""

from __future__ import annotations

import importlib.util

from megatrain.errors import OptionError

_NEEDED = ("transformers", "accelerate")
_WHY = {
    "train": "It trains with transformers' own Trainer; adapters are peft's, data sets those of datasets.",
    "plan": "A configuration is one of transformers; adapters are peft's.",
}


def need_libraries(*, lora: bool, data_set: bool = False, command: str = "train") -> None:
    """Looks for the libraries of Hugging Face, without importing them.

    Args:
        lora: Adapters are trained.
        data_set: The data is a data set, not a file.
        command: Which command needs them.

    Raises:
        OptionError: With the line that installs what is missing.
    """
    needed = [*_NEEDED, *(["peft"] if lora else []), *(["datasets"] if data_set else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"megatrain {command} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed.\n"
            f"  {_WHY[command]} All are optional dependencies.\n"
            f"  Install what is missing: pip install {' '.join(missing)}"
        )
