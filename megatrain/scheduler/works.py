"""ValueWork, BlockWork: what scheduling needs of one value and of one block."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.hardware.work import MEMORY, Kernels, Works


@dataclass(frozen=True, slots=True)
class ValueWork:
    """A tensor that crosses block boundaries, or enters or leaves the model.

    Args:
        name: Unique name, for messages only.
        nbytes: Bytes of its elements; what a transfer of it moves, and what its gradient takes, where the value lies.
        storage: Index into `Workload.storages`. Values that alias share one storage.
        producer: Block that computes it; None for an input of the model.
        readers: Blocks whose forward reads it, ascending, each once.
        is_output: The model returns it, so it stays on the device until the step ends, or outputs are released.
        has_gradient: A gradient flows back through it.
        is_parkable: It may leave the device between forward and backward (no input or output of the model, shares its
            storage with nothing, not on the host).
        is_committed: A buffer takes its content when the step ends; it is also an output, and nothing releases it.
        on_host: It and its gradient are in host memory, as in eager; they take no bytes of the device and never move.
        is_result: Its producer's forward keeps it for its own backward, which then computes less; only where the
            schedule keeps the block's results. Nothing else reads it.
    """

    name: str
    nbytes: int
    storage: int
    producer: int | None
    readers: tuple[int, ...]
    is_output: bool
    has_gradient: bool
    is_parkable: bool
    is_committed: bool = False
    on_host: bool = False
    is_result: bool = False

    @property
    def is_there(self) -> bool:
        """Whether it is there when a step begins: no block computes it."""
        return self.producer is None


@dataclass(frozen=True, slots=True)
class KeptWork:
    """The bytes and work of a block that keeps results of its forward for its backward.

    Args:
        forward_workspace_bytes: As in `BlockWork`; results don't count.
        backward_workspace_bytes: As in `BlockWork`; results don't count.
        repeated: The kernels of the recompute then.
    """

    forward_workspace_bytes: int
    backward_workspace_bytes: int
    repeated: Works = ()


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The bytes and work of one block.

    Args:
        name: Printed name, for messages only.
        state_bytes: Bytes its state takes in a slot, padding included.
        gradient_bytes: Bytes of the gradients of its trainable parameters; 0 when frozen.
        saved_bytes: Bytes that its forward holds for its backward if its graph is retained, beyond its
            inputs, outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond its inputs, outputs and state.
        backward_workspace_bytes: The same for (recompute and) backward, beyond inputs, state and the
            gradients it produces.
        has_backward: A gradient flows into or through it, so its backward runs.
        forward: What the kernels of one forward compute and move.
        backward: The same of one backward, without the recompute that a `B` of a dropped graph begins with.
        update_bytes: Host bytes that the update of its parameters reads and writes. 0 if it updates none: they
            aren't trained, or another block that shares them does it.
        shares: Other blocks that hold some of the parameters which this block updates, or rows of them, ascending.
        gradient_padding: Bytes between its gradients where they land on the host, each tensor on a boundary of
            `megatrain.sizes.ALIGNMENT` bytes.
        frozen_bytes: The part of `state_bytes` that no step changes: parameters that aren't trained, buffers that the
            forward only reads, constants.
        num_gradients: Parameters with a gradient: what a micro-batch adds to the sum of the earlier ones, one by one.
        kept: Of the block where it keeps its results; None if it has none.
    """

    name: str
    state_bytes: int
    gradient_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    has_backward: bool
    forward: Works = ()
    backward: Works = ()
    update_bytes: int = 0
    shares: tuple[int, ...] = ()
    gradient_padding: int = 0
    frozen_bytes: int = 0
    num_gradients: int = 0
    kept: KeptWork | None = None

    @property
    def landing_bytes(self) -> int:
        """Host bytes that the gradients of its parameters take where they land."""
        return self.gradient_bytes + self.gradient_padding

    @property
    def is_mostly_frozen(self) -> bool:
        """Whether at least half of its state is frozen: then it is worth the memory to have it there all the time."""
        return 0 < self.state_bytes <= 2 * self.frozen_bytes

    def measured(self, has_results: bool) -> BlockWork | KeptWork:
        """What has the workspace of the block, where its results are kept or not."""
        return self.kept if self.kept is not None and has_results else self

    def whole_backward(self, is_saved: bool, micro_batch: int, has_results: bool = False) -> Works:
        """The kernels of a `B`: with a recompute if the graph isn't retained, and sums with earlier micro-batches.

        Args:
            is_saved: Whether the graph is retained.
            micro_batch: Whose it is.
            has_results: Whether its results were kept.
        """
        recomputed = () if is_saved else self.kept.repeated if self.kept and has_results else self.forward
        if micro_batch == 0 or self.gradient_bytes == 0:
            return recomputed + self.backward
        sums = Kernels(MEMORY, 0, 3 * self.gradient_bytes, max(1, self.num_gradients))
        return (*recomputed, *self.backward, sums)
