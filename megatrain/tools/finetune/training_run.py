"""train(): TRL's `SFTTrainer` with a model that streams: a plan before, a restart after a kill, a model at the end."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import math
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from trl import SFTConfig, SFTTrainer, get_training_chat_template, is_conversational

import megatrain
from megatrain.base.counts import counted
from megatrain.base.host_limits import available_bytes
from megatrain.base.progress import stage
from megatrain.base.sizes import parse_bytes
from megatrain.device import Device, find, usable
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import CheckpointError, OptionError
from megatrain.files.scratch_file import check_disk
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.integrations.hf import Streamed
from megatrain.integrations.hf.newest_whole import STATE, newest_whole
from megatrain.optim.fast.adamw_8bit import AdamW8bit
from megatrain.planning.advice import Spelling, refusal, size
from megatrain.planning.model_sizes import MICRO_BATCH, SEQUENCE
from megatrain.planning.options import given_bytes
from megatrain.planning.planned_step import PlannedStep, micro_batch_sizes, shortest_step
from megatrain.planning.planner import plan
from megatrain.tools.finetune.callbacks import LOSSES, Losses, StopBetweenSteps
from megatrain.tools.finetune.pretrained import (
    Adapters,
    longest,
    model_in_files,
    model_on_paper,
    read_config,
    read_model,
    read_tokenizer,
    readable,
)
from megatrain.tools.finetune.run_record import RunRecord, fingerprint, recorded_batch
from megatrain.tools.finetune.train_options import TrainOptions
from megatrain.tools.finetune.training_data import learnt, read_rows, survey
from megatrain.training.compiled.padding import bounds_of, brought_to
from megatrain.training.step_run import NotFiniteError

LENGTH, TOKENS_PER_STEP, EVAL_FRACTION = 2048, 16384, 0.05
_MULTIPLE = 8
_ENOUGH = 20
"""Steps of an epoch, below which a model hardly changes, and a warm-up takes too large a part of them."""
_KEPT_CHECKPOINTS = 2
"""The newest, and the one before it, for a kill while the newest is written."""
_MAX_GRAD_NORM = 1.0
# With --offload state stays in the memory that is free; the rest is for other programs.
_OF_FREE = 0.9
# What only a training needs that goes on. All else in a checkpoint is what save_pretrained() writes.
_OF_TRAINING = ("megatrain", STATE, "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*")
_IN_COMMAND: Spelling = {
    "block_bytes": lambda value: f"--block-bytes {size(value)}",
    "offload": lambda value: "--offload FOLDER, on a fast disk",
    "precision": lambda value: f"--precision {value}",
    "micro_batches": lambda value: f"--accumulate {value}",
    MICRO_BATCH: lambda value: f"--batch {value}",
    SEQUENCE: lambda value: f"--length {value}",
    "optimizer": lambda value: f"--optimizer {value.lower()}" if value == AdamW8bit.__name__ else None,
}
"""What the command has of a plan's options."""


def train(options: TrainOptions) -> None:
    """Plans, trains, evaluates and saves, and prints all of it; goes on where an earlier run of the same ended.

    Raises:
        OptionError: If a file or a data set can't be used.
        CheckpointError: If the folder has something else than this training, or another process trains there.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
        KeyboardInterrupt: Saying what is saved.
    """
    if torch.distributed.is_torchelastic_launched():
        raise OptionError(
            "megatrain train is one process, and torchrun has started it.\n"
            "  Several processes train one model by a script of your own.\n"
            "  Start it without torchrun; or write the script: docs/trainers.md has one for several processes."
        )
    run = _Run(options)
    settings = dataclasses.replace(options, batch=run.batch)
    record = RunRecord.of(settings, {"model": fingerprint(options.model), **run.digests})
    if record.is_finished:
        print(f"the training in `{record.folder}` is finished; there is nothing left to do.")
        return
    run.print_plan()
    with record.locked():
        try:
            run.go_on(record)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(run.saved(record.folder)) from interrupt


# -- the trainer -----------------------------------------------------------------------------------------------------


class _OnPaper(SFTTrainer):
    """TRL's trainer of a model without memory: it prepares the data, and sets the model up as for a training."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """There is nothing to move."""


class _StreamedSFT(Streamed, SFTTrainer):
    """TRL's trainer with a model that streams, on the model's own loss.

    TRL's fused head takes only the tokens that are learnt, so each number of them would be a schedule of its own; and
    its metrics of each token would be read. The model's own loss has the same value, one schedule, and chunks.
    """

    compute_loss = transformers.Trainer.compute_loss


class FusedAdamW(torch.optim.AdamW):
    """The trainer's AdamW, in one pass of fp32 parameters as well: so their state can be in a file."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, fused=True)


