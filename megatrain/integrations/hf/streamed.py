"""Streamed: a mixin that makes any Hugging Face trainer stream its model, with the stock run's bits.

    from megatrain.integrations.hf import Streamed

    class StreamedSFT(Streamed, SFTTrainer): ...

    StreamedSFT(model=model, args=args, train_dataset=rows, megatrain_memory="10GiB").train()

All names of `transformers.Trainer` that aren't in its documentation stand in this file, and `check_transformers` looks
whether they are there.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import megatrain
from megatrain.device.device_budget import DeviceMemoryError
from megatrain.errors import OptionError, ScheduleError
from megatrain.integrations.hf.newest_whole import clear, newest_whole
from megatrain.integrations.hf.one_step import OneStep
from megatrain.integrations.hf.requirements import check_transformers, refuse, refuse_trainer, refuse_unsaved, why_not
from megatrain.integrations.hf.several import group_of, refuse_group, refuse_several, refuse_trial, with_generators
from megatrain.integrations.hf.whole_calls import check_streams, give_losses, note_where_parts_run
from megatrain.optim.grad_scaler import host_scaler
from megatrain.training.compiled.module import CompiledModule
from megatrain.training.step import TrainStep


def join(accelerator: Any) -> None:
    """Has an accelerator leave the gradients of a model that streams to training steps.

    A loss counts as in the stock run, where gradients are the mean over the processes. An accelerator of a single
    process stays as it is, unless torchrun has started the process.
    """
    count = accelerator.num_processes
    if accelerator.distributed_type == DistributedType.NO:
        return
    prepare, backward = accelerator.prepare_model, accelerator.backward

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        # What is prepared for training is wrapped in DistributedDataParallel, what is prepared for evaluation isn't.
        return prepare(model, device_placement, evaluation_mode or _streams(model))

    def backward_of_part(loss: torch.Tensor, **kwargs: Any) -> None:
        backward(loss / count, **kwargs)

    accelerator.prepare_model, accelerator.backward = prepare_model, backward_of_part


def _streams(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(each, CompiledModule) for each in model.modules())


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch within accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def replace_step(optimizer: Any, has_updated: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Replaces the step of accelerate's object around an optimizer, not that of the optimizer.

    Args:
        optimizer: Stays as it is if it isn't accelerate's, or its step was replaced before.
        has_updated: Says that the update was made, so that nothing is left for a step.
    """
    if not isinstance(optimizer, AcceleratedOptimizer) or vars(optimizer).get("step") is not None:
        return
    update: Callable[..., Any] = optimizer.step

    def step(optimizer: Any, closure: Any = None) -> Any:
        return None if has_updated(plain(optimizer)) else update(closure)

    vars(optimizer)["step"] = types.MethodType(step, optimizer)


# What TRL's engine calls for its weights, and the name that vLLM has for one; both aren't documented.
_WEIGHTS, _NAME = "_iter_named_params", "_fix_param_name_to_vllm"


def fill(engine: Any, compiled: CompiledModule) -> None:
    """Has TRL's inference engine (vLLM, on the same card or a server's) take its weights from a model that streams.

    Args:
        engine: The trainer's `vllm_generation`; None without one. Older ones read the parameters, which is as right.
        compiled: Gives its slots back before the engine wakes up.
    """
    if engine is None or not hasattr(engine, _WEIGHTS):
        return
    renamed = getattr(engine, _NAME)
    synchronize, is_server = engine.sync_weights, engine.mode == "server"

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in compiled.megatrain.weights():
            # A server gets them from card to card.
            yield renamed(name), tensor.to(engine.accelerator.device) if is_server else tensor

    def sync_weights() -> None:
        compiled.megatrain.release()
        synchronize()

    vars(engine).update({_WEIGHTS: named, "sync_weights": sync_weights})


