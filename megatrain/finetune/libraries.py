"""need_libraries(): says which optional dependency a fine-tuning lacks."""

from __future__ import annotations

import importlib.util

from megatrain.errors import OptionError

_NEEDED = ("transformers", "accelerate")


def need_libraries(*, lora: bool) -> None:
    """Looks for the libraries of Hugging Face, without importing them.

    Args:
        lora: Adapters are trained.

    Raises:
        OptionError: With the line that installs what is missing.
    """
    needed = [*_NEEDED, "peft"] if lora else [*_NEEDED]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"megatrain train needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed.\n"
            "  It trains with transformers' own Trainer; adapters are peft's. Both are optional dependencies.\n"
            f"  Install what is missing: pip install {' '.join(missing)}"
        )
