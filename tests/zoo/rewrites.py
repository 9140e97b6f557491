"""`python -m tests.zoo.rewrites`: which models of the zoo get chunks and tiles, and that none of them is wrong.

Each model that returns a `loss` is captured with this loss alone, as a training step does. Heads are computed in chunks
of 4 rows, regions of tokens in tiles of 4. `check_rewrite` compares gradients over random weights and inputs. A model
whose way depends on values is compared with eager on its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

import megatrain
from megatrain.errors import LowerError, MegatrainError
from megatrain.passes import check_rewrite
from megatrain.passes.rewrites import tile_tokens as token_regions
from megatrain.passes.rewrites import token_rules as token_trials
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.passes.rewrites.tiled_region import TiledRegion
from tests.runtime.parity import loss_of
from tests.zoo.case import Case
from tests.zoo.collect import cases
from tests.zoo.run import fresh, seed

_ROWS = 4
# Texts of the zoo have 7 tokens and more. Calls are tried on fewer, a number that is rare among other sizes.
_TRIED = 5
# Of the largest gradient of a model; sums over chunks and tiles associate otherwise.
_CLOSE = 1e-5
# Rounding gets smaller by 5e8 in double precision, a fault doesn't.
_CLOSE_IN_DOUBLE = 1e-12


class LossAlone(nn.Module):
    """A model that returns its loss, or all that it returns if there is none.

    Args:
        model: Called with the same arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        loss = getattr(result, "loss", None)
        return result if loss is None else loss


@dataclass(frozen=True, slots=True)
class Found:
    """What the rewrites made of one case.

    Args:
        case: Its name.
        family: The file it is in.
        losses: Calls of a cross-entropy, or of a negative log-likelihood, in its graph.
        chunked: Those of them that are computed in chunks.
        blocks: Blocks of the program.
        tiled: Blocks that have a region in tiles.
        verdict: `"equal"`, `"DIFFERENT"`, `"as it is"`, or why nothing was compared.
    """

    case: str
    family: str
    losses: int = 0
    chunked: int = 0
    blocks: int = 0
    tiled: int = 0
    verdict: str = "as it is"


def in_pieces(traced: megatrain.TracedModule) -> megatrain.TracedModule:
    """Both rewrites, as a step that lacks memory has them."""
    return tile_tokens(chunk_head_loss(traced, rows=_ROWS), rows=_ROWS)


def found_in(case: Case) -> Found:
    """Captures a case, rewrites it, and compares."""
    found = partial(Found, case.name, case.family)
    if any(importlib.util.find_spec(package) is None for package in case.needs):
        return found(verdict="skipped: a package isn't installed")
    try:
        model, (args, kwargs) = LossAlone(fresh(case)), case.inputs(0)
        traced = megatrain.trace(model, args, kwargs)
        program = megatrain.lower(traced, rewrites=[in_pieces])
        targets = [[n.target for n in program.templates[b.template].graph.nodes] for b in program.blocks]
        found = partial(
            found,
            losses=sum(node.target in (F.cross_entropy, F.nll_loss) for node in traced.graph.nodes),
            chunked=sum(isinstance(target, HeadLoss) for each in targets for target in each),
            blocks=len(program.blocks),
            tiled=sum(any(isinstance(target, TiledRegion) for target in each) for each in targets),
        )
        return found(verdict=_verdict(case))
    except MegatrainError as error:
        return found(verdict=f"refused: {str(error).splitlines()[0]}")
    except Exception as error:  # the case is at fault, or its package: the zoo's own table tells which
        return found(verdict=f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _verdict(case: Case) -> str:
    """Compares gradients of the model as it is and rewritten."""
    try:
        report = check_rewrite(LossAlone(fresh(case)), in_pieces, *case.inputs(0), trials=1)
    except LowerError:  # the way that the model takes depends on values
        return "equal" if _is_equal_as_given(case) else "DIFFERENT"
    if not report.changed:
        return "as it is"
    if not report.ok:
        print(f"{case.name}: {report}", flush=True)
    return "equal" if report.ok or _is_equal_in_double(case) else "DIFFERENT"


def _is_equal_in_double(case: Case) -> bool:
    """Tells rounding from a fault, where the terms of a gradient nearly cancel out."""
    arguments = pytree.tree_map_only(torch.Tensor, _doubled, case.inputs(0))
    report = check_rewrite(LossAlone(fresh(case)).double(), in_pieces, *arguments, trials=1, tolerance=_CLOSE_IN_DOUBLE)
    print(report, flush=True)
    return report.ok


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _is_equal_as_given(case: Case) -> bool:
    """Compares the rewritten model with eager on the case's own weights and inputs, where it can't be on others."""
    runs: list[list[torch.Tensor]] = []
    for is_rewritten in (False, True):
        model, (args, kwargs) = LossAlone(fresh(case)), case.inputs(0)
        call = megatrain.compile(model, device="cpu", passes=[in_pieces]) if is_rewritten else model
        seed(1)
        loss = loss_of(call(*args, **kwargs))
        assert loss is not None
        loss.backward()
        runs.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    pairs = list(zip(*runs, strict=True))
    largest = max(float(one.abs().max()) for one, _ in pairs)
    return all(bool((one - other).abs().max() <= _CLOSE * largest) for one, other in pairs)


def table(rows: Sequence[Found]) -> Iterator[str]:
    """Yields lines of Markdown: sums for each family."""
    yield "| family | models | with a loss of words | in chunks | with tiles | blocks, tiled | equal | other |"
    yield "| --- " * 8 + "|"
    families = dict.fromkeys(row.family for row in rows)
    for family in (*families, "all"):
        of = [row for row in rows if family in (row.family, "all")]
        losses, chunked = [sum(bool(getattr(row, name)) for row in of) for name in ("losses", "chunked")]
        tiled, equal = sum(bool(row.tiled) for row in of), sum(row.verdict == "equal" for row in of)
        other = sum(row.verdict not in ("equal", "as it is") for row in of)
        blocks = f"{sum(row.blocks for row in of)}, {sum(row.tiled for row in of)}"
        yield f"| {family} | {len(of)} | {losses} | {chunked} | {tiled} | {blocks} | {equal} | {other} |"


def main() -> int:
    """Returns 1 if a rewritten model has other numbers."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.rewrites", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name or family contains one of these, by commas")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in (token_regions, token_trials):
        patch.object(module, "FEW", _TRIED).start()
    only = options.only.split(",")
    chosen = [case for case in cases().values() if any(o in case.name or o == case.family for o in only)]
    rows: list[Found] = []
    for case in tqdm(chosen, unit="model", disable=None):
        rows.append(found_in(case))
        row = rows[-1]
        line = f"{row.family:12} {row.case:26} {row.chunked} of {row.losses} losses, {row.tiled} of {row.blocks} blocks"
        print(f"{line}  {row.verdict}", flush=True)
    lines = "\n".join(table(rows))
    print(lines)
    if options.markdown:
        options.markdown.write_text(lines + "\n")
    return int(any(row.verdict == "DIFFERENT" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
