"""train(): a fine-tuning from its files to the trained model, in as many processes as it takes."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainingArguments, default_data_collator
from transformers.utils import logging

from megatrain.counts import counted
from megatrain.device import Device, find
from megatrain.errors import OptionError
from megatrain.finetune.dealt_batches import DealtTrainer
from megatrain.finetune.fine_tuning import LENGTH, FineTuning
from megatrain.finetune.finished import finish, newest
from megatrain.finetune.pace import Pace
from megatrain.finetune.pretrained import (
    check_ids,
    longest,
    model_on_paper,
    read_config,
    read_model,
    read_tokenizer,
)
from megatrain.finetune.run_callbacks import ShowsProgress, StopBetweenSteps
from megatrain.finetune.run_record import RunRecord, fingerprint
from megatrain.finetune.sequences import Sequences
from megatrain.finetune.step_on_paper import MAX_GRAD_NORM, host_of_several, plan_step
from megatrain.finetune.training_data import Data, sequences_of
from megatrain.planning.model_sizes import MICRO_BATCH, SEQUENCE
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.what_if.variation import Spelling, size
from megatrain.planning.what_if.ways_out import refusal
from megatrain.progress import stage
from megatrain.ranks.command_processes import ALONE, CommandProcesses
from megatrain.sizes import format_bytes
from megatrain.training.boundary import NotFiniteError

# The newest, and the one before it, for a kill while the newest is written.
_KEPT_CHECKPOINTS = 2
_IN_COMMAND: Spelling = {
    "block_bytes": lambda value: f"--block-bytes {size(value)}",
    "precision": lambda value: f"--precision {value}",
    MICRO_BATCH: lambda value: f"--batch {value}",
    SEQUENCE: lambda value: f"--length {value}",
}
"""What the command has of a plan's options, besides micro-batches."""


def train(tuning: FineTuning, processes: CommandProcesses = ALONE) -> None:
    """Plans, trains, evaluates and saves, and prints all of it; goes on where an earlier run of the same ended.

    Args:
        tuning: What is trained.
        processes: Those that train together; each of them calls this. The first one prints, and writes files.

    Raises:
        OptionError: If a file or a data set can't be used, or processes can't divide a step.
        CheckpointError: If the folder has something else than this training, or another process trains there.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
        RanksError: If another process failed or ended, or has read other files.
        KeyboardInterrupt: Saying what is saved.
    """
    if not processes.is_first:
        _silence(tuning)
    here = processes.here()
    device, config, data = processes.together(
        lambda: (processes.device(tuning.device), read_config(tuning), Data.of(tuning))
    )
    record = processes.of_first(lambda: _record(tuning, data))
    if record.is_finished:
        print(f"the training in `{record.folder}` is finished; there is nothing left to do.")
        return

    def tokenized() -> _TrainingRun:
        tokenizer = read_tokenizer(tuning)
        training, held_out = sequences_of(data, tuning, tokenizer, longest(config, tuning.length, LENGTH, "--length"))
        pace = Pace.of(tuning, len(training), training.width, processes.size)
        return _TrainingRun(tuning, record, config, tokenizer, device, pace, training, held_out, processes)

    run = processes.together(tokenized)
    processes.compare({**data.digests(), "the run": run.pace, "the device": device.kind})
    processes.together(lambda: run.plan(here))
    with ExitStack() as held:
        processes.together(lambda: held.enter_context(record.locked()) if processes.is_first else None)
        run.go_on()


def _record(tuning: FineTuning, data: Data) -> RunRecord:
    inputs = {"model": fingerprint(tuning.model), **data.digests()}
    if tuning.tokenizer is not None:
        inputs["tokenizer"] = fingerprint(tuning.tokenizer)
    return RunRecord.of(tuning, inputs)


