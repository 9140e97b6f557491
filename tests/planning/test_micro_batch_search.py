"""Which micro-batches are planned before the shortest step is known."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.planning.planned_step import shortest_step
from megatrain.scheduler.builder.bound import StepBound


def step(step_s: float, *, bound_s: float, reason: str = "compute, in this memory", target: Any = torch.relu) -> Any:
    """A planned step as the search sees it."""
    graph = SimpleNamespace(nodes=[SimpleNamespace(target=target)])
    return SimpleNamespace(
        fits=True, step_s=step_s, simulation=object(), lower_bound=StepBound(bound_s, reason),
        program=SimpleNamespace(templates={"t": SimpleNamespace(graph=graph)}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("largest", "others", "has_adapters", "tried"),
    [
        (step(1.02, bound_s=1.0), (0.9, 0.8), False, (4,)),
        (step(1.05, bound_s=1.0), (0.9, 0.8), False, (2, 4)),  # too far from its bound; the next is close to its own
        (step(1.02, bound_s=1.0, reason="copies of weights"), (0.9, 0.8), False, (2, 4)),
        (step(1.02, bound_s=1.0), (0.9, 0.8), True, (1, 2, 4)),
    ],
)
def test_a_step_close_to_its_bound_by_compute_ends_the_search(
    largest: Any, others: tuple[float, float], has_adapters: bool, tried: tuple[int, ...]
) -> None:
    steps = {4: largest, 2: step(others[0], bound_s=0.89), 1: step(others[1], bound_s=0.79)}
    size, _, seen = shortest_step((1, 2, 4), steps.__getitem__, has_adapters=has_adapters)
    assert (size, tuple(seen)) == (tried[0], tried)


def test_tiles_may_become_needless_in_smaller_micro_batches() -> None:
    tiled = TiledRegion.__new__(TiledRegion)
    steps = {2: step(1.01, bound_s=1.0, target=tiled), 1: step(0.7, bound_s=0.69)}
    assert shortest_step((1, 2), steps.__getitem__, has_adapters=False)[0] == 1
