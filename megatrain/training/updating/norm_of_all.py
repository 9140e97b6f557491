"""norm_of_all(): how the ranks to whose devices blocks are dealt find the norm of all gradients together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatrain.compiled.inside import Compiled
from megatrain.optim.norm import Meet
from megatrain.runtime.streams.events import Aborted


def norm_of_all(compiled: Compiled, numbers: Callable[[], Sequence[int]]) -> Meet | None:
    """Returns what tells the ranks of this host the norms of this rank's gradients, and returns those of all.

    Other hosts have the same gradients. It runs on a thread of the step, and gives up if the step has failed meanwhile.

    Args:
        compiled: The model, with its ranks.
        numbers: The number in the whole model of each block of this rank's present step.

    Returns:
        None if blocks aren't dealt.
    """
    ranks, engine = compiled.ranks, compiled.engine
    if ranks is None or ranks.mailbox is None:
        return None

    def go_on() -> None:
        if engine.streams.failure is not None:
            raise Aborted("the norm of all ranks' gradients")

    def meet(norms: Sequence[Any], first: tuple[int, int] | None) -> Sequence[Any]:
        own = None if first is None else [numbers()[first[0]], first[1]]
        return ranks.exchange({"norms": norms, "first": own}, go_on, is_of_host=True)

    return meet
