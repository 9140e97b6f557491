"""StepKind: the kind of a step: mode, transfer, micro-batches, updates, norm and outputs, stated once."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.base.checks import checked, count, one_of
from megatrain.errors import OptionError

MODES = ("train", "forward", "backward")
TRANSFERS = ("copy", "bind")
# When a block's parameters are updated: by the caller; once its gradients have left; once all have left; at the head
# of the next step; in both of these places, each some blocks.
UPDATES = ("none", "overlap", "serial", "deferred", "spread")
# Until when outputs of the model stay: the step ends; the backward of their micro-batch has begun.
OUTPUTS = ("keep", "release")
# A table has some rows for each micro-batch and block, and takes longer to check the more rows it has: this many take
# minutes.
MOST_MICRO_BATCHES = 10_000

KIND_RULES = {
    "mode": one_of(*MODES),
    "transfer": one_of(*TRANSFERS),
    "micro_batches": count(1, MOST_MICRO_BATCHES),
    "updates": one_of(*UPDATES),
    "outputs": one_of(*OUTPUTS),
}


@checked(**KIND_RULES)
@dataclass(frozen=True, slots=True)
class StepKind:
    """The kind of a step besides its blocks: a plain call, or a training step with micro-batches and updates.

    Args:
        mode: `"train"`, `"forward"` (inference), or `"backward"` (of a forward that ran earlier).
        transfer: `"copy"` fills slots; `"bind"` uses the weights in place, so slots have no bytes.
        micro_batches: How often each F and B runs (gradient accumulation). With several, these ops and `A` carry the
            micro-batch.
        updates: `"none"`, `"overlap"` (each `U` follows its `G`), `"serial"` (all `U` follow all `G`),
            `"deferred"` (each `U` of the previous step precedes the first `W` of this step that reads its parameters),
            or `"spread"` (some are deferred, the others overlap). A spread step has no norm. Blocks that the device
            updates never defer.
        clip: An `S` sums the squares of each block's gradients once they have left, and `N` takes the norm of all at
            the end; updates wait for the norm that they use.
        reports_norm: Each `U` of the host also sums the squares of the gradients that it uses, and `N` takes the norm
            of all at the end, for the log: no update waits for it. Only with updates of this step, and without `clip`.
        outputs: `"keep"`: outputs of the model stay until the step ends. `"release"`: until the first B of their
            micro-batch, before which the caller has computed a loss from them, or until their last reader.

    Raises:
        OptionError: If a part has another value, or belongs to a training step but the mode isn't `"train"`.

    >>> StepKind(updates="overlap").holds_gradients
    True
    """

    mode: str = MODES[0]
    transfer: str = TRANSFERS[0]
    micro_batches: int = 1
    updates: str = UPDATES[0]
    clip: bool = False
    outputs: str = OUTPUTS[0]
    reports_norm: bool = False

    def __post_init__(self) -> None:
        if self.mode != "train" and self.is_training_step:
            raise OptionError(
                f'mode="{self.mode}" with micro-batches, updates, a norm or released outputs is impossible.\n'
                '  These belong to a training step.\n  Use mode="train".'
            )
        if self.reports_norm and (self.clip or self.updates not in ("overlap", "serial")):
            raise OptionError(
                f'reports_norm=True with clip={self.clip} and updates="{self.updates}" is impossible.\n'
                "  Such a norm comes with the updates of its own step, which don't wait for it.\n"
                '  Use updates="overlap" or "serial", without clip; or clip=True alone.'
            )
        if self.clip and self.updates == "spread":
            raise OptionError(
                'clip=True with updates="spread" is impossible.\n'
                "  A clipped step can't update a block before it has the gradients of all.\n"
                '  Use updates="deferred" or "serial".'
            )

    @property
    def is_training_step(self) -> bool:
        """Whether it is more than one call: it has micro-batches, updates, a norm or released outputs."""
        return self.micro_batches > 1 or self.updates != "none" or self.clip or self.outputs != "keep"

    @property
    def may_update_there(self) -> bool:
        """Whether the device may update blocks: no update waits until all gradients have left."""
        return self.transfer == "copy" and self.updates in ("overlap", "spread", "deferred")

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of parameters wait on the host for a norm or an update; otherwise the caller gets them."""
        return self.updates != "none" or self.clip
