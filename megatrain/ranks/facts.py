"""Rank facts: everything that must be the same on all ranks, as texts by name; and models that ranks can't train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.files import Source
from megatrain.files.disk import Digest, bytes_of, obstacle
from megatrain.optim.blockwise import has_hooks
from megatrain.optim.masters.registry import Masters
from megatrain.optim.per_parameter import is_per_parameter
from megatrain.optim.proxy import Optimizer, attributes
from megatrain.passes.program import Program
from megatrain.planning.options import Limits
from megatrain.runtime.engine import Engine
from megatrain.tracer.spec import TensorSpec

Facts = dict[str, str]
ALONE = "Or compile without process_group, into DistributedDataParallel: each process has the whole model then."


class Trained(Protocol):
    """A compiled model; see `Compiled`."""

    @property
    def model(self) -> nn.Module:
        """The user's."""
        ...

    @property
    def options(self) -> Limits:
        """Of `compile`."""
        ...

    @property
    def engine(self) -> Engine:
        """Has the tensors."""
        ...

    @property
    def masters(self) -> Masters:
        """Of its parameters."""
        ...


def check_supported(programs: Sequence[Program], compiled: Trained, optimizers: Sequence[Optimizer]) -> None:
    """Refuses a step that several ranks can't take with the numbers of one process.

    Args:
        programs: What runs, one per micro-batch.
        compiled: The model.
        optimizers: The user's.

    Raises:
        ExecuteError: If the model writes buffers, or runs its own code; or if a hook would see a part of the gradients.
        OptimizerError: If an optimizer has parameters outside the model, or updates all of them at once.
    """
    for program in programs:
        written = [key for key, _ in program.commits]
        if written:
            raise ExecuteError(
                f"the forward writes the buffer `{written[0]}`, which can't be trained by several ranks.\n"
                "  In one process each micro-batch begins with what the one before has written; ranks run together.\n"
                "  Use a norm without running statistics (LayerNorm, GroupNorm), or model.eval() for these modules."
            )
        if program.opaque_calls:
            raise ExecuteError(
                "a module or a hook runs its own code at each step, which several ranks can't do yet.\n"
                "  Nobody knows what that code keeps from one micro-batch for the next.\n"
                "  print(compiled.program) says why a module is opaque; or train in one process."
            )
    if any(map(has_hooks, optimizers)):
        raise ExecuteError(
            "a hook on the optimizer's step would see the gradients of this rank's part alone.\n"
            "  Ranks that share a store divide the updates among them.\n"
            "  Give the hook to the parameters (register_post_accumulate_grad_hook), or train in one process."
        )
    at_once = next((type(each).__name__ for each in optimizers if not is_per_parameter(each)), None)
    if at_once is not None:
        raise OptimizerError(
            f"{at_once} may look at all parameters at once, and ranks divide the updates among them.\n"
            "  They share one copy of the parameters and of the optimizer's state.\n"
            f"  Call megatrain.optim.per_parameter.register({at_once}), if it updates each parameter by itself.\n"
            f"  {ALONE}"
        )
    own = set(compiled.model.parameters())
    others = sum(parameter not in own for parameter in parameters_of(*optimizers))
    if others:
        raise OptimizerError(
            f"{others} parameters of the optimizer don't belong to the model.\n"
            "  Gradients of parameters outside the model don't go from rank to rank.\n"
            "  Register them in a module of the model, or train in one process."
        )


def facts_of(compiled: Trained, optimizers: Sequence[Optimizer], rules: Mapping[str, object]) -> Facts:
    """Everything that must be the same on all ranks in each step, besides the blocks.

    Args:
        compiled: The model.
        optimizers: In the order of their steps.
        rules: Options of the step, and the progress of training.
    """
    options, device = compiled.options, compiled.options.device
    found: Facts = {
        "the version of torch": torch.__version__,
        "the device": device.kind,
        "precision": options.precision,
        "masters": options.masters,
        "chunking": options.chunking,
        "passes": ", ".join(getattr(each, "__qualname__", type(each).__qualname__) for each in options.passes)
        or "none",
        "the number of modules in training mode": str(sum(module.training for module in compiled.model.modules())),
        **{name: str(value) for name, value in rules.items()},
    }
    if device.is_host:
        # Kernels split sums among threads.
        found["the number of threads (OMP_NUM_THREADS)"] = str(torch.get_num_threads())
    return found | _settings(compiled, optimizers)


def _settings(compiled: Trained, optimizers: Sequence[Optimizer]) -> Facts:
    names = {id(p): name for name, p in nn.Module.named_parameters(compiled.model)}
    found: Facts = {}
    for index, optimizer in enumerate(optimizers):
        found[f"the class of optimizer {index}"] = type(optimizer).__qualname__
        found |= {f"{name} of optimizer {index}": _value(value) for name, value in attributes(optimizer).items()}
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                where = f"{name} of group {place} of optimizer {index}"
                found[where] = ", ".join(names[id(p)] for p in value) if name == "params" else _value(value)
    return found


def values_of(compiled: Trained) -> Facts:
    """What an update reads besides what ranks share: which parameters are trained, and digests of low halves."""
    found = {f"the value of `{name}`": digest_text(source) for name, source in compiled.masters.sources().items()}
    flags = {f"whether `{n}` is trained": str(p.requires_grad) for n, p in nn.Module.named_parameters(compiled.model)}
    return found | flags


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if (reason := obstacle(value)) is not None:
            return f"a tensor that {reason}"
        return repr(value.item()) if value.numel() == 1 else digest_text(Source.of(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"  # pyright: ignore[reportUnknownArgumentType]
    # Texts of other objects may have addresses.
    return repr(value) if isinstance(value, bool | int | float | complex | str | None) else type(value).__qualname__


def digest_text(source: Source) -> str:
    """A text that is the same for the same values only."""
    digest = Digest()
    for piece in source.pieces():
        digest.begin(bytes_of(piece))
        digest.wait()
    return f"{TensorSpec(source.spec.shape, source.spec.dtype)} with the digest {digest.finish()[:16]}"
