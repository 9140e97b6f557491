"""LocalGraph: the autograd graph of one block, and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatrain.base.torch_private import run_backward
from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.passes.interpret import Code
from megatrain.passes.kept_results import HandedResults, KeptResults, NotedResults
from megatrain.passes.program import Template
from megatrain.passes.rewrites.tiled_region import without_results
from megatrain.runtime.random_calls import RngState, repeated_rng
from megatrain.runtime.replays import InductorCode, Optionals, Replays, whole
from megatrain.tracer.block_image import has_strides_of
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.packing import Packing, is_wrapper
from megatrain.tracer.recording.effect_watch import has_hooks, is_watched
from megatrain.tracer.recording.opaque import unobserved


@dataclass(slots=True, eq=False)
class LocalGraph:
    """A block's own autograd graph, from leaves that stand for its inputs and state to its outputs.

    Args:
        roots: Where the gradients of outputs enter; None where an output has no history. The outputs themselves are
            free to go.
        carries: Where the gradient that later blocks left for an input enters: aliases of the inputs, made last. The
            engine runs nodes in reverse order of creation, so it is the first term of the sum, as in eager.
        saved: The tensors that autograd keeps for the backward, besides state.
    """

    inputs: list[torch.Tensor]
    state: list[torch.Tensor]
    roots: list[GradientEdge | None]
    carries: list[GradientEdge | None]
    saved: list[weakref.ref[torch.Tensor]]

    def saved_tensors(self) -> list[torch.Tensor]:
        """Returns what is saved now; what a dead branch saved is gone, and the backward frees one by one."""
        return [t for t in (ref() for ref in self.saved) if t is not None]

    def gradients(
        self, output_gradients: Sequence[torch.Tensor | None], carried: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Returns the gradients of inputs and of state; None where nothing flows.

        Args:
            output_gradients: One per output; None where the output got no gradient.
            carried: One per input: the sum that later blocks already gave it, or None.
        """
        pairs = [
            (root, gradient)
            for root, gradient in (
                *zip(self.roots, output_gradients, strict=True),
                *zip(self.carries, carried, strict=True),
            )
            if root is not None and gradient is not None
        ]
        everything = [*self.inputs, *self.state]
        leaves = [t for t in everything if t.requires_grad]
        if not pairs or not leaves:
            return [None] * len(self.inputs), [None] * len(self.state)
        roots, known = zip(*pairs, strict=True)
        try:
            # As `torch.autograd.grad`, without its look at each argument: all of these are ours, and the engine
            # compares shapes.
            found: list[torch.Tensor | None] = [
                *run_backward(roots, known, False, False, tuple(leaves), True, accumulate_grad=False)
            ]
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise ExecuteError(OVERWRITTEN) from error
            if "on the same device" in str(error):  # all that the program computes is on one
                raise ExecuteError(_ELSEWHERE.format(str(error).splitlines()[0])) from error
            raise
        num_inputs = sum([t.requires_grad for t in self.inputs])
        for index, leaf in enumerate(leaves):  # each copy takes the place of the original at once
            gradient = found[index]
            if gradient is None or gradient.layout != torch.strided:
                continue
            if index >= num_inputs and gradient.stride() != leaf.stride() and _lies_otherwise(gradient, leaf):
                # As autograd does: a transfer would take memory for that.
                found[index] = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
            elif gradient.untyped_storage().nbytes() > gradient.nbytes:
                # A small view of a large buffer (an LSTM's are), which is freed so.
                found[index] = gradient.clone()
        if len(leaves) == len(everything):
            return found[: len(self.inputs)], found[len(self.inputs) :]
        rest = iter(found)
        gradients = [next(rest) if t.requires_grad else None for t in everything]
        return gradients[: len(self.inputs)], gradients[len(self.inputs) :]


_ELSEWHERE = (
    "a backward that the model defines itself reads tensors of another device: {}\n"
    "  Parameters stay in host memory; on the device such a backward finds what its forward has saved.\n"
    "  Pass the parameters that the backward reads to the autograd.Function, whose forward saves them."
)
OVERWRITTEN = (
    "a tensor that the backward needs was modified in place by the model's own forward.\n"
    "  Eager autograd refuses the same model.\n"
    "  Where the forward writes into a tensor that an earlier call saved, use the call that returns a new tensor."
)