def _silence(tuning: FineTuning) -> None:
    """Keeps libraries from showing in each process what the first one shows."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if tuning.is_data_set:
        import_module("datasets").disable_progress_bars()


@dataclass(frozen=True, slots=True)
class _TrainingRun:
    """A training whose data is read and whose counts are known."""

    tuning: FineTuning
    record: RunRecord
    config: Any
    tokenizer: Any
    device: Device
    pace: Pace
    training: Sequences
    held_out: Sequences | None
    processes: CommandProcesses

    def plan(self, here: int) -> None:
        """Prints the plan of a step, and refuses what doesn't fit.

        Args:
            here: How many of the processes run on this host.
        """
        model = model_on_paper(self.tuning, self.config)
        both = (self.training, self.held_out)
        check_ids(max(each.largest_id for each in both if each is not None), model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        kind = f"adapters of rank {self.tuning.lora_rank}" if self.tuning.lora else "all weights"
        print(f"model   {type(model).__name__}, {kind}: {counted(trained, 'parameter')} to train")
        print(f"run     {self.pace}")
        if self.pace.hint:
            print(f"        {self.pace.hint}")
        for name, line in zip(("ranks", ""), self.pace.parts(), strict=False):
            print(f"{name:7s} {line}")
        print(f"device  {self.device}\n", flush=True)
        with stage("planning"):
            found = self._planned(self.tuning, model)
        print(f"{found}\n", flush=True)
        with stage("looking for ways out"):
            error = refusal(found, self._spelling())
            adapters = "" if error is None else self._with_adapters()
        if error is not None:
            raise type(error)(f"{error}{adapters}")
        for line in host_of_several(found.host, model, here):
            print(f"host    {line}\n", flush=True)

    def _planned(self, tuning: FineTuning, model: Any) -> PlannedStep:
        """The step of this process."""
        pace = self.pace
        return plan_step(tuning, model, self.device, pace.width, pace.of_each, self.processes.place)

    def _spelling(self) -> Spelling:
        """What the command has of a plan's options; micro-batches are those of all processes there."""
        return {**_IN_COMMAND, "micro_batches": lambda value: f"--accumulate {value * self.processes.size}"}

    def _with_adapters(self) -> str:
        """Says what adapters would take, if they make a step fit that doesn't."""
        if self.tuning.lora or self.tuning.from_config or find_spec("peft") is None:
            return ""
        tuning = replace(self.tuning, lora=True)
        model = model_on_paper(tuning, self.config)
        found = self._planned(tuning, model)
        device, host = format_bytes(found.schedule.device_bytes), format_bytes(found.host.total_bytes)
        return f"\n    --lora: {device} of the device, {host} of the host; another training" if found.fits else ""

    def go_on(self) -> None:
        """Trains what is left of the steps, and makes the trained model of the last checkpoint."""
        try:
            found = self.processes.of_first(lambda: newest(self.record.folder))
            if found is None or found[1]["global_step"] < self.pace.num_steps:
                self._train(found)
            self.processes.together(self._finish)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(self._saved()) from interrupt

    def _finish(self) -> None:
        if self.processes.is_first:
            found = newest(self.record.folder)
            assert found is not None, "the trainer ends with a checkpoint"
            finish(self.record, *found)

    def _train(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Trains from a checkpoint, or from the beginning.

        Raises:
            KeyboardInterrupt: If it ended before its last step, with a checkpoint.
        """
        if found is not None:
            print(f"resume  step {found[1]['global_step']} of {self.pace.num_steps}, from `{found[0]}`", flush=True)
        progress, stop = ShowsProgress(self.pace.tokens_per_step), StopBetweenSteps()
        arguments = training_arguments(self.tuning, self.pace, self.device, evaluates=self.held_out is not None)
        arguments.eval_on_start = self.held_out is not None and found is None
        trainer = DealtTrainer(
            args=arguments,
            model=read_model(self.tuning, self.config),
            data_collator=default_data_collator,
            train_dataset=self.training,
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            callbacks=[progress, stop],
            megatrain_device=self.device,
            megatrain_on_nonfinite="raise",  # the trainer would show another loss in its place, and go on
            megatrain_precision=self.tuning.precision,
            megatrain_memory=self.tuning.memory,
            megatrain_block_bytes=self.tuning.block_bytes,
            megatrain_chunking=self.tuning.chunking,
        )
        trainer.remove_callback(PrinterCallback)  # which prints each step's log as a dict
        if self.processes.is_first:
            self.record.write()
        logging.disable_progress_bar()  # of the files of each checkpoint, in the middle of ours
        with closing(progress), stop:
            try:
                trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
            except NotFiniteError as error:
                way = "Give a smaller --lr or a longer --warmup, and another --out; or look at the data."
                raise NotFiniteError(error.what, way) from error
        print(f"trained {progress.words()}", flush=True)
        if trainer.state.global_step < self.pace.num_steps:
            raise KeyboardInterrupt

    def _saved(self) -> str:
        """Says what is saved, and how to go on."""
        found = newest(self.record.folder)
        if found is None:
            return f"no step is saved in `{self.record.folder}` yet.\n  The same command begins anew."
        saved = f"step {found[1]['global_step']} of {self.pace.num_steps} is saved in `{self.record.folder}`"
        return f"{saved}, and nothing is still running.\n  The same command goes on from there."


def training_arguments(tuning: FineTuning, pace: Pace, device: Device, *, evaluates: bool) -> TrainingArguments:
    """Returns the arguments of transformers' Trainer.

    Raises:
        OptionError: If its device isn't the one that is asked for.
    """
    arguments = TrainingArguments(
        tuning.out,
        per_device_train_batch_size=pace.batch,
        per_device_eval_batch_size=pace.batch,
        gradient_accumulation_steps=pace.of_each,
        max_steps=pace.num_steps,
        learning_rate=tuning.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=pace.warmup,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        seed=tuning.seed,
        logging_steps=1,  # so that the losses of a run that was interrupted are those of an undisturbed one
        save_strategy="steps",
        save_steps=pace.save_every,
        save_total_limit=_KEPT_CHECKPOINTS,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=pace.save_every,
        prediction_loss_only=True,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=not device.is_host,
        use_cpu=device.is_host,
        disable_tqdm=True,
        log_level_replica="error",  # the first process prints what is said to all
        report_to=[],
    )
    if find(arguments.device).torch_device != device.torch_device:
        raise OptionError(
            f"--device {tuning.device} is not the device on which transformers trains: {arguments.device}.\n"
            "  Its trainer takes the first device that the process sees.\n"
            "  Show it another one with CUDA_VISIBLE_DEVICES, and leave --device out."
        )
    return arguments
