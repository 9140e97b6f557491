"""RepeatedGraph: a forward that is repeated and its backward, as one piece of recorded work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from megatrain.runtime.blocks.local_graph import LocalGraph
from megatrain.runtime.blocks.replays import Optionals, Replays


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedGraph:
    """Stands for the graph of a forward that runs with its backward.

    Args:
        inputs: Values of the template's inputs.
        state: The block's state, which stays where it is until the backward is over.
        replays: Runs the work.
        key: What the work depends on besides.
        again: Runs the forward under autograd: `again(inputs, state)`.
        drawing: Has the body draw the random numbers of the first run.
    """

    inputs: Sequence[torch.Tensor]
    state: Sequence[torch.Tensor]
    replays: Replays
    key: Hashable
    again: Callable[..., tuple[LocalGraph | RepeatedGraph, Sequence[torch.Tensor]]]
    drawing: Callable[[], AbstractContextManager[None]]

    def gradients(
        self, output_gradients: Optionals, carried: Optionals
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """See `LocalGraph.gradients`."""
        num_inputs, num_outputs = len(self.inputs), len(output_gradients)

        def work(given: Optionals) -> Optionals:
            inputs = whole(given[:num_inputs])
            graph, _ = self.again(inputs, self.state)
            own, parameters = graph.gradients(
                given[num_inputs : num_inputs + num_outputs], given[num_inputs + num_outputs :]
            )
            return [*own, *parameters]

        given = [*self.inputs, *output_gradients, *carried]
        with self.drawing():
            found = self.replays.run(work, given, self.state, self.key)
        return found[:num_inputs], found[num_inputs:]


def whole(tensors: Optionals) -> list[torch.Tensor]:
    """The same tensors, none of which is missing."""
    found = [tensor for tensor in tensors if tensor is not None]
    assert len(found) == len(tensors)
    return found
