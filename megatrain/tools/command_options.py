"""Options of commands: each with the rule that its values keep and the words of `--help`, declared in one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatrain.base.checks import Rule


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    Args:
        rule: What its value keeps, or what makes this rule where that needs torch; None for a switch, without a value.
        text: What `--help` says.
        kind: What its text becomes: `str`, `int` or `float`.
        is_needed: It must be given.
        is_position: It is given by its place, without a flag.
        alone: Its value where the flag is given without one; None if it needs one.
    """

    rule: Rule | Callable[[], Rule] | None
    text: str
    kind: type = str
    is_needed: bool = False
    is_position: bool = False
    alone: Any = None


def rule_of(module: str, name: str, key: str | None = None) -> Callable[[], Rule]:
    """The rule that a module has by this name, or in a table by this key; `--help` needs neither it nor torch."""

    def rule() -> Rule:
        found: Any = getattr(import_module(module), name)
        return found if key is None else found[key]

    return rule


def of_compile(name: str) -> Callable[[], Rule]:
    """The rule of an option of `megatrain.compile`."""
    return rule_of("megatrain.planning.options", "COMPILE", name)


OF_COMPILE: Mapping[str, Option] = {
    name: Option(of_compile(name), text)
    for name, text in {
        "device": "compute device; the accelerator if it has what a run needs, else the CPU",
        "memory": "device-memory budget, such as 10GiB",
        "activations": "auto, keep, recompute or offload",
        "transfer": "auto, copy or bind",
        "block_bytes": "target size of a block's state, such as 64MiB",
        "chunking": "auto, always or never: chunks of a head's loss, tiles of tokens",
        "kernels": "auto, eager, graphs (recorded) or inductor (compiled)",
    }.items()
}
"""Those of `megatrain.compile` that commands have."""


def flag(name: str) -> str:
    """Returns an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    """Adds options by their names in Python. What isn't given is left out of the namespace."""
    for name, option in options.items():
        if option.is_position:
            parser.add_argument(name, help=option.text)
        elif option.rule is None:
            parser.add_argument(flag(name), action="store_true", default=argparse.SUPPRESS, help=option.text)
        else:
            more: dict[str, Any] = {"type": option.kind, "required": option.is_needed, "default": argparse.SUPPRESS}
            if option.alone is not None:
                more |= {"nargs": "?", "const": option.alone}
            parser.add_argument(flag(name), help=option.text, **more)


def given_options(options: Mapping[str, Option], namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns what was given, checked.

    Raises:
        OptionError: In the words of the command: `--lr=0.0 is not above 0`.
    """
    given = {name: getattr(namespace, name) for name in options if name in namespace}
    for name, value in given.items():
        option = options[name]
        if option.rule is not None:
            rule = option.rule if isinstance(option.rule, Rule) else option.rule()
            has_default = not (option.is_position or option.is_needed)
            rule.check_flag(name if option.is_position else flag(name), value, has_default=has_default)
    return given
