"""train(): a fine-tuning from its files to the trained model, in as many processes as it takes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from transformers import PrinterCallback, TrainingArguments, default_data_collator
from transformers.utils import logging

from megatrain.checks import checked
from megatrain.device import Device, usable
from megatrain.errors import OptionError
from megatrain.finetune.fine_tuning import FineTuning
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
from megatrain.finetune.step_on_paper import MAX_GRAD_NORM, plan_step
from megatrain.finetune.training_data import Files, sequences_of
from megatrain.integrations.hf import Trainer

# The newest, and the one before it, for a kill while the newest is written.
_KEPT_CHECKPOINTS = 2


@checked()
def train(tuning: FineTuning) -> None:
    """Plans, trains, evaluates and saves, and prints all of it; goes on where an earlier run of the same ended.

    Args:
        tuning: What is trained.

    Raises:
        OptionError: If a file can't be used.
        CheckpointError: If the folder has something else than this training, or another process trains there.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
        KeyboardInterrupt: Saying what is saved.
    """
    device = usable(tuning.device)
    config = read_config(tuning)
    files = Files.of(tuning)
    inputs = {"model": fingerprint(tuning.model), **files.digests()}
    if tuning.tokenizer is not None:
        inputs["tokenizer"] = fingerprint(tuning.tokenizer)
    record = RunRecord.of(tuning, inputs)
    if record.is_finished:
        print(f"the training in `{record.folder}` is finished; there is nothing left to do.")
        return
    length = longest(tuning, config)
    tokenizer = read_tokenizer(tuning)
    training, held_out = sequences_of(files, tuning, tokenizer, length)
    pace = Pace.of(tuning, len(training), training.width)
    _plan(tuning, config, device, pace, [training, held_out])
    with record.locked():
        record.write()
        _run(record, tuning, config, tokenizer, device, pace, (training, held_out))


def _plan(tuning: FineTuning, config: Any, device: Device, pace: Pace, sequences: list[Sequences | None]) -> None:
    """Prints the plan of a step, and refuses what doesn't fit."""
    model = model_on_paper(tuning, config)
    check_ids(max(each.largest_id for each in sequences if each is not None), model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = f"adapters of rank {tuning.lora_rank}" if tuning.lora else "all weights"
    print(f"model   {type(model).__name__}, {kind}: {trained} parameters to train")
    print(f"run     {pace}")
    print(f"device  {device}\n", flush=True)
    found = plan_step(tuning, model, device, pace.width, pace.accumulate)
    print(f"{found}\n", flush=True)
    found.check()


def _run(
    record: RunRecord,
    tuning: FineTuning,
    config: Any,
    tokenizer: Any,
    device: Device,
    pace: Pace,
    sequences: tuple[Sequences, Sequences | None],
) -> None:
    """Trains what is left of the steps, and makes the trained model of the last checkpoint."""
    found = newest(record.folder)
    try:
        if found is None or found[1]["global_step"] < pace.num_steps:
            if found is not None:
                print(f"resume  step {found[1]['global_step']} of {pace.num_steps}, from `{found[0]}`", flush=True)
            _train_on(record, tuning, config, tokenizer, device, pace, sequences)
            found = newest(record.folder)
            assert found is not None
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(_saved_words(record, pace)) from interrupt
    finish(record, *found)


def _train_on(
    record: RunRecord,
    tuning: FineTuning,
    config: Any,
    tokenizer: Any,
    device: Device,
    pace: Pace,
    sequences: tuple[Sequences, Sequences | None],
) -> None:
    arguments = training_arguments(tuning, pace, device, evaluates=sequences[1] is not None)
    found = newest(record.folder)
    progress = ShowsProgress(pace.tokens_per_step)
    stop = StopBetweenSteps()
    trainer = Trainer(
        model=read_model(tuning, config),
        args=arguments,
        data_collator=default_data_collator,
        train_dataset=sequences[0],
        eval_dataset=sequences[1],
        processing_class=tokenizer,
        callbacks=[progress, stop],
        megatrain_precision=tuning.precision,
        megatrain_memory=tuning.memory,
    )
    trainer.remove_callback(PrinterCallback)  # which prints each step's log as a dict
    logging.disable_progress_bar()  # of the files of each checkpoint, in the middle of ours
    with closing(progress), stop:
        trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
    print(f"trained {progress.words()}", flush=True)
    if trainer.state.global_step < pace.num_steps:
        raise KeyboardInterrupt


def training_arguments(tuning: FineTuning, pace: Pace, device: Device, *, evaluates: bool) -> TrainingArguments:
    """Returns the arguments of transformers' Trainer.

    Raises:
        OptionError: If its device isn't the one that is asked for.
    """
    arguments = TrainingArguments(
        tuning.out,
        per_device_train_batch_size=pace.batch,
        per_device_eval_batch_size=pace.batch,
        gradient_accumulation_steps=pace.accumulate,
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
        dataloader_pin_memory=not device.can_bind,
        use_cpu=device.can_bind,
        disable_tqdm=True,
        report_to=[],
    )
    if arguments.device != device.torch_device:
        raise OptionError(
            f"--device {tuning.device} is not the device on which transformers trains: {arguments.device}.\n"
            "  Its trainer takes the first device that the process sees.\n"
            "  Show it another one with CUDA_VISIBLE_DEVICES, and leave --device out."
        )
    return arguments


def _saved_words(record: RunRecord, pace: Pace) -> str:
    found = newest(record.folder)
    again = "  The same command goes on from there."
    if found is None:
        return f"no step is saved in `{record.folder}` yet.\n  The same command begins anew."
    return f"step {found[1]['global_step']} of {pace.num_steps} is saved in `{record.folder}`.\n{again}"
