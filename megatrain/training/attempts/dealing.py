"""Dealing: what ranks do around a step whose blocks are dealt to their devices.

Each rank gives micro-batches, and gets those of all: it takes the step of one process, restricted to its own blocks. So
nothing has to be divided, and sums have the order of one process. Before the first step with a table the ranks look at
the tables of all: together they are one step, in which every message meets its partner and nobody waits in a circle.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain.compiled.inside import Compiled
from megatrain.errors import ExecuteError, OptimizerError, RanksError
from megatrain.files.digest import digest_of
from megatrain.optim.blockwise import has_hooks
from megatrain.optim.impostor import Optimizer
from megatrain.passes.split.dealt_program import DealtProgram, deal, whole_of
from megatrain.ranks.ranks import Ranks
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.from_program import merge_programs
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.expectations import Expectation
from megatrain.training.batch import MicroBatch
from megatrain.training.setup import Setting

Tell = Callable[[Ranks, dict[str, Any], str], Sequence[Mapping[str, Any]]]
"""Tells all ranks something in a call that it names, and returns what all tell, by rank."""
# Tables whose digests are kept.
_MOST = 16
_REPLICATE = 'Train with across_devices="replicate"'


class Dealing:
    """What ranks do around such steps.

    Args:
        compiled: The model.
        ranks: Those that train it.
        tell: See `Tell`.
    """

    def __init__(self, compiled: Compiled, ranks: Ranks, tell: Tell):
        self._compiled, self._ranks, self._of_tell = compiled, ranks, tell
        self._checked: set[tuple[str, ...]] = set()
        self._digests: dict[int, tuple[Setting, dict[str, str]]] = {}

    @staticmethod
    def of(compiled: Compiled, tell: Tell) -> Dealing | None:
        """Returns it; None if blocks aren't dealt."""
        ranks = compiled.ranks
        return None if ranks is None or ranks.mailbox is None else Dealing(compiled, ranks, tell)

    def _tell(self, word: dict[str, Any], at: str = "a step") -> Sequence[Mapping[str, Any]]:
        return self._of_tell(self._ranks, word, at)

    # -- micro-batches -------------------------------------------------------------------------------------

    def of_all(self, batches: Sequence[MicroBatch], at: str) -> list[MicroBatch]:
        """The micro-batches of all ranks, in the order of the ranks.

        Args:
            batches: Of this rank.
            at: The call in which all ranks are, in words.

        Raises:
            ExecuteError: If one of this rank's can't be given to others.
            RanksError: If another rank fails.
        """
        own = _packed(batches)
        self._tell({}, at)  # all have some: a rank that has failed says so here
        device = self._compiled.options.device.torch_device
        found: list[MicroBatch] = []
        for rank, content in enumerate(self._ranks.exchange_bytes(own)):
            found += batches if rank == self._ranks.rank else _unpacked(content, device)
        return found

    # -- tables --------------------------------------------------------------------------------------------

    def agreed(self, setting: Setting, again: Callable[[], Setting], at: str) -> Setting:
        """Has all ranks run programs that are rewritten alike, and looks at their tables together.

        Args:
            setting: Of this rank.
            again: Makes another, with captures that are rewritten further.
            at: The call in which all ranks are, in words.

        Raises:
            RanksError: If another rank fails, or has other programs.
            ScheduleError: If the tables aren't those of one step.
        """
        while True:
            level = max(capture.least for capture in setting.captures)
            words = self._tell({"level": level, **self._digests_of(setting)}, at)
            most = max(word["level"] for word in words)
            if any(word["level"] != most for word in words):
                for capture in setting.captures:
                    capture.least = most
                setting = again()
                continue
            self._check_alike(words)
            tables = tuple(word["table"] for word in words)
            if tables not in self._checked:
                texts = [word["text"] for word in self._tell({"text": str(setting.schedule)}, at)]
                check_devices(_schedules(setting, texts))
                self._checked.add(tables)
            return setting

    def _digests_of(self, setting: Setting) -> dict[str, str]:
        """Of the table and of the programs, which are the same objects from step to step."""
        key = id(setting.schedule)
        if key not in self._digests or self._digests[key][0].programs != setting.programs:
            while len(self._digests) >= _MOST:
                self._digests.pop(next(iter(self._digests)))
            found = {"table": digest_of(str(setting.schedule).encode()), "program": _digest(setting)}
            self._digests[key] = setting.without_tensors(), found
        return self._digests[key][1]

    def _check_alike(self, words: Sequence[Mapping[str, Any]]) -> None:
        for rank, word in enumerate(words):
            if word["program"] != words[0]["program"]:
                raise RanksError(
                    f"the ranks differ: rank {rank} has captured another program than rank 0.\n"
                    "  Ranks to which the blocks of a model are dealt run one program.\n"
                    "  Build the model alike on each rank, with the same options and the same version of torch."
                )

    # -- what is refused -----------------------------------------------------------------------------------

    def check(self, setting: Setting, optimizers: Sequence[Optimizer]) -> None:
        """Refuses a step that can't have the bits of one process where blocks are dealt.

        Raises:
            ExecuteError: If the model reads values of its forward, or leaves some behind.
            OptimizerError: If an optimizer has hooks on its steps.
        """
        for program in setting.programs:
            whole = whole_of(program)
            nodes = [node for template in whole.templates.values() for node in template.graph.nodes]
            if any(isinstance(node.target, Expectation) for node in nodes):
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
        if any(map(has_hooks, optimizers)):
            raise OptimizerError(
                "hooks run before or after the optimizer's step, and the blocks are dealt to devices.\n"
                "  Such a hook may look at all gradients, but each rank has those of its own blocks.\n"
                f"  Remove the hooks. {_REPLICATE} otherwise."
            )

    # -- the end of a step ---------------------------------------------------------------------------------

    def leave(self, setting: Setting) -> None:
        """Leaves flags and texts in attributes, as the forward does on the rank that makes the losses."""
        if not setting.kind.has_losses:
            for traced in setting.traced:
                traced.side_outputs.put(())  # without tensors: `check` refuses those

    def losses(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The losses, which one rank has, in their order, on the host."""
        own = [[str(loss.dtype).removeprefix("torch."), float(loss)] for loss in losses]
        words = self._tell({"losses": own})
        (told,) = (word["losses"] for word in words if word["losses"])
        return [torch.tensor(value, dtype=getattr(torch, dtype)) for dtype, value in told]


def _schedules(setting: Setting, texts: Sequence[str]) -> list[Schedule]:
    """The tables of all devices, read from texts, with the workloads of their parts."""
    found: list[Schedule] = []
    for device, text in enumerate(texts):
        parts: dict[int, DealtProgram] = {}
        for program in setting.programs:
            assert isinstance(program, DealtProgram)
            parts[id(program)] = deal(program.whole, program.devices, device)
        workload = merge_programs([parts[id(program)] for program in setting.programs]).workload
        found.append(Schedule.parse(text, workload))
    return found


def _digest(setting: Setting) -> str:
    """Of the whole programs and how they are dealt; each rank's device has another number."""
    found = [program for program in setting.programs if isinstance(program, DealtProgram)]
    texts = [f"{p.devices}\n{p.whole}".replace(f"'{p.device}'", "'the device'") for p in found]
    return digest_of("\n".join(texts).encode())


def _packed(batches: Sequence[MicroBatch]) -> bytes:
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
