"""The command line: `megatrain demo`, `megatrain verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from megatrain import demo
from megatrain.errors import MegatrainError
from megatrain.verify import command as verify_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None takes it from the shell.

    Returns:
        The exit status: 0 if all went well, 1 if the command found a fault, 2 if it was used wrongly, 130 if
        it was interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except MegatrainError as error:
        print("\n".join([f"megatrain: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmegatrain: interrupted; nothing was saved, and nothing is left running.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatrain", description="A compiler that trains PyTorch models larger than device memory."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    _add_demo(commands)
    verify_command.add_arguments(
        commands.add_parser("verify", help="compare a model with eager PyTorch, and find the first block that differs")
    )
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small language model through the whole compiler, and show what ran",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    recipe = demo.Recipe()
    add = parser.add_argument
    add("--device", default=recipe.device, help="compute device; None is the accelerator if there is one")
    add("--memory", default=recipe.memory, help="device-memory budget")
    add("--steps", type=_positive(int), default=recipe.steps, help="optimizer steps")
    add("--seconds", type=_positive(float), default=recipe.seconds, help="training ends then at the latest")
    add("--batch-size", type=_positive(int), default=recipe.batch_size, help="windows of text per step")
    add("--context", type=_positive(int), default=recipe.context, help="bytes per window")
    add("--width", type=_positive(int), default=recipe.width, help="hidden states, a multiple of 64")
    add("--depth", type=_positive(int), default=recipe.depth, help="decoder layers")
    add("--sample-bytes", type=_positive(int), default=recipe.sample_bytes, help="length of the sample")
    add("--seed", type=int, default=recipe.seed, help="fixes weights, batches and sample")
    parser.set_defaults(run=_run_demo)


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        # `not >` rejects NaN too.
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return number


def _run_demo(options: argparse.Namespace) -> int:
    given = {f.name: getattr(options, f.name) for f in fields(demo.Recipe) if f.name in options}
    return 0 if demo.run(demo.Recipe(**given)) else 1


if __name__ == "__main__":
    sys.exit(main())
