"""Dealing: what ranks do around a step whose blocks are dealt to their devices.

Each rank gives micro-batches, and gets those of its host: it takes the step of one process, restricted to its own
blocks. So nothing has to be divided, and sums have the order of one process: they begin with those of the host before.
Which tables these are, the ranks agree on before; see `agreed_tables`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatrain.compiled.inside import Compiled
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.blockwise import takes_turns
from megatrain.optim.impostor import Optimizer
from megatrain.passes.interpret import reads_values
from megatrain.passes.split.dealt_program import whole_of
from megatrain.ranks.host import Host
from megatrain.ranks.ranks import Ranks
from megatrain.training.attempts.agreed_tables import AgreedTables, Tell
from megatrain.training.batch import MicroBatch
from megatrain.training.setup import Setting
from megatrain.training.shares import Counts, Shares

_REPLICATE = 'Train with across_devices="replicate"'


class Dealing:
    """What ranks do around such steps.

    Args:
        compiled: The model.
        ranks: Those that train it.
        tell: See `Tell`.

    Attributes:
        tables: Has the ranks run tables that are one step together.
    """

    def __init__(self, compiled: Compiled, ranks: Ranks, tell: Tell):
        self._compiled, self._ranks, self._of_tell = compiled, ranks, tell
        self.tables = AgreedTables(ranks, tell)

    @staticmethod
    def of(compiled: Compiled, tell: Tell) -> Dealing | None:
        """Returns it; None if blocks aren't dealt."""
        ranks = compiled.ranks
        return None if ranks is None or ranks.mailbox is None else Dealing(compiled, ranks, tell)

    def _tell(self, word: dict[str, Any], at: str = "a step") -> Sequence[Mapping[str, Any]]:
        return self._of_tell(self._ranks, word, at)

    @property
    def _host(self) -> Host:
        assert self._ranks.host is not None
        return self._ranks.host

    # -- micro-batches -------------------------------------------------------------------------------------

    def of_all(self, batches: Sequence[MicroBatch], at: str) -> list[MicroBatch]:
        """The micro-batches of all ranks of this host, in the order of the ranks.

        Args:
            batches: Of this rank.
            at: The call in which all ranks are, in words.

        Raises:
            ExecuteError: If one of this rank's can't be given to others.
            RanksError: If another rank fails.
        """
        own = packed(batches)
        self._tell({}, at)  # all have some: a rank that has failed says so here
        device = self._compiled.options.device.torch_device
        found: list[MicroBatch] = []
        for index, content in enumerate(self._ranks.exchange_bytes(own, is_of_host=True)):
            found += batches if index == self._host.index else _unpacked(content, device)
        return found

    def said(self, counts: Counts) -> dict[str, Any]:
        """What other hosts get to know of this one's micro-batches, by its first rank: all of its ranks count them.

        Counts stay on the device where no other host needs them.
        """
        number = len(counts.found) * (self._host.index == 0)
        is_needed = number and not self._ranks.is_one_host
        return {**(counts.said() if is_needed else {"counts": []}), "micro_batches": number}

    def shares(self, counts: Counts, words: Sequence[Mapping[str, Any]]) -> Shares:
        """The factors of this host's micro-batches.

        Args:
            counts: How much each counts.
            words: What all ranks have `said`.

        Raises:
            OptionError: See `Shares`.
        """
        if self._ranks.is_one_host:
            return Shares(counts)
        return Shares(counts, others=words, rank=self._host.ranks[0])

    # -- the end of a step ---------------------------------------------------------------------------------

    def leave(self, setting: Setting) -> None:
        """Leaves flags and texts in attributes, as the forward does on the rank that makes the losses."""
        if not setting.kind.has_losses:
            for traced in setting.traced:
                traced.side_outputs.put(())  # without tensors: `check` refuses those

    def losses(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The losses, which one rank of each host has, in their order, on the host."""
        own = [[str(loss.dtype).removeprefix("torch."), float(loss)] for loss in losses]
        words = self._tell({"losses": own})
        told = [loss for word in words for loss in word["losses"]]
        return [torch.tensor(value, dtype=getattr(torch, dtype)) for dtype, value in told]


def check_dealt(setting: Setting, optimizers: Sequence[Optimizer]) -> None:
    """Refuses a step that can't have the bits of one process where blocks are dealt.

    Raises:
        ExecuteError: If the model reads values of its forward, or leaves some behind.
        OptimizerError: If an optimizer has hooks on its steps.
    """
    for program in setting.programs:
        if any(reads_values(template.graph) for template in whole_of(program).templates.values()):
            raise ExecuteError(
                "Python code reads values of the forward, and the blocks are dealt to devices.\n"
                "  Such a forward may have to run again with another capture, while other ranks go on.\n"
                f"  {_REPLICATE}, or compute with tensors what the code decides."
            )
    for traced in setting.traced:
        sides = traced.side_outputs
        left = [*(sides.names if sides.structure.placeholders else ()), *traced.written_inputs.names]
        if left:
            raise ExecuteError(
                f"the forward leaves a tensor in `{left[0]}`, and the blocks are dealt to devices.\n"
                "  Only one rank would have it afterwards.\n"
                f"  Return it from the model instead. {_REPLICATE} otherwise."
            )
    if any(map(takes_turns, optimizers)):
        raise OptimizerError(
            "hooks run before or after the optimizer's step, or it updates all parameters at once, and the blocks are "
            "dealt to devices.\n"
            "  Such code may look at all gradients, but each rank has those of its own blocks.\n"
            f"  Remove the hooks, or take an optimizer of torch. {_REPLICATE} otherwise."
        )


def packed(batches: Sequence[MicroBatch]) -> bytes:
    """Micro-batches as they go to other ranks.

    Raises:
        ExecuteError: If they can't be pickled.
    """
    content = io.BytesIO()
    try:
        torch.save([(batch.given, batch.args, dict(batch.kwargs)) for batch in batches], content)
    except Exception as error:  # a batch may hold anything
        raise ExecuteError(
            f"a micro-batch can't be given to other ranks: {type(error).__name__}: {error}\n"
            '  With across_devices="round" all ranks run all micro-batches, and get each other\'s pickled.\n'
            f"  Give tensors, numbers, texts and containers of these. {_REPLICATE} otherwise."
        ) from error
    return content.getvalue()


def _unpacked(content: bytes, device: torch.device) -> list[MicroBatch]:
    def place(storage: Any, location: str) -> Any:
        return None if location == "cpu" else torch.serialization.default_restore_location(storage, str(device))

    found: Any = torch.load(io.BytesIO(content), map_location=place, weights_only=False)
    return [MicroBatch(given, args, kwargs) for given, args, kwargs in found]
