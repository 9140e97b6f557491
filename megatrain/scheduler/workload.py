"""Workload: all that scheduling needs to know of a program, without tensors, graphs or a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueWork:
    """A tensor that crosses block boundaries, or enters or leaves the model.

    Args:
        name: Unique name, for messages only.
        nbytes: Bytes of its elements; what a transfer of it moves, and what its gradient takes.
        storage: Index into `Workload.storages`. Values that alias share one storage.
        producer: Block that computes it; None for an input of the model.
        readers: Blocks whose forward reads it, ascending, each once.
        is_output: The model returns it, so it stays on the device until the step ends.
        has_gradient: A gradient flows back through it.
        is_parkable: It may leave the device between forward and backward (not an input, not an output of the
            model, shares its storage with nothing).
    """

    name: str
    nbytes: int
    storage: int
    producer: int | None
    readers: tuple[int, ...]
    is_output: bool
    has_gradient: bool
    is_parkable: bool


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The bytes and work of one block.

    Args:
        name: Printed name, for messages only.
        state_bytes: Bytes its state takes in a slot, padding included.
        gradient_bytes: Bytes of the gradients of its trainable parameters; 0 when frozen.
        saved_bytes: Bytes that its forward holds for its backward if its graph is retained, beyond its inputs,
            outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond its inputs, outputs and state.
        backward_workspace_bytes: The same for (recompute and) backward, beyond inputs, state and the gradients
            it produces.
        has_backward: A gradient flows into or through it, so its backward runs.
        forward_flops: Floating-point operations of one forward; backward is taken as twice that.
    """

    name: str
    state_bytes: int
    gradient_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    has_backward: bool
    forward_flops: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Blocks in execution order, the values between them, and the storages behind the values.

    Args:
        blocks: In execution order; index in the tuple is the block's index.
        values: In order of definition, the model's inputs first.
        storages: Device bytes of each storage.
    """

    blocks: tuple[BlockWork, ...]
    values: tuple[ValueWork, ...]
    storages: tuple[int, ...]
