"""Compares whole training steps with other trainers that offload to the host, through an outside harness.

The harness is a folder with a `bench_peer.py`: it trains one peer on seeded weights and batches in a process of its
own, and prints a line of JSON at the end. For megatrain it calls `peer_plugin.py`. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = {
    "ours": "train",
    "ours-default": "train_default",
    "ours-graphs": "train_graphs",
    "ours-copy": "train_copy",
    "ours-inductor": "train_inductor",
    "eager-inductor": "train_eager_inductor",
}
"""What `peer_plugin.py` trains: megatrain, and both sides under torch.compile."""
PEERS = ("eager", "fsdp2", "deepspeed", *PLUGINS)


def command(harness: Path, peer: str, arguments: list[str]) -> list[str]:
    """The command that trains a peer for some steps."""
    chosen = [peer]
    if peer in PLUGINS:
        plugin = f"benchmarks.peer_plugin:{PLUGINS[peer]}"
        chosen = ["plugin", "--plugin", plugin, "--plugin-path", str(ROOT), "--label", peer]
    return [sys.executable, str(harness / "bench_peer.py"), "--peer", *chosen, *arguments]


def train(harness: Path, peer: str, arguments: list[str], limit: float) -> dict[str, Any]:
    """Trains a peer.

    Returns:
        The harness's measurements, or the reason of a failure as `error`.
    """
    try:
        done = subprocess.run(
            command(harness, peer, arguments), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit status {done.returncode}"}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Lists medians over rounds; a ratio divides a round's median by eager's or, without eager, by the first peer's."""
    base = found.get("eager") or next(iter(found.values()))
    lines = [f"{'':<16}{'step':>10}{'ratio':>8}{'processor':>11}{'peak of process':>17}{'last loss':>12}  optimizer"]
    for peer, rounds in found.items():
        failed = next((r["error"] for r in rounds if "error" in r), None)
        if failed is not None:
            lines.append(f"{peer:<16}{failed}")
            continue
        step, processor = (statistics.median(r[key] for r in rounds) for key in ("median_step_s", "median_cpu_s"))
        pairs = [(r, b) for r, b in zip(rounds, base, strict=True) if "error" not in b]
        ratio = statistics.median(r["median_step_s"] / b["median_step_s"] for r, b in pairs) if pairs else float("nan")
        peak = max(r["peak_host_rss"] for r in rounds) / 2**30
        last = rounds[-1]
        lines.append(
            f"{peer:<16}{step:>8.3f} s{ratio:>8.3f}{processor:>9.2f} s{peak:>13.2f} GiB{last['losses'][-1]:>12.6f}"
            f"  {last.get('optimizer', '')}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="All other arguments go to the harness, such as --model-config and --threads."
    )
    parser.add_argument("--harness", type=Path, required=True, help="the folder with bench_peer.py")
    parser.add_argument("--peers", nargs="+", default=["eager", "fsdp2", "deepspeed", "ours"], choices=PEERS)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--clips", nargs="+", type=float, default=[0.0, 1.0], help="gradient-norm clips; 0 is none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one peer in one round")
    parser.add_argument("--output", type=Path, help="a file for all lines of the harness")
    options, rest = parser.parse_known_args()
    if not (options.harness / "bench_peer.py").exists():
        parser.error(f"{options.harness} has no bench_peer.py")
    peers = [p for p in options.peers if p != "deepspeed" or importlib.util.find_spec("deepspeed") is not None]
    for dtype in options.dtypes:
        for clip in options.clips:
            found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
            for index in tqdm(range(options.rounds), desc=f"{dtype}, clip {clip:g}", unit="round"):
                shift = index % len(peers)
                for peer in (*peers[shift:], *peers[:shift]):
                    arguments = [*rest, "--dtype", dtype, "--clip", str(clip)]
                    found[peer].append(train(options.harness, peer, arguments, options.limit))
                    if options.output is not None:
                        with options.output.open("a") as file:
                            print(json.dumps(found[peer][-1]), file=file)
            print(f"\n{dtype}, " + (f"clipped at {clip:g}" if clip else "not clipped"))
            print(table(found), flush=True)
    for peer in set(options.peers) - set(peers):
        print(f"\n{peer} is not installed.")


if __name__ == "__main__":
    main()
