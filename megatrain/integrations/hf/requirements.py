"""What a trainer that streams needs of transformers, and can't do with some training arguments."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.trainer_callback import TrainerCallback

from megatrain.errors import ExecuteError, OptionError, TorchError
from megatrain.integrations.hf.whole_calls import first_hooked

_NAMES = (
    "_clip_grad_norm", "_finalize_training", "_get_grad_norm", "_get_output_dir", "_load_optimizer_and_scheduler",
    "_load_rng_state", "_maybe_log_save_evaluate", "_move_model_to_device", "_prepare_for_training", "_save_checkpoint",
    "_save_optimizer_and_scheduler", "_save_rng_state",
    "call_model_init", "compute_loss", "create_scheduler", "get_batch_samples", "training_step",
)  # fmt: skip
"""The methods of `transformers.Trainer` that `Streamed` takes over."""
_IN_STEP = ("training_step", "_clip_grad_norm", "_get_grad_norm")
"""Those among them that a training step does without."""
_KNOWN = ("transformers", "trl", "sentence_transformers")
"""Libraries where these do no more than to compute a loss, run its backward, and clip and return the norm."""


def refuse(arguments: Any) -> None:
    """Refuses training arguments that can't be right with a model that streams.

    Raises:
        OptionError: Naming the first of them.
    """
    if arguments is None:
        return
    several = "Each of its processes has the whole model, which streams; processes divide the batches."
    own = "megatrain makes its own graphs of the model."
    stays = "The parameters stay in host memory, in the dtype in which the model was compiled."
    looks = (
        "It looks at the values that pass through each module, and at weights, which aren't where the model computes."
    )
    refused = {
        "fsdp": (bool(arguments.fsdp), several),
        "deepspeed": (bool(arguments.deepspeed), several),
        "debug='underflow_overflow'": ("underflow_overflow" in str(arguments.debug), looks),
        "torch_compile": (arguments.torch_compile, own),
        "fp16_full_eval": (arguments.fp16_full_eval, stays),
        "bf16_full_eval": (arguments.bf16_full_eval, stays),
    }
    for name, (is_given, rule) in refused.items():
        if is_given:
            raise OptionError(
                f"a trainer that streams can't use {name}.\n  {rule}\n"
                f"  Leave {name} out, or use the trainer without megatrain."
            )
    if arguments.n_gpu > 1:
        vars(arguments)["_n_gpu"] = 1  # as the trainer does for a model that it must not replicate


def why_not(trainer: Any, mixin: type, count: int) -> str | None:
    """Why an update of so many micro-batches can't be one training step, as far as that is known beforehand."""
    if trainer.accelerator.scaler is not None:
        return "fp16 scales the loss"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            return f"the callback {kind.__name__} may read gradients before the optimizer's step"
        if kind.on_optimizer_step is not TrainerCallback.on_optimizer_step:
            return f"the callback {kind.__name__} may read gradients after the optimizer's step"
    if count > 1 and (name := first_hooked(trainer.model)) is not None:
        return f"`{name}` has a hook that gets the gradient of each micro-batch"
    return own_method(type(trainer), mixin)


def own_method(kind: type, mixin: type) -> str | None:
    """Says which method that a training step does without is a user's own; None if there is none."""
    for method in _IN_STEP:
        owner = next(each for each in kind.__mro__ if each is not mixin and method in vars(each))
        if owner.__module__.partition(".")[0] not in _KNOWN:
            return f"{owner.__name__} has a {method} of its own"
    return None


def refuse_trainer(trainer: Any) -> None:
    """Refuses trainers of TRL that call the model's parts by themselves.

    Raises:
        OptionError: Naming the trainer.
    """
    if hasattr(trainer, "_forward_redirection"):
        name = next(kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl")
        raise OptionError(
            f"{name} can't train a model that streams.\n"
            "  It calls the model's body and head by themselves, in a function that it puts in place of `forward`.\n"
            "  Only calls of the whole model stream.\n"
            "  Use trl.experimental.gkd.GKDTrainer, which calls the whole model, or the trainer without megatrain."
        )


def refuse_unsaved(precision: str, reason: str | None) -> None:
    """Refuses to save masters of updates that are no training steps.

    Raises:
        ExecuteError: If the model has masters.
    """
    if precision != "fp32":
        raise ExecuteError(
            "the trainer can't save this run so that it can be resumed.\n"
            f"  The masters of bf16 parameters are saved with a training step, and there is none: {reason}.\n"
            '  Use megatrain_precision="fp32", or save_only_model=True.'
        )


def check_transformers() -> None:
    """Looks whether this version of transformers has what `Streamed` takes over.

    Raises:
        TorchError: If it hasn't.
    """
    missing = [name for name in _NAMES if not hasattr(transformers.Trainer, name)]
    if missing:
        raise TorchError(
            f"transformers {transformers.__version__} has no Trainer.{missing[0]}.\n"
            "  A trainer that streams takes the place of this method.\n"
            "  Use another version of transformers; docs/trainers.md says which."
        )