def machine_of_card(device: Device) -> Hardware | None:
    """The machine by whose times micro-batches are chosen; None on the host, whose rates nobody has measured."""
    return None if device.is_host else usual_machine(device)


# -- the run ---------------------------------------------------------------------------------------------------------


class _Run:
    """A training whose data is prepared and whose counts are known."""

    def __init__(self, options: TrainOptions) -> None:
        self.options, self._device = options, usable(options.device)
        self._host_memory = given_bytes(options.host_memory, "host_memory")
        if options.offload is not None:
            check_disk(Path(options.offload))
            if self._host_memory is None:
                self._host_memory = int(_OF_FREE * available_bytes())
        # A training that goes on has the micro-batches that it began with, on whichever device.
        self._recorded = None if options.batch else recorded_batch(Path(options.out))
        self._config = read_config(options.model)
        alpha = 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
        self._adapters = Adapters(options.lora_rank, alpha, options.lora_dropout) if options.lora else None
        self._tokenizer = read_tokenizer(options.tokenizer or options.model)
        self._arguments = self._trl_arguments(longest(self._config, options.length, LENGTH, "--length"))
        self._paper = self._on_paper()
        self._stays_in_files = False
        self._training, self._held_out = self._split()
        found = {"data": self._training, "evaluation data": self._held_out}
        surveys = {name: survey(rows) for name, rows in found.items() if rows is not None}
        self.digests = {name: digest for name, (_, _, digest) in surveys.items()}
        # All rows are padded to one width, so that one schedule serves every step; or to a few, of which this is the
        # largest.
        width = max(width for width, _, _ in surveys.values())
        if options.lengths is None:
            self._width = min(-(-width // _MULTIPLE) * _MULTIPLE, self._arguments.max_length)
        else:
            self._width = brought_to(width, options.lengths, bounds_of(self._config))
        self._check_ids(max(largest for _, largest, _ in surveys.values()))
        self._count()

    def _trl_arguments(self, length: int) -> Any:
        """TRL's arguments, except the counts, which the data decides.

        Raises:
            OptionError: If its device isn't the one that is asked for.
        """
        options, is_host = self.options, self._device.is_host
        arguments = SFTConfig(
            options.out, max_length=length, packing_strategy="wrapped",
            learning_rate=options.lr or (2e-4 if options.lora else 1e-5),
            max_grad_norm=_MAX_GRAD_NORM, lr_scheduler_type="linear", optim="adamw_torch_fused", seed=options.seed,
            # Losses of each step, so that those of a run that was interrupted are those of an undisturbed one.
            logging_steps=1, save_strategy="steps", save_total_limit=_KEPT_CHECKPOINTS, prediction_loss_only=True,
            bf16=False, gradient_checkpointing=False, use_cpu=is_host, dataloader_pin_memory=not is_host,
            report_to=[options.report_to] if options.report_to else [],
        )  # fmt: skip
        if find(arguments.device).torch_device != self._device.torch_device:
            raise OptionError(
                f"--device {options.device} is not the device on which transformers trains: {arguments.device}.\n"
                "  Its trainer takes the first device that the process sees.\n"
                "  Show it another one with CUDA_VISIBLE_DEVICES, and leave --device out."
            )
        return arguments

    @property
    def _is_coded(self) -> bool:
        return self.options.optimizer == "adamw8bit"

    def _on_paper(self) -> Any:
        """Lets TRL prepare the data, with a model that has no memory.

        Raises:
            OptionError: With the words of TRL, or of the chat template, if it refuses the data.
        """
        options = self.options
        read = partial(
            read_rows, config=options.data_config, documents=options.documents,
            has_template=self._tokenizer.chat_template is not None,
        )  # fmt: skip
        rows = read(options.data, split=options.split or "train")
        other, split = options.eval or (options.data if options.eval_split else None), options.eval_split or "train"
        held_out = read(other, split=split) if other else None
        way = "  Correct the data, or leave such rows out."
        with tempfile.TemporaryDirectory() as nowhere, readable(f"the data `{options.data}`", way):
            first = next(iter(rows))
            self._check_end(first)
            self._arguments.assistant_only_loss = is_conversational(first) and self._marks_turns()
            self._arguments.packing = "text" in first and not is_conversational(first) and "prompt" not in first
            # TRL writes the tokenizer's padding into it, with which an embedding would be made that never learns it.
            config = copy.deepcopy(self._config)
            return _OnPaper(
                model=model_on_paper(options.model, config, options.precision, self._adapters),
                args=dataclasses.replace(self._arguments, output_dir=nowhere), processing_class=self._tokenizer,
                train_dataset=rows, eval_dataset=held_out,
            )  # fmt: skip

    def _check_end(self, first: Any) -> None:
        """Refuses a tokenizer without an end token where TRL ends texts with one, or pads with one."""
        words = self._tokenizer
        if words.eos_token is None and (words.pad_token is None or not is_conversational(first)):
            raise OptionError(
                "the tokenizer has no end token.\n"
                "  Each text and completion ends with one; where there is no padding token, it also pads.\n"
                "  Name a tokenizer that has one with --tokenizer; or set `eos_token` and save the tokenizer again."
            )

    def _marks_turns(self) -> bool:
        """Whether the chat template says which tokens are the assistant's, or TRL knows one like it that does."""
        if self._tokenizer.chat_template is None:
            raise OptionError(
                "the tokenizer has no chat template, and the data has chats.\n"
                "  A chat template says how turns become one text; models that were tuned for chats have one.\n"
                "  Name a tokenizer that has one with --tokenizer, or give data with `text`."
            )
        try:
            get_training_chat_template(self._tokenizer)
        except ValueError:
            print("data    the loss is on all tokens: the chat template doesn't mark the assistant's turns")
            return False
        return True

    def _split(self) -> tuple[Any, Any]:
        options, training, held_out = self.options, learnt(self._paper.train_dataset), self._paper.eval_dataset
        held_out = None if held_out is None else learnt(held_out)
        fraction = EVAL_FRACTION if options.eval_fraction is None else options.eval_fraction
        if held_out is None and (num_out := int(fraction * len(training))):
            training, held_out = training.train_test_split(num_out, seed=options.seed).values()
        if not len(training) or (held_out is not None and not len(held_out)):
            raise OptionError(
                f"`{options.data}` has nothing to learn within {self._arguments.max_length} tokens.\n"
                "  A sequence needs a token that follows another one, and of prompts and chats an answer.\n"
                "  Give a larger --length, or check the data."
            )
        return training, held_out

    def _check_ids(self, largest: int) -> None:
        known = self._paper.model.get_input_embeddings().weight.shape[0]
        if largest >= known:
            raise OptionError(
                f"the tokenizer makes token id {largest}, and the model knows the ids below {known}.\n"
                "  Model and tokenizer belong together.\n  Give the model's own tokenizer with --tokenizer."
            )

    def _count(self) -> None:
        """Decides micro-batches and steps, by the options and by how much data there is.

        Raises:
            OptionError: If a step is to have less than one micro-batch, or the warm-up is longer than the training.
        """
        self._count_of(self.options.batch or self._recorded or 1)
        machine = machine_of_card(self._device)
        given = self.options.batch, self.options.accumulate, self._recorded
        if machine is None or given != (None, None, None):
            return
        samples, model = self._arguments.gradient_accumulation_steps, self._paper.model
        with stage("planning micro-batches"):
            batch, _, _ = shortest_step(
                micro_batch_sizes(samples),
                lambda size: self._planned(model, size, samples // size, machine),
                has_adapters=self.options.lora,
            )
        self._count_of(batch)  # as many samples in a step: their number is a multiple

    def _count_of(self, batch: int) -> None:
        """The same for micro-batches of so many sequences."""
        options, arguments = self.options, self._arguments
        self.batch = arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = batch
        tokens, num_batches = batch * self._width, math.ceil(len(self._training) / batch)
        asked = options.accumulate or (options.tokens_per_step or TOKENS_PER_STEP) // tokens
        if options.tokens_per_step is not None and not asked:
            raise OptionError(
                f"--tokens-per-step {options.tokens_per_step} is less than one micro-batch: {batch} x "
                f"{self._width} tokens.\n  A step has one micro-batch or more.\n"
                f"  Give --tokens-per-step {tokens}, or a smaller --length or --batch."
            )
        if options.accumulate is None and options.tokens_per_step is None and options.steps is None:
            asked = min(asked, num_batches // _ENOUGH)
        arguments.gradient_accumulation_steps = min(max(1, asked), num_batches)
        per_epoch = math.ceil(num_batches / arguments.gradient_accumulation_steps)
        num_steps = arguments.max_steps = options.steps or math.ceil((options.epochs or 1.0) * per_epoch)
        default = math.ceil(0.03 * num_steps) if num_steps >= _ENOUGH else 0
        arguments.warmup_steps = default if options.warmup is None else options.warmup
        if arguments.warmup_steps > num_steps:
            raise OptionError(
                f"--warmup {arguments.warmup_steps} is longer than the training of {counted(num_steps, 'step')}.\n"
                "  The learning rate rises during the warm-up, and falls from there to the last step.\n"
                f"  Give --warmup {num_steps}, or less."
            )
        arguments.save_steps = arguments.eval_steps = options.save_every or math.ceil(num_steps / 10)

    def print_plan(self) -> None:
        """Prints the plan of a step, before any weight is read, and refuses what doesn't fit."""
        options, arguments, model = self.options, self._arguments, self._paper.model
        held_out = "none are" if self._held_out is None else f"{len(self._held_out)} more are"
        trained = [p for p in model.parameters() if p.requires_grad]
        kind = f"adapters of rank {options.lora_rank}" if options.lora else "all weights"
        sizes = f"{arguments.gradient_accumulation_steps} x {counted(self.batch, 'sequence')}"
        most = "" if options.lengths is None else "at most "
        print(f"data    {counted(len(self._training), 'sequence')} of {most}{self._width} tokens; {held_out} evaluated")
        print(
            f"model   {type(model).__name__}, {kind}: {counted(sum(p.numel() for p in trained), 'parameter')} to train"
        )
        print(f"run     {counted(arguments.max_steps, 'step')} of {sizes}; a checkpoint every {arguments.save_steps}")
        if options.steps is None and arguments.max_steps < _ENOUGH:
            epochs = math.ceil(_ENOUGH * (options.epochs or 1.0) / arguments.max_steps)
            print(f"        so few steps hardly change a model: --epochs {epochs} makes {_ENOUGH} or more")
        print(f"device  {self._device}\n", flush=True)
        with stage("planning"):
            found = self._planned(model, self.batch, arguments.gradient_accumulation_steps)
            missing = found.missing_host_bytes
            if missing and self._host_memory is None:
                # Frozen weights may stay in their files, and more blocks may be updated on the device.
                room = found.host.total_bytes - missing
                found = self._planned(model, self.batch, arguments.gradient_accumulation_steps, host_memory=room)
        self._stays_in_files = found.host.file_bytes > 0
        if self._stays_in_files and not Path(options.model).is_dir():
            raise OptionError(
                f"the weights of `{options.model}` don't fit into host memory.\n"
                "  Frozen weights may stay in their files, which are those of a folder.\n"
                "  Download the model into a folder, and name the folder."
            )
        print(f"{found}\n", flush=True)
        with stage("looking for ways out"):
            error = refusal(found, _IN_COMMAND)
        if error is not None:
            raise error

    @property
    def _optimizer(self) -> type[torch.optim.Optimizer]:
        if self._is_coded:
            return AdamW8bit
        is_whole = self.options.precision == "fp32" and self.options.offload is not None
        return FusedAdamW if is_whole else torch.optim.AdamW

    def _planned(
        self, model: Any, batch: int, count: int, machine: Hardware | None = None, host_memory: int | None = None
    ) -> PlannedStep:
        options = self.options
        model.train()
        given = None if options.memory is None else parse_bytes(options.memory, "memory")
        model.config.use_cache = False  # as the trainer does: otherwise keys and values would be results
        return plan(
            model, device=self._device, device_memory=DeviceBudget(self._device, given).nbytes,
            host_memory=self._host_memory if host_memory is None else host_memory,
            offload=options.offload is not None, optimizer=self._optimizer, precision=options.precision,
            micro_batches=count, hardware=machine, max_grad_norm=_MAX_GRAD_NORM, block_bytes=options.block_bytes,
            chunking=options.chunking, kernels=options.kernels, example_kwargs=self._inputs(batch),
        )  # fmt: skip

    def _inputs(self, batch: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(batch, self._width, dtype=torch.long, device=self._device.torch_device)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        if self._paper.model_accepts_loss_kwargs:
            inputs["num_items_in_batch"] = torch.ones((), dtype=torch.long, device=ids.device)
        return inputs

    def go_on(self, record: RunRecord) -> None:
        """Trains what is left of the steps, and copies the trained model out of the last checkpoint.

        Raises:
            KeyboardInterrupt: If Ctrl-C ended it before its last step, with a checkpoint.
        """
        found = _newest(record.folder)
        if found is None or found[1]["global_step"] < self._arguments.max_steps:
            self._train(record, found)
            found = _newest(record.folder)
            assert found is not None, "the trainer ends with a checkpoint"
        checkpoint, state = found
        if state["global_step"] < self._arguments.max_steps:
            raise KeyboardInterrupt
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _OF_TRAINING):
                shutil.copy2(path, record.folder / path.name)
        record.is_finished = True
        record.write()
        losses = [row["eval_loss"] for row in state["log_history"] if "eval_loss" in row]
        if losses:
            before, after = f"{losses[0]:.4f}", f"{losses[-1]:.4f}"
            print(f"result  held-out loss {after}; before the training {before}")
            if before == after:
                print("warning the held-out loss is what it was: the model has hardly changed.")
                print("        What trains more: a larger --lr, more --epochs, or fewer --tokens-per-step.")
        saved = f"`{record.folder}`, for from_pretrained(); its checkpoints are needed no longer"
        print(f"saved   {saved}, `{LOSSES}` has the losses", flush=True)

    def _train(self, record: RunRecord, found: tuple[Path, dict[str, Any]] | None) -> None:
        options, arguments = self.options, self._arguments
        if found is not None:
            print(f"resume  step {found[1]['global_step']} of {arguments.max_steps}, from `{found[0]}`", flush=True)
        arguments.dataset_kwargs = {"skip_prepare_dataset": True}
        arguments.eval_strategy = "no" if self._held_out is None else "steps"
        arguments.eval_on_start = self._held_out is not None and found is None
        multiple = self._width if options.lengths is None else None
        padded = dataclasses.replace(self._paper.data_collator, pad_to_multiple_of=multiple)
        transformers.set_seed(options.seed)
        stop = StopBetweenSteps()
        trainer = _StreamedSFT(
            model=self._compiled(),
            args=arguments, data_collator=lambda rows: _without_mask(padded(rows)), processing_class=self._tokenizer,
            train_dataset=self._training, eval_dataset=self._held_out, callbacks=[stop, Losses(record.folder)],
            megatrain_offload=options.offload, megatrain_host_memory=self._host_memory,
            optimizer_cls_and_kwargs=(AdamW8bit, {"lr": arguments.learning_rate}) if self._is_coded else None,
            megatrain_on_nonfinite="raise",  # the trainer would show another loss in its place, and go on
        )  # fmt: skip
        record.write()
        with stop:
            try:
                trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
            except NotFiniteError as error:
                way = "Give a smaller --lr or a longer --warmup, and another --out; or look at the data."
                raise NotFiniteError(error.what, way) from error

    def _compiled(self) -> megatrain.CompiledModule:
        """The model that streams, with its weights in memory, or in their files if memory has no room for them."""
        options = self.options
        asked = options.model, self._config, options.precision
        of_files: dict[str, Any] = {}
        if self._adapters is not None and self._stays_in_files:
            model = model_in_files(*asked, self._adapters)
            # A training that goes on reads its state before the first batch.
            of_files = {"weights": options.model, "example_kwargs": self._inputs(self.batch)}
        else:
            model = read_model(*asked, self._adapters)
        model.config.use_cache = False
        return megatrain.compile(
            model, device=self._device, precision=options.precision, memory=options.memory,
            block_bytes=options.block_bytes, chunking=options.chunking, kernels=options.kernels,
            lengths=options.lengths, **of_files,
        )  # fmt: skip

    def saved(self, folder: Path) -> str:
        """Says what is saved, and how to go on."""
        found = _newest(folder)
        if found is None:
            return f"no step is saved in `{folder}` yet.\n  The same command begins anew."
        saved = f"step {found[1]['global_step']} of {self._arguments.max_steps} is saved in `{folder}`"
        return f"{saved}, and nothing is still running.\n  The same command goes on from there."


def _without_mask(batch: dict[str, Any]) -> dict[str, Any]:
    # The padding comes last: in a causal model no token sees it. A mask would make another graph of each batch that has
    # padding.
    del batch["attention_mask"]
    return batch


def _newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state; None without, as after a kill in the middle of the first one."""
    try:
        found = newest_whole(folder)
    except CheckpointError:
        return None
    return None if found is None else (Path(found), json.loads((Path(found) / STATE).read_text(encoding="utf-8")))
