"""The sequences to train on and to evaluate with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.counts import counted
from megatrain.finetune.data_set import TRAIN, read_data_set
from megatrain.finetune.documents import Documents, read_documents
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.finetune.sequences import Sequences, tokenized


@dataclass(frozen=True, slots=True)
class Data:
    """The data, as it was read.

    Args:
        training: To train on.
        evaluation: To evaluate with, or None.
    """

    training: Documents
    evaluation: Documents | None

    @staticmethod
    def of(tuning: FineTuning) -> Data:
        """Reads files, or opens a data set.

        Raises:
            OptionError: If it can't be used, with the line or the row.
        """

        def file(path: str) -> Documents:
            return read_documents(Path(path), split=tuning.documents)

        def split(name: str) -> Documents:
            return read_data_set(tuning.data, tuning.data_config, name)

        training = split(tuning.split or TRAIN) if tuning.is_data_set else file(tuning.data)
        if tuning.eval_split is not None:
            return Data(training, split(tuning.eval_split))
        return Data(training, None if tuning.eval_data is None else file(tuning.eval_data))

    def digests(self) -> dict[str, str]:
        """Tells the data from other data, by what it is for."""
        both = {"data": self.training, "evaluation data": self.evaluation}
        return {name: each.digest for name, each in both.items() if each is not None}


def sequences_of(data: Data, tuning: FineTuning, tokenizer: Any, length: int) -> tuple[Sequences, Sequences | None]:
    """Makes the sequences to train on and to evaluate with, and prints what became of the data.

    Raises:
        OptionError: If nothing is left to learn.
    """
    training = tokenized(data.training, tokenizer, length)
    training, held_out = training.split(tuning.held_out, tuning.seed)
    if data.evaluation is not None:
        held_out = tokenized(data.evaluation, tokenizer, length)
    training.widened(held_out, length)
    print(f"data    {data.training}")
    padding = f", {training.padded_fraction:.0%} of them padding" if training.padded_fraction >= 0.005 else ""
    print(f"        {counted(len(training), 'sequence')} of {training.width} tokens{padding}")
    for note in training.notes:
        print(f"        {note}")
    if data.evaluation is not None and held_out is not None:
        print(f"eval    {data.evaluation}: {counted(len(held_out), 'sequence')}")
        for note in held_out.notes:
            print(f"        {note}")
    elif held_out is not None:
        print(f"eval    {len(held_out)} more sequences, held out of the data; --eval-fraction 0 trains on all")
    else:
        few = f"{tuning.held_out:g} of them is less than one; " if tuning.held_out else ""
        print(f"eval    no sequences are held out: {few}--eval or a larger --eval-fraction evaluates")
    return training, held_out
