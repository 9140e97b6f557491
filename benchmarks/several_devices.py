"""Predicted steps of several cards of one host, for docs/several-devices.md.

    python -m benchmarks.several_devices                 # plans all rows, in some minutes
    python -m benchmarks.several_devices --tokens 65536

The plans are those of `megatrain plan --devices`: of configurations on meta, no weights, no GPU. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from benchmarks.machines import LENGTH, asked
from megatrain.errors import ScheduleError
from megatrain.planning.planner import Planner
from megatrain.planning.what_if.several_devices import best_on_devices
from megatrain.sizing.sized import batch_on

# A card, and what a host of eight of them reads and writes in a second: an assumption, of two sockets with eight and
# twelve channels of memory each.
MACHINES = {"rtx-4090": "400GB", "h100-sxm": "600GB"}
# What a card gets from the others of its host in a second: nothing without NVLink; 450 GB on paper with it.
LINKS = {"rtx-4090": "none", "h100-sxm": "400GB"}
NUMBERS = (2, 4, 8)
TOKENS = (65536, 262144)


def rows(tokens: list[int], size: str) -> Iterator[str]:
    """Yields the lines of the table."""
    yield (
        "| cards | host memory | links | tokens a step | step | tokens/s | of as many alone | "
        "reads and writes of the host | weights |"
    )
    yield f"|{' --- |' * 9}"
    options, source = asked(size)
    planner = Planner(source)
    kinds = [(name, link) for name in MACHINES for link in dict.fromkeys(["none", LINKS[name]])]
    cases = [(*kind, number, count) for kind in kinds for count in tokens for number in NUMBERS]
    for name, link, number, count in tqdm(cases, unit="plan", disable=None):
        given = replace(options, hardware=name, host_bandwidth=MACHINES[name], tokens_per_step=count)
        samples = count // number // LENGTH
        tried = batch_on(planner, given, {"sequence": LENGTH}, samples, name).tried
        found = best_on_devices([each.plan for each in tried], number, link=link)
        assert found.tokens_per_s is not None
        try:
            found.check()
            note = ""
        except ScheduleError:
            note = ", refused"
        links = link if link == "none" else f"{link}/s"
        yield (
            f"| {number} x {name} | {MACHINES[name]}/s | {links} | {count} | {found.step_s:.2f} s | "
            f"{found.tokens_per_s:,.0f} | {found.efficiency:.2f} | {found.simulation.host_s:.2f} s{note} | "
            f"{found.across_devices} |"
        )


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--size", default="8B")
    options = parser.parse_args()
    for line in rows(options.tokens, options.size):
        print(line, flush=True)


if __name__ == "__main__":
    main()