def longest_row(dataset: Any) -> int | None:
    """How many tokens the longest row of a data set has; None if looking would take long, or rows have no tokens."""
    if isinstance(dataset, list | tuple):
        rows: Any = dataset
        known = [len(row["input_ids"]) for row in rows if isinstance(row, Mapping) and "input_ids" in row]
        return max(known, default=None)
    if "input_ids" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "with_format"):
        return None
    import pyarrow.compute  # the data set has it

    compute: Any = pyarrow.compute
    tables = dataset.with_format("arrow").select_columns(["input_ids"])
    if not hasattr(tables, "__len__"):
        return None  # it comes from the network, row by row
    found = [compute.max(compute.list_value_length(each["input_ids"])).as_py() for each in tables.iter(10_000)]
    return max(found, default=None)


PREFIX = "megatrain_"
_OF_COMPILE = (
    "device", "memory", "precision", "activations", "transfer", "block_bytes", "masters", "opaque", "passes",
    "chunking", "kernels", "hardware", "lengths", "chaos", "recording",
)  # fmt: skip
_OF_STEP = ("overlap", "spread", "on_nonfinite", "plan", "offload", "host_memory")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of `megatrain.compile` and `megatrain.TrainStep`, under their own names."""

    compile: Mapping[str, Any]
    step: Mapping[str, Any]

    @staticmethod
    def taken_from(keywords: dict[str, Any], arguments: Any) -> StreamOptions:
        """Reads the options, and takes them out of the keywords.

        Args:
            keywords: Of the trainer's constructor. A keyword comes before a training argument of the same name.
            arguments: The training arguments, or None.

        Raises:
            OptionError: If there is no such option.
        """
        names = [PREFIX + name for name in (*_OF_COMPILE, *_OF_STEP)]
        found = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
        for name in [name for name in keywords if name.startswith(PREFIX)]:
            if name not in names:
                raise OptionError(
                    f"{name}= isn't an option.\n"
                    "  A trainer takes those of megatrain.compile and megatrain.TrainStep, after `megatrain_`.\n"
                    f"  Use one of: {', '.join(names)}."
                )
            found[name] = keywords.pop(name)
        given = {name.removeprefix(PREFIX): value for name, value in found.items()}
        return StreamOptions(
            {name: value for name, value in given.items() if name in _OF_COMPILE},
            {name: value for name, value in given.items() if name in _OF_STEP},
        )


FOLDER = "megatrain"
"""Within a trainer's checkpoint: all that the next training step depends on besides the weights."""
_Base: Any = object


