"""verified(): a trainer that streams, next to the same class without the mixin: how the two are made and compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.compiled.module import CompiledModule
from megatrain.integrations.hf.several import refuse_trial
from megatrain.integrations.hf.stream_options import StreamOptions
from megatrain.integrations.hf.trainer_copies import (
    Untouched,
    copied_trainer,
    other_models,
    refuse_to_repeat,
    without,
)
from megatrain.integrations.hf.trainer_report import TrainerReport
from megatrain.integrations.hf.verify_trainer import Sides, verify_trainer
from megatrain.runtime.streams.chaos import Recording
from megatrain.verification.run_script import nothing_asked

_OF_STREAMING = ("_stream_options", "_one_step")
"""Attributes of a trainer that streams which its copies do without."""


def verified(
    trainer: Any,
    mixin: type,
    updates: int,
    tolerance: float | None,
    options: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> TrainerReport:
    """Verifies a trainer; see `Streamed.verify`.

    Args:
        trainer: Whose class has the mixin.
        mixin: What makes it stream.
        updates: How many are compared.
        tolerance: Relative difference that counts as equal.
        options: Of `megatrain.compile`, in place of the trainer's.
        given: To `train`, by name; the copies get nothing of it.
    """
    refuse_trial(trainer.accelerator, "verify")
    refuse_to_repeat(trainer, trainer._stream_options, tolerance, given or {})
    kind = without(type(trainer), mixin)
    order = type(trainer).__mro__
    sides = Sides(
        lambda folder, recording: _streamed_copy(trainer, options or {}, folder, recording),
        lambda folder: _stock_copy(trainer, kind, folder),
        (type(trainer).__name__, order[order.index(mixin) + 1].__name__),
        trainer.model.megatrain.options.device,
        trainer.model,
        _steps,
    )
    untouched = Untouched(trainer.model, *other_models(trainer))
    with nothing_asked():
        try:
            return verify_trainer(sides, updates, tolerance)
        finally:
            untouched.check()


def _streamed_copy(trainer: Any, options: Mapping[str, Any], folder: Path, recording: Recording) -> Any:
    copied = copied_trainer(trainer, type(trainer), folder, left_out=_OF_STREAMING, streams=True)
    own = trainer._stream_options
    copied._stream_options = StreamOptions({**own.compile, **options, "recording": recording}, own.step)
    copied._one_step = None
    copied.create_accelerator_and_postprocess()
    copied.model = copied.model_wrapped = copied.callback_handler.model = copied._streaming(copied.model)
    return copied


def _stock_copy(trainer: Any, kind: type, folder: Path) -> Any:
    copied = copied_trainer(trainer, kind, folder, left_out=_OF_STREAMING, streams=False)
    copied.create_accelerator_and_postprocess()
    for name, value in vars(trainer).items():
        if isinstance(value, CompiledModule):  # of which the copy is plain
            getattr(copied, name).to(copied.args.device)
    return copied


def _steps(streamed: Any) -> tuple[int, str | None]:
    one_step = streamed._known()
    return (0 if one_step.step is None else one_step.step.progress.count), one_step.reason
