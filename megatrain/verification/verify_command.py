"""`megatrain verify module:function`: verify from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatrain.options import COMPILE
from megatrain.verification.command_target import command_target, importable, users_failures
from megatrain.verification.report import Report
from megatrain.verification.side_by_side import CALL, verify_call

STEPS = 2
_OPTIONS = ("device", "memory", "activations", "transfer", "block_bytes", "chunking")
_RULES = {
    **{name: COMPILE[name] for name in _OPTIONS},
    "steps": CALL["steps"],
    "seed": CALL["seed"],
    "tolerance": CALL["tolerance"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain verify` takes."""
    add = parser.add_argument
    add(
        "target",
        help="module:function or path/to/file.py:function; the function returns (model, inputs)",
    )
    add("--device", help="compute device; the accelerator if it has what a run needs, else the CPU")
    add("--memory", help="device-memory budget, such as 10GiB")
    add("--activations", help="auto, keep, recompute or offload")
    add("--transfer", help="auto, copy or bind")
    add("--block-bytes", help="target size of a block's state, such as 64MiB")
    add("--chunking", help="auto, always or never: chunks of a head's loss, tiles of tokens")
    add("--steps", type=int, help=f"training steps (default: {STEPS})")
    add("--seed", type=int, help="seed of the steps (default: 0)")
    add("--tolerance", type=float, help="relative difference that counts as equal (default: by dtype)")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compares and prints the report.

    Returns:
        0 if all is equal, 1 if not.

    Raises:
        OptionError: If the target can't be used; with the user's traceback as a note if their code failed.
    """
    of_compile = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    for name, rule in _RULES.items():
        if getattr(options, name) is not None:
            rule.check_flag(f"--{name.replace('_', '-')}", getattr(options, name))
    report = _of_model(options, of_compile)
    print(report.to_json() if options.json else report)
    return 0 if report.ok else 1


def _of_model(options: argparse.Namespace, of_compile: Mapping[str, Any]) -> Report:
    with importable(options.target):
        model, args, kwargs = command_target(options.target)
        with users_failures(f"a step of the model of `{options.target}`"):
            return verify_call(
                model,
                args,
                kwargs,
                of_compile,
                steps=STEPS if options.steps is None else options.steps,
                seed=options.seed or 0,
                tolerance=options.tolerance,
            )
