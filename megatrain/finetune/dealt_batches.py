"""DealtTrainer: deals the micro-batches of a step to processes so that their order is that of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from megatrain.integrations.hf import Trainer


class DealtTrainer(Trainer):
    """The trainer that streams; in several processes each takes micro-batches of a step that follow each other.

    accelerate deals them one by one: of a step of four, the first of two processes would have 0 and 2. A training step
    adds gradients rank by rank, so they would be added as 0, 2, 1, 3. Here they are 0, 1, 2, 3, as in one process.

    The stock schedule begins a warm-up at a rate of 0, with which its first step trains nothing; here no step does.
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes a linear schedule, whose first step has a rate above 0."""
        if self.lr_scheduler is None:  # pyright: ignore[reportUnnecessaryComparison]
            self._replace_step()  # before a scheduler wraps it
            rate = partial(rate_of, warmup=self.args.warmup_steps, num_steps=num_training_steps)
            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, rate)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self) -> Any:
        """Makes the loader as always; in several processes its batches are dealt otherwise."""
        loader = super().get_train_dataloader()
        size = self.args.world_size
        if size > 1:
            shard = loader.batch_sampler  # accelerate's, which deals the batches of another sampler
            count = self.args.gradient_accumulation_steps * size
            shard.batch_sampler = DealtBatches(shard.batch_sampler, count, self.args.process_index, size)
            shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False  # what it gets is dealt
        return loader

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of a batch as one process does: the mean over the tokens of this batch.

        The stock trainer divides by the mean number of tokens of all processes, those that fill up the last step too.
        """
        of_all = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = of_all


def rate_of(step: int, *, warmup: int, num_steps: int) -> float:
    """Returns the learning rate of a step, counted from 0, relative to its peak: up to it, then down to 0."""
    return (step + 1) / warmup if step < warmup else max(0.0, (num_steps - step) / max(1, num_steps - warmup))


class DealtBatches:
    """The batches of one process, step by step; a batch is a list of numbers of samples.

    The last step of an epoch has what is left. If processes can't divide that, it is filled up with samples from the
    beginning of the epoch, as accelerate does, so that each process has as many batches.

    Args:
        batches: Of all processes, in the order of one process; with `batch_size` and `sampler`.
        count: Batches of a step of all processes: a multiple of `size`, and not more than there are.
        rank: Of this process.
        size: How many processes there are.
    """

    drop_last = False

    def __init__(self, batches: Any, count: int, rank: int, size: int) -> None:
        self.sampler = batches.sampler  # by which accelerate tells it the epoch
        self.batch_size: int = batches.batch_size
        self._batches, self._count, self._rank, self._size = batches, count, rank, size

    def __len__(self) -> int:
        """How many batches of an epoch this process has: as many as each other one."""
        return -(-len(self._batches) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        start: list[int] = []
        left = iter(self._batches)
        while step := list(islice(left, self._count)):
            start = start or [sample for batch in step[: self._size] for sample in batch]
            if len(step) % self._size:
                step = self._filled(step, start)
            each = len(step) // self._size
            yield from step[self._rank * each : (self._rank + 1) * each]

    def _filled(self, step: list[list[int]], start: Iterable[int]) -> list[list[int]]:
        """The batches of a step, and as many more that all processes have as many; all of them are full."""
        more = cycle(start)
        last = step[-1] + list(islice(more, self.batch_size - len(step[-1])))
        missing = -len(step) % self._size
        return [*step[:-1], last, *(list(islice(more, self.batch_size)) for _ in range(missing))]
