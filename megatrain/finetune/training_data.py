"""The sequences to train on and to evaluate with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.finetune.documents import Documents, read_documents
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.finetune.sequences import Sequences, tokenized


@dataclass(frozen=True, slots=True)
class Files:
    """The files of data, as they were read.

    Args:
        training: To train on.
        evaluation: To evaluate with, or None.
    """

    training: Documents
    evaluation: Documents | None

    @staticmethod
    def of(tuning: FineTuning) -> Files:
        """Reads them.

        Raises:
            OptionError: If a file can't be used, with the line.
        """
        read = [
            None if path is None else read_documents(Path(path), split=tuning.documents)
            for path in (tuning.data, tuning.eval_data)
        ]
        assert read[0] is not None
        return Files(read[0], read[1])

    def digests(self) -> dict[str, str]:
        """Tells the files from others, by what they are for."""
        both = {"data": self.training, "evaluation data": self.evaluation}
        return {name: each.digest for name, each in both.items() if each is not None}


def sequences_of(files: Files, tuning: FineTuning, tokenizer: Any, length: int) -> tuple[Sequences, Sequences | None]:
    """Makes the sequences to train on and to evaluate with, and prints what became of the data.

    Raises:
        OptionError: If nothing is left to learn.
    """
    training = tokenized(files.training, tokenizer, length)
    training, held_out = training.split(tuning.held_out, tuning.seed)
    if files.evaluation is not None:
        held_out = tokenized(files.evaluation, tokenizer, length)
    training.widened(held_out, length)
    print(f"data    {files.training}")
    padding = f", {training.padded_fraction:.0%} of them padding" if training.padded_fraction >= 0.005 else ""
    print(f"        {len(training)} sequences of {training.width} tokens{padding}")
    for note in training.notes:
        print(f"        {note}")
    if files.evaluation is not None and held_out is not None:
        print(f"eval    {files.evaluation}: {len(held_out)} sequences")
        for note in held_out.notes:
            print(f"        {note}")
    elif held_out is not None:
        print(f"eval    {len(held_out)} more sequences, held out of the data; --eval-fraction 0 trains on all")
    else:
        few = f"{tuning.held_out:g} of them is less than one; " if tuning.held_out else ""
        print(f"eval    no sequences are held out: {few}--eval or a larger --eval-fraction evaluates")
    return training, held_out
