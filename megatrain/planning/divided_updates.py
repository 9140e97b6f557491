"""Whether the updates of a model may come in sections, or must wait for all gradients, by its optimizers."""

from __future__ import annotations

from torch import nn

from megatrain.optim.blockwise import takes_turns
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.masters.registry import Masters
from megatrain.optim.need import divides_updates
from megatrain.passes.program import Program
from megatrain.planning.host_plan import MASTER_OF, OptimizerLike, narrow_entries, over, updates_of
from megatrain.tracer.inventory import inventory


def may_divide(
    program: Program, model: nn.Module, optimizer: OptimizerLike | None, *, precision: str, masters: Masters | str
) -> bool:
    """Tells whether all updates may come in sections; the arguments are those of `host_plan`.

    Raises:
        OptionError: If the class of an optimizer can't be made over all parameters.
        OptimizerError: If two optimizers hold the same parameter.
    """
    if optimizer is None:
        return False
    kind = masters.kind if isinstance(masters, Masters) else masters
    entries, tensors = inventory(model)
    entries = narrow_entries(entries) if precision == "bf16" else entries
    optimizers, parameters = over(optimizer, entries, tensors)
    master = MASTER_OF[kind] if precision == "bf16" else WholeMaster
    return divides_updates(optimizers, updates_of((program,), entries, parameters, master))


def waits_for_all(model: nn.Module, optimizer: OptimizerLike) -> bool:
    """Tells whether code of the user's looks at all gradients: an optimizer's, or hooks on its step.

    Raises:
        OptionError, OptimizerError: As `may_divide`.
    """
    return any(map(takes_turns, over(optimizer, *inventory(model))[0]))
