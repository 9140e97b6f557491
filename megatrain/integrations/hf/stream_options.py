"""StreamOptions: what a trainer is told about streaming, as keywords or as training arguments named `megatrain_...`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.errors import OptionError

PREFIX = "megatrain_"
_OF_COMPILE = (
    "device", "memory", "precision", "activations", "transfer", "block_bytes", "masters", "opaque", "passes",
    "chunking", "kernels", "hardware", "chaos", "recording",
)  # fmt: skip
_OF_STEP = ("overlap", "spread", "on_nonfinite", "plan")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of `megatrain.compile` and `megatrain.TrainStep`, under their own names.

    Args:
        compile: Of the first.
        step: Of the second.
    """

    compile: Mapping[str, Any]
    step: Mapping[str, Any]

    @staticmethod
    def taken_from(keywords: dict[str, Any], arguments: Any) -> StreamOptions:
        """Reads the options, and takes them out of the keywords.

        Args:
            keywords: Of the trainer's constructor. A keyword comes before a training argument of the same name.
            arguments: The training arguments, or None.

        Raises:
            OptionError: If there is no such option.
        """
        names = [PREFIX + name for name in (*_OF_COMPILE, *_OF_STEP)]
        found = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
        for name in [name for name in keywords if name.startswith(PREFIX)]:
            if name not in names:
                raise OptionError(
                    f"{name}= isn't an option.\n"
                    "  A trainer takes those of megatrain.compile and megatrain.TrainStep, behind `megatrain_`.\n"
                    f"  Use one of: {', '.join(names)}."
                )
            found[name] = keywords.pop(name)
        given = {name.removeprefix(PREFIX): value for name, value in found.items()}
        return StreamOptions(
            {name: value for name, value in given.items() if name in _OF_COMPILE},
            {name: value for name, value in given.items() if name in _OF_STEP},
        )
