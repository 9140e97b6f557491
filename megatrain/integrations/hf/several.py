"""Several: a trainer in several processes (torchrun), which train one model together.

accelerate gives each process its part of the data. A training step adds up the gradients of all processes, so that
nothing is left for `DistributedDataParallel` to do, and no process adds up gradients of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from shutil import copyfile
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from transformers.trainer_utils import has_length

from megatrain.errors import ExecuteError, OptionError, RanksError
from megatrain.ranks.processes import NoCollectives, Ranks, others_here, words_of
from megatrain.training.compiled.module import CompiledModule

T = TypeVar("T")
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
"""What callbacks ask of a trainer."""
_SAME = "Give all processes the same arguments and the same data; accelerate divides the data among them by itself."


def group_of(accelerator: Any) -> Any:
    """The process group of a trainer's processes; None for a single one."""
    return dist.group.WORLD if accelerator.num_processes > 1 else None


def refuse_several(trainer: Any) -> None:
    """Refuses what can't be right in several processes.

    Raises:
        OptionError: Naming the first of it.
    """
    arguments, accelerator = trainer.args, trainer.accelerator
    divided = str(accelerator.distributed_type).rpartition(".")[2]
    if divided in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP") or getattr(arguments, "parallelism_config", None):
        raise OptionError(
            f"a trainer that streams can't use {divided if divided != 'MULTI_CPU' else 'parallelism_config'}.\n"
            "  Its processes divide the batches. The model is whole on each of them, and streams.\n"
            "  Start it by torchrun, or by accelerate launch with a configuration for data parallelism alone."
        )
    if accelerator.num_processes == 1:
        _refuse_apart(arguments)
        return
    refused = {
        "fp16": (accelerator.scaler is not None, "The scaler of the loss looks at the gradients of one process.",
                 "Use bf16=True."),
        "auto_find_batch_size": (arguments.auto_find_batch_size,
                                 "A process that lacks memory would go on alone, with smaller batches.",
                                 "Give per_device_train_batch_size."),
        "save_on_each_node": (arguments.save_on_each_node, "The first process writes the optimizer's state, once.",
                              "Leave it out, with an output_dir that all hosts read."),
    }  # fmt: skip
    for name, (is_given, rule, way) in refused.items():
        if is_given:
            raise OptionError(f"a trainer that streams can't use {name} in several processes.\n  {rule}\n  {way}")


def _refuse_apart(arguments: Any) -> None:
    others = others_here()
    if others:
        raise OptionError(
            f"accelerate counts one process, but torch.distributed has {others + 1}.\n"
            "  Each would train on all data, apart from the others.\n"
            "  " + ("Set up torch.distributed after TrainingArguments, or start by torchrun."
                    if arguments.use_cpu else "On CPUs give TrainingArguments(use_cpu=True).")
        )  # fmt: skip


def refuse_group(compiled: CompiledModule, accelerator: Any) -> None:
    """Refuses a model that was compiled for other processes than the trainer's.

    Raises:
        OptionError: If it was.
    """
    ranks = compiled.megatrain.ranks
    size = 1 if ranks is None else ranks.size
    if size != accelerator.num_processes:
        raise OptionError(
            f"the model was compiled for {size} process{'es' if size > 1 else ''}, but the trainer has "
            f"{accelerator.num_processes}.\n"
            "  Each of them would train with the gradients of some processes only.\n"
            "  Compile it with process_group=torch.distributed.group.WORLD, or give the trainer the plain model."
        )


def refuse_trial(accelerator: Any, trial: Any) -> None:
    """Refuses trainings that only a single process begins and ends: those of a search.

    Raises:
        OptionError: If there are several processes.
    """
    if accelerator.num_processes > 1 and trial is not None:
        raise OptionError(
            "a trainer that streams can't do hyperparameter_search in several processes.\n"
            "  They would have to begin and end each of its trainings together.\n"
            "  Do it in one process."
        )


class Several:
    """The other processes of a trainer, and what all of them do together between training steps."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def begin(self, trainer: Any, max_steps: int, batches: Any, checkpoint: str | None) -> None:
        """Compares how long all of them will train.

        Raises:
            RanksError: If they differ.
        """
        facts = {
            "the number of updates (max_steps)": max_steps,
            "the number of batches in an epoch": len(batches) if has_length(batches) else "unknown",
            "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
            "the number of updates that were made before": trainer.state.global_step,
            "the checkpoint": "none" if checkpoint is None else Path(checkpoint).name,
        }
        self._ranks.compare("the beginning of a training", facts, _SAME)

    def collected(self, iterator: Any, count: int) -> list[Any]:
        """Takes the micro-batches of an update, of which all processes must have as many.

        Raises:
            RanksError: If they haven't.
        """
        found = self.announcing(lambda: list(islice(iterator, count)))
        self._ranks.compare("the data loader", {"the number of micro-batches of an update": len(found)}, _SAME)
        return found

    def no_collectives(self) -> NoCollectives:
        """Refuses in its body what would wait for other processes, which don't run this code at the same time."""
        return NoCollectives()

    def refuse_apart(self, reason: str, error: Exception | None = None) -> NoReturn:
        """Refuses an update that isn't one training step.

        Raises:
            ExecuteError: Always.
        """
        raise ExecuteError(
            f"{reason}, so an update isn't one training step, as it must be in several processes.\n"
            "  Gradients go from process to process within a training step; calls with autograd would leave each\n"
            "  process with its own.\n"
            "  docs/trainers.md says what makes it one training step; or train in one process."
        ) from error

    def check_flags(self, control: Any) -> None:
        """Looks whether the callbacks of all processes ask for the same.

        Raises:
            RanksError: If not.
        """
        facts = {f"control.{name}, which callbacks set,": getattr(control, name) for name in _FLAGS}
        way = (
            "Let callbacks decide by what is the same on all: the step, the logged loss, the metrics; not by the clock."
        )
        self._ranks.compare("the end of an update", facts, way)

    def wait(self, what: str) -> None:
        """Returns when all processes are here."""
        self._ranks.meet(what, {})

    def announcing(self, code: Callable[[], T]) -> T:
        """Runs code of the user's; if it fails, the others hear why, and don't wait."""
        try:
            return code()
        except RanksError:
            raise  # of another process, or said to all
        except BaseException as error:
            self._ranks.announce(words_of(error))
            raise


def with_generators(checkpoint: str, index: int, count: int, load: Callable[[str], None]) -> None:
    """Loads the states of random generators from a checkpoint, also if another number of processes has written it.

    All processes then have those of the first one, or of the only one. The trainer's own `load` looks for one name, and
    without that file leaves the generators.
    """
    folder, name = Path(checkpoint), _name(index, count)
    known = next((each for each in (name, _name(0, 2), _name(0, 1)) if (folder / each).is_file()), None)
    if known is None or known == name:
        load(checkpoint)
        return
    with tempfile.TemporaryDirectory() as copied:
        copyfile(folder / known, Path(copied) / name)
        load(copied)


def _name(index: int, count: int) -> str:
    return "rng_state.pth" if count == 1 else f"rng_state_{index}.pth"
