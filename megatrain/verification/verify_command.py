"""`megatrain verify module:function`, and `megatrain verify script.py`: verify from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.checks import count
from megatrain.errors import OptionError
from megatrain.options import COMPILE
from megatrain.verification.command_target import command_target, importable, users_failures
from megatrain.verification.run_script import UPDATES, TrainerVerdict, run_script
from megatrain.verification.side_by_side import CALL, verify_call

_SCRIPT = ".py"
STEPS = 2
_OPTIONS = ("device", "memory", "activations", "transfer", "block_bytes", "chunking")
_RULES = {
    **{name: COMPILE[name] for name in _OPTIONS},
    "steps": CALL["steps"],
    "seed": CALL["seed"],
    "tolerance": CALL["tolerance"],
    "updates": count(1, 10_000),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain verify` takes."""
    add = parser.add_argument
    add(
        "target",
        help="module:function or path/to/file.py:function; the function returns (model, inputs). Or script.py with its "
        "own arguments: a script that trains with a trainer of Hugging Face that streams",
    )
    add("--device", help="compute device; the accelerator if it has what a run needs, else the CPU")
    add("--memory", help="device-memory budget, such as 10GiB")
    add("--activations", help="auto, keep, recompute or offload")
    add("--transfer", help="auto, copy or bind")
    add("--block-bytes", help="target size of a block's state, such as 64MiB")
    add("--chunking", help="auto, always or never: chunks of a head's loss, tiles of tokens")
    add("--steps", type=int, help=f"training steps of a model (default: {STEPS})")
    add("--seed", type=int, help="seed of the steps of a model (default: 0)")
    add("--updates", type=int, help=f"updates of a script's trainer (default: {UPDATES})")
    add("--tolerance", type=float, help="relative difference that counts as equal (default: by dtype; of a script 0)")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def parted(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Parts a command line behind the script of `megatrain verify`: what follows is the script's own."""
    for place, text in enumerate(arguments if arguments[:1] == ["verify"] else ()):
        if text.endswith(_SCRIPT) and not text.startswith("-"):
            return arguments[: place + 1], arguments[place + 1 :]
    return arguments, ()


def run(options: argparse.Namespace) -> int:
    """Compares and prints the report.

    Returns:
        0 if all is equal, 1 if not.

    Raises:
        OptionError: If the target can't be used; with the user's traceback as a note if their code failed.
    """
    of_compile = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    is_script = options.target.endswith(_SCRIPT)
    _refuse_options_of_others(options, is_script=is_script)
    for name, rule in _RULES.items():
        if getattr(options, name) is not None:
            rule.check_flag(f"--{name.replace('_', '-')}", getattr(options, name))
    report = _of_script(options, of_compile) if is_script else _of_model(options, of_compile)
    print(report.to_json() if options.json else report)
    return 0 if report.ok else 1


def _of_script(options: argparse.Namespace, of_compile: Mapping[str, Any]) -> TrainerVerdict:
    updates = UPDATES if options.updates is None else options.updates
    with importable(f"{options.target}:"), users_failures(f"`{options.target}`"):
        return run_script(options.target, options.of_script, updates, options.tolerance, of_compile)


def _of_model(options: argparse.Namespace, of_compile: Mapping[str, Any]) -> TrainerVerdict:
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


def _refuse_options_of_others(options: argparse.Namespace, *, is_script: bool) -> None:
    """Refuses options that have no meaning for a model, or for a script."""
    if is_script:
        ways = {
            "device": "Its trainer has its own device; use_cpu=True is one of its training arguments.",
            "steps": "Give --updates.",
            "seed": "It has its own, and both runs begin with the same random numbers.",
        }
    else:
        ways = {"updates": "Give --steps."}
    for name, way in ways.items():
        if getattr(options, name) is not None:
            of = "a model" if is_script else "a script"
            raise OptionError(
                f"--{name} is for {of}, and `{options.target}` is {'a script' if is_script else 'a model'}.\n"
                f"  Options behind a script are the script's own; those before it are this command's.\n  {way}"
            )