class Streamed(_Base):
    """Makes the trainer that follows it stream the model: parameters stay in host memory.

    The trainer gets the plain model, as always. All micro-batches of an update (gradient accumulation) run as one
    training step of megatrain, with clipping and the update in it. The trainer's own code computes the losses: its
    `compute_loss`, `compute_loss_func`, label smoothing, metrics. Losses, norms, learning rates and parameters are
    those of the stock run, bit for bit where the device repeats itself.

    What can't be one training step runs as calls that stream, with autograd, and a `StreamedCallsWarning` says why: a
    loss that calls the model several times, an optimizer that needs a closure, callbacks that read gradients, fp16's
    loss scaling.

    Under torchrun, all processes train one model: each takes the micro-batches that accelerate gives it, and all make
    the same updates, with the bits of one process that has all of them; see docs/several-devices.md.

    Args:
        args: Those of the trainer.
        kwargs: Those of the trainer, and `megatrain_memory`, `megatrain_precision` and so on: each option of
            `megatrain.compile`, and `overlap`, `spread`, `on_nonfinite`, `plan`, `offload` and `host_memory` of
            `TrainStep`. Training arguments of these names count as well.

    Raises:
        OptionError: If an option or a training argument can't be right with a model that streams.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_transformers()
        arguments = self._arguments_of(args, kwargs)
        self._stream_options = StreamOptions.taken_from(kwargs, arguments)
        self._one_step: OneStep | None = None
        self._is_made = self._is_given_compiled = False
        refuse(arguments)
        super().__init__(*args, **kwargs)
        refuse(self.args)
        refuse_trainer(self)
        refuse_several(self)
        self._is_made = True
        self.model = self.model_wrapped = self.callback_handler.model = self._streaming(self.model)
        fill(getattr(self, "vllm_generation", None), self.model)

    @property
    def train_step(self) -> TrainStep | None:
        """The training step that takes the updates; None before the first, and if updates aren't training steps."""
        return None if self._one_step is None else self._one_step.step

    def _arguments_of(self, args: Any, kwargs: Any) -> Any:
        names = list(inspect.signature(super().__init__).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}.get("args")

    def _streaming(self, model: nn.Module) -> CompiledModule:
        if isinstance(model, CompiledModule):
            if self._stream_options.compile:
                raise OptionError(
                    f"the model is compiled, and the trainer has options for compiling: "
                    f"{', '.join(f'megatrain_{name}' for name in self._stream_options.compile)}.\n"
                    "  A model is compiled once.\n  Give the trainer the plain model, or leave these options out."
                )
            compiled, self._is_given_compiled = model, True
            refuse_group(compiled, self.accelerator)
        else:
            options = {"device": self.args.device, "process_group": group_of(self.accelerator)}
            compiled = megatrain.compile(model, **{**options, **self._stream_options.compile})
        of_losses = give_losses(vars(self).get("loss"), compiled)
        make = functools.partial(self._make_step, compiled)
        self._one_step = OneStep(compiled, make, self._settings, self._is_models_own_loss, vars(self), of_losses)
        return compiled

    # -- where the model is ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator as always; fp16's scaler looks for infinite gradients where these are."""
        super().create_accelerator_and_postprocess()
        join(self.accelerator)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler = host_scaler(self.accelerator.scaler)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The parameters stay on the host."""

    def call_model_init(self, trial: Any = None) -> Any:
        """Makes the model anew: a plain one for the constructor, which compiles it, and later one that streams."""
        model = super().call_model_init(trial)
        return self._streaming(model) if self._is_made else model

    # -- updates -----------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next update, as the trainer collects them."""
        one_step = self._known()
        check_streams(self.model, one_step.compiled)
        if one_step.several is not None:
            epoch_iterator = iter(one_step.several.collected(epoch_iterator, num_batches))
        found = super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        self._look_ahead(len(found[0]))
        one_step.begin(len(found[0]))
        return found

    def _look_ahead(self, count: int) -> None:
        """Looks whether an update of so many micro-batches can be one training step, as far as that is known."""
        reason = why_not(self, Streamed, count)
        if reason is not None:
            self._known().fall_back(reason)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes a micro-batch; the last one of an update runs the training step.

        Returns:
            The loss of the micro-batch; before the last one zero, and then losses are made good.
        """
        if callable(turn := getattr(self.optimizer, "train", None)):
            turn()  # as the trainer does for each micro-batch: a schedule-free optimizer steps in this mode alone
        try:
            losses = self._known().taken(functools.partial(super().training_step, model), *args, **kwargs)
        except (ScheduleError, DeviceMemoryError) as error:
            if self.args.auto_find_batch_size:  # accelerate knows the lack of memory by these words
                raise RuntimeError(f"{error}\nThe step is out of memory.") from error
            raise
        except RuntimeError as error:
            note_where_parts_run(error)
            raise
        if not losses:
            return torch.zeros((), device=self.args.device)
        self._count_losses(losses[:-1])
        return losses[-1]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # A training that stops between two micro-batches counts the losses of those that were there.
        self._count_losses(self._known().run_waiting())
        return super()._finalize_training(*args, **kwargs)

    def _count_losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Adds losses as the trainer does after each micro-batch, without a wait for the device."""
        total: torch.Tensor = self._tr_loss
        for loss in losses:
            mean = total / (1 + self.state.global_step - self._globalstep_last_logged)
            total += torch.where(torch.isfinite(loss), loss, mean) if self.args.logging_nan_inf_filter else loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm() if self._known().has_updated else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._known().has_updated:
            grad_norm = self._norm()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _norm(self) -> Any:
        step = self._known().step
        assert step is not None
        return step.progress.grad_norm

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the scheduler as always, of an optimizer whose step leaves out what a training step has done."""
        # Before the scheduler, which notices when a step is replaced later.
        self._replace_step()
        return super().create_scheduler(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._replace_step()  # where the user has made the scheduler
        one_step = self._known()
        if one_step.compiled.megatrain.lengths is not None and (length := longest_row(self.train_dataset)):
            one_step.longest = length, self.args.per_device_train_batch_size
        one_step.evaluates = self.args.eval_strategy != "no"
        several = self._known().several
        if several is not None:
            self._look_ahead(self.args.gradient_accumulation_steps)
            self._known().known_step()  # or there can be none, which is refused here
            several.begin(self, max_steps, train_dataloader, resume_from_checkpoint)
        return found

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        several = self._known().several
        if several is None:
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            return
        several.check_flags(self.control)
        # Each process has the sum of all losses. The trainer logs the mean over the processes, which is exact in fp64.
        wide = tr_loss.double()
        super()._maybe_log_save_evaluate(wide, *args, **kwargs)
        tr_loss.copy_(wide)

    def _replace_step(self) -> None:
        # What the model's trainer at that time has: a trial makes another model, and another optimizer.
        replace_step(self.optimizer, lambda plain: self._known().has_updated or self._known().update(plain))

    def _make_step(self, compiled: CompiledModule, loss: Any) -> TrainStep:
        return TrainStep(compiled, plain(self.optimizer), **self._options_of_step(loss))

    def _settings(self) -> tuple[Any, ...]:
        return plain(self.optimizer), self.args.max_grad_norm, self._is_models_own_loss()

    def _options_of_step(self, loss: Any) -> dict[str, Any]:
        # The trainer logs the norm also where it doesn't clip.
        norm = {"max_grad_norm": self.args.max_grad_norm or None, "report_norm": True}
        reads = "loss" if self._is_models_own_loss() and getattr(self.args, "past_index", -1) < 0 else "all"
        return {"loss": loss, "reads": reads, "reduce": "sum", **norm, **self._stream_options.step}

    def _is_models_own_loss(self) -> bool:
        # A script may set another one on the object.
        is_own = getattr(self.compute_loss, "__func__", None) is transformers.Trainer.compute_loss
        return is_own and self.compute_loss_func is None and self.label_smoother is None

    def _known(self) -> OneStep:
        assert self._one_step is not None
        return self._one_step

    # -- checkpoints -------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own. `True` goes on from the newest checkpoint that was written to its end."""
        refuse_trial(self.accelerator, args[0] if args else kwargs.get("trial"))
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_whole(self.args.output_dir) or True
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._known().begin(1)  # nothing of this training waits, or hides what the optimizer does later

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            clear(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if (several := self._known().several) is not None:
            several.wait("a checkpoint")  # whose last file says that all others are there

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with_generators(checkpoint, self.args.process_index, self.args.world_size, super()._load_rng_state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self._known().known_step()
        if step is not None:
            step.save(Path(output_dir) / FOLDER, scheduler=self.lr_scheduler, weights=False)
            return
        refuse_unsaved(self.model.megatrain.options.precision, self._known().reason)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint) / FOLDER
        if folder is None or not folder.exists():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._known().load(
            lambda loss: TrainStep.load(
                folder, self.model, plain(self.optimizer), scheduler=self.lr_scheduler, **self._options_of_step(loss)
            )
        )


class Trainer(Streamed, transformers.Trainer):  # pyright: ignore[reportUntypedBaseClass]
    """`transformers.Trainer` with a model that streams; see `Streamed`."""