def _lies_otherwise(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tells whether a parameter's gradient doesn't have its strides."""
    return gradient.dtype == parameter.dtype and not has_strides_of(gradient, parameter)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedGraph:
    """Stands for the graph of a forward that runs with its backward.

    Args:
        state: The block's state, which stays where it is until the backward is over.
        key: What the work depends on besides.
        again: Runs the forward under autograd: `again(inputs, state)`.
        drawing: Has the body draw the random numbers of the first run.
    """

    inputs: Sequence[torch.Tensor]
    state: Sequence[torch.Tensor]
    replays: Replays
    key: Hashable
    again: Callable[..., tuple[LocalGraph | RepeatedGraph, Sequence[torch.Tensor]]]
    drawing: Callable[[], AbstractContextManager[None]]

    def gradients(
        self, output_gradients: Optionals, carried: Optionals
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """See `LocalGraph.gradients`."""
        num_inputs, num_outputs = len(self.inputs), len(output_gradients)

        def work(given: Optionals) -> Optionals:
            inputs = whole(given[:num_inputs])
            graph, _ = self.again(inputs, self.state)
            own, parameters = graph.gradients(
                given[num_inputs : num_inputs + num_outputs], given[num_inputs + num_outputs :]
            )
            return [*own, *parameters]

        given = [*self.inputs, *output_gradients, *carried]
        with self.drawing():
            found = self.replays.run(work, given, self.state, self.key)
        return found[:num_inputs], found[num_inputs:]


Tensors = Sequence[torch.Tensor]
StateReader = Callable[[], Sequence[torch.Tensor]]


class BlockRunner:
    """Executes a template for any block that uses it.

    Args:
        replays: Records the kernels of blocks whose graph isn't retained; None for none.
    """

    def __init__(
        self, template: Template, device: Device, kernels: str = "eager", replays: Replays | None = None
    ) -> None:
        results = None if template.cost is None or kernels != "eager" or replays else template.cost.results
        around = () if results is None else results.calls
        if kernels == "inductor":
            made = partial(InductorCode, template=template, device=device)
        else:
            made = partial(Code, around=around)
        self._code = made(template.graph)
        for_backward = without_results(template.graph)
        self._repeated = self._code if for_backward is template.graph else made(for_backward)
        self._device = device
        self._is_random = template.is_random
        self._hides_draws = template.hides_draws
        self._result_bytes = [] if results is None else [spec.nbytes for spec in results.specs]
        self._held = set[int]() if template.cost is None else set(template.cost.held_state)
        self._ends = [(port.name, port.spec.shape) for port in template.outputs]
        self._replays = replays

    def forget_recordings(self, why: str) -> None:
        """Drops what is recorded, and records nothing more if there is a reason."""
        if self._replays is not None:
            self._replays.forget(why)

    @property
    def why_eager(self) -> str:
        """Why the template runs on eager's kernels, if others were asked for; else empty."""
        codes = [code for code in (self._code, self._repeated) if isinstance(code, InductorCode)]
        parts = codes if self._replays is None else [self._replays]
        return next((part.why_eager for part in parts if part.why_eager), "")

    @property
    def repeats_outputs(self) -> bool:
        """Whether a repeated forward computes the outputs again, and not only their history."""
        return self._repeated is self._code and self._replays is None

    @property
    def _is_recorded(self) -> bool:
        """Whether kernels may be recorded, or launched so: not under the caller's hooks or modes."""
        return self._replays is not None and not self._replays.why_eager and not is_watched()

    def rng_state(self) -> RngState | None:
        """The generators' state, if the template draws from them."""
        return RngState.now(self._device, self._code.opaque) if self._is_random else None

    def repeated(self, state: RngState | None) -> AbstractContextManager[None]:
        """Runs the body as if it were at the moment when `state` was read."""
        if self._hides_draws:
            raise ExecuteError(HIDDEN_DRAWS.format("a block has"))
        return unobserved() if state is None else repeated_rng(state, self._device, self._code.opaque)

    def noting(self) -> NotedResults | None:
        """A mode that notes in a forward the results which its backward may find; None if there are none."""
        return NotedResults(self._device.torch_device) if self._result_bytes else None

    def kept(self, notes: NotedResults) -> KeptResults | None:
        """What a forward noted; None if its kernels returned other tensors than those of which the plan knows."""
        found = notes.taken()
        return found if [tensor.nbytes for tensor in found.tensors] == self._result_bytes else None

    def forward(
        self, inputs: Tensors, state: Tensors, needs_grad: Sequence[bool], *, notes: NotedResults | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Runs the code without keeping anything for a backward, but what `notes` notes.

        Tensors require grad just as in eager, because kernels look at that (matmul folds its batch dimensions or
        not, and rounds differently); the tensors that autograd would save are dropped at once.
        """
        if self._replays is not None and self._is_recorded:
            key = "forward", tuple(needs_grad)
            found = self._replays.run(lambda given: self._forward(whole(given), state, needs_grad), inputs, state, key)
            return tuple(whole(found))
        return self._forward(inputs, state, needs_grad, notes=notes)

    def _forward(
        self, inputs: Tensors, state: Tensors, needs_grad: Sequence[bool], *, notes: NotedResults | None = None
    ) -> tuple[torch.Tensor, ...]:
        if not any(needs_grad) and not self._code.has_inner_grad:
            with self._device.without_autocast():
                return self._run([*inputs, *state], mode=notes)
        leaves = [t.detach().requires_grad_(g) for t, g in zip((*inputs, *state), needs_grad, strict=True)]
        with torch.enable_grad(), self._device.without_autocast(), self._forgetting():
            outputs = self._run(leaves, mode=notes)
        return tuple(t.detach() for t in outputs)

    def _run(
        self,
        arguments: Sequence[torch.Tensor],
        *,
        is_repeated: bool = False,
        mode: NotedResults | HandedResults | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the code and compares the shapes of its outputs, because a shape may depend on values.

        Raises:
            GuardFailedError: If a shape differs: this call needs another capture.
        """
        code = self._repeated if is_repeated else self._code
        outputs = code(arguments, is_checked=not is_repeated, mode=mode)
        for tensor, (name, shape) in zip(outputs, self._ends, strict=True):
            if tensor.shape != shape:
                raise GuardFailedError(f"`{name}` has the shape {list(shape)}", str(list(tensor.shape)), ("",))
        return outputs

    def _forgetting(self) -> AbstractContextManager[Any]:
        """Throws saved tensors away, unless the code differentiates inside its own forward."""
        if self._code.has_inner_grad:
            return outer_hooks_off()
        return saved_tensors_hooks(lambda _: None, _refuse_unpack)

    def forward_with_graph(
        self,
        inputs: Tensors,
        state: Tensors,
        needs_grad: Sequence[bool],
        is_carried: Sequence[bool],
        read_state: StateReader,
        *,
        is_repeated: bool = False,
        kept: KeptResults | None = None,
        may_replay: bool = True,
    ) -> tuple[LocalGraph | RepeatedGraph, tuple[torch.Tensor, ...]]:
        """Runs the code under autograd, from fresh leaves; or, if all of it is recorded, only with its backward.

        Args:
            needs_grad: One per input and then one per state tensor.
            is_carried: One per input: whether later blocks may leave it a gradient.
            read_state: Returns the block's state again when its backward runs, wherever it lies by then.
            is_repeated: A forward that has run is repeated, and its backward follows at once: its values aren't
                compared with the capture's again, and its state stays where it is.
            kept: Results of that forward, which aren't computed again.
            may_replay: A repeated forward may be recorded together with its backward; False is that recording itself.

        Returns:
            The graph, and the outputs without it; none of a forward that is repeated with its backward.
        """
        if self._replays is not None and is_repeated and may_replay and self._is_recorded:
            options = {"needs_grad": needs_grad, "is_carried": is_carried, "read_state": read_state}
            again = partial(self.forward_with_graph, **options, is_repeated=True, may_replay=False)
            key = "backward", tuple(needs_grad), tuple(is_carried)
            # Here the generators are as they were for the first run, and later they aren't.
            drawing = partial(repeated_rng, self.rng_state(), self._device)
            return RepeatedGraph(inputs, state, self._replays, key, again, drawing), ()
        is_own = any(call.needs_own_state for call in self._code.opaque)
        copied = set(range(len(state))) if is_own else set[int]() if is_repeated else self._held
        state = [t.clone() if index in copied else t for index, t in enumerate(state)]
        leaves = [t.detach().requires_grad_(g) for t, g in zip((*inputs, *state), needs_grad, strict=True)]
        with torch.enable_grad(), self._device.without_autocast():
            saved = [] if is_own else [weakref.ref(leaves[len(inputs) + index]) for index in sorted(copied)]
            with self._saving(leaves[len(inputs) :], read_state, saved, is_own=is_own, is_repeated=is_repeated):
                handed = None if kept is None else HandedResults(kept)
                outputs = self._run(leaves, is_repeated=is_repeated, mode=handed)
            own = leaves[: len(inputs)]
            carries = [
                get_gradient_edge(torch.ops.aten.alias.default(t)) if c and t.requires_grad else None
                for t, c in zip(own, is_carried, strict=True)
            ]
        # A view of a weight made under no_grad says that it requires grad, but has no history.
        roots = [None if t.grad_fn is None else get_gradient_edge(t) for t in outputs]
        return LocalGraph(own, leaves[len(inputs) :], roots, carries, saved), tuple(t.detach() for t in outputs)

    def _saving(
        self, state: Tensors, read_state: StateReader, saved: list[Any], *, is_own: bool, is_repeated: bool
    ) -> AbstractContextManager[Any]:
        # The weights of a repeated forward stay where they are until its backward is over, and torch compares versions
        # by itself. Under the caller's hooks it doesn't.
        stays = is_own or (is_repeated and not has_hooks())
        return nullcontext() if stays else rebound_state(state, read_state, saved)


def outer_hooks_off() -> AbstractContextManager[Any]:
    """Hides tensors saved by the body from the caller's hooks (checkpointing counts them, others move them)."""
    if not has_hooks():
        return nullcontext()  # transforms of torch.func don't work under these hooks
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextmanager
def rebound_state(state: Tensors, read_state: StateReader, saved: list[weakref.ref[torch.Tensor]]) -> Generator[None]:
    """Keeps weights out of the graph: a saved tensor that is a view of state is stored as a place in that state.

    All other saved tensors are listed in `saved`. Hooks replace autograd's own check that nobody wrote into them; it
    is repeated here.
    """
    # These hooks run for each saved tensor of each block: on a GPU, kernels wait for Python.
    bounds = [_byte_range(t) for t in state]
    lowest, highest = min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=0)

    def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        # Detached: a saved result that still knew its own node would keep that node, and itself, for ever.
        kept = tensor.detach()
        saved.append(weakref.ref(kept))
        return kept, kept._version

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or not lowest <= tensor.data_ptr() < highest:
            return keep(tensor)
        start, end = _byte_range(tensor)
        for index, (low, high) in enumerate(bounds):
            if low <= start and end <= high:
                offset = (start - low) // tensor.element_size()
                return index, tensor.dtype, tensor.shape, tensor.stride(), offset
        return keep(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if len(packed) == 2:
            kept, before = packed
            if kept._version != before:
                raise ExecuteError(OVERWRITTEN)
            return kept
        index, dtype, shape, stride, offset = packed
        now = read_state()[index].detach()
        now = now if now.dtype == dtype else now.view(dtype)
        return now.as_strided(shape, stride, now.storage_offset() + offset)

    with saved_tensors_hooks(_of_inner(pack), _of_packed(unpack)):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _PackedTensor:
    """A saved tensor of several inner ones, each of which is kept as any other."""

    packing: Packing
    inner: list[Any]


def _of_inner(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def pack_each(tensor: torch.Tensor) -> Any:
        packing = Packing.of(tensor) if is_wrapper(tensor) else None
        if packing is None:
            return pack(tensor)
        return _PackedTensor(packing, [pack(inner) for _, inner in packing.tensors(tensor)])

    return pack_each


def _of_packed(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def unpack_each(packed: Any) -> torch.Tensor:
        if isinstance(packed, _PackedTensor):
            return packed.packing.packed(map(unpack, packed.inner))
        return unpack(packed)

    return unpack_each


HIDDEN_DRAWS = (
    "{} an RNN with dropout, whose random numbers come from a state inside of cuDNN.\n"
    "  A second run draws other numbers than the forward, so gradients of a recomputed forward would be wrong.\n"
    '  Keep the graph: activations="keep", with enough memory. Or give the RNN dropout=0, and its layers nn.Dropout.'
)


def _refuse_unpack(_: Any) -> torch.Tensor:
    raise AssertionError("a forward without a graph was differentiated")


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that a strided tensor can touch."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + span * tensor.element_size()
