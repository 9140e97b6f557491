"""Replays: a template's kernels recorded once and launched by one call (CUDA graphs), with eager's bits."""

from __future__ import annotations

import linecache
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any
from weakref import finalize

import torch
from torch import fx

from megatrain.base.garbage import paused_collection
from megatrain.base.torch_private import foreach_copy, patch_functorch
from megatrain.device import Device, LaunchGraphs
from megatrain.device.interface import replaced_kernel
from megatrain.errors import EagerKernelsWarning
from megatrain.passes.distance import largest, tensor_distance
from megatrain.passes.interpret import Code
from megatrain.passes.measured_runs import fixed_work_obstacle, launch_graph_obstacle
from megatrain.passes.program import Template
from megatrain.runtime.random_calls import RngState, repeated_rng
from megatrain.tracer.block_image import is_dense
from megatrain.tracer.packing import is_wrapper

Optionals = Sequence[torch.Tensor | None]
Work = Callable[[Sequence[torch.Tensor | None]], Optionals]
"""Computes results from arguments, by kernels alone."""
_MOST = 1024
"""Recordings of a template: two for each block, and more where the memory of weights moves from step to step."""


class Replays:
    """Runs the work of a template's blocks: the first time by eager's calls, then by recordings.

    Python needs some 10 us to launch a kernel, and short kernels take less. A recording launches all kernels of a block
    at once. It reads and writes fixed addresses. So there is one for each place in which the state of a block lies, the
    arguments are copied into memory of their own first, and results are copied out before the next recording runs.

    Args:
        warns: Whether the user asked for recordings, and hears where none are made.
    """

    def __init__(self, template: Template, device: Device, graphs: LaunchGraphs, *, warns: bool = True) -> None:
        self._warns = warns
        self._name, self._device, self._graphs = template.name, device, graphs
        self._has_run: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}
        self._places: dict[Hashable, torch.Tensor] = {}
        self.why_eager = launch_graph_obstacle(template)
        self._warn()

    def run(
        self, work: Work, arguments: Optionals, state: Sequence[torch.Tensor], key: Hashable
    ) -> list[torch.Tensor | None]:
        """Returns what `work(arguments)` does.

        Args:
            work: It reads `state` as well, and writes into nothing that it gets.
            arguments: Tensors of any address; None for one that isn't there.
            state: Tensors whose addresses recur.
            key: What else the work depends on.
        """
        if self.why_eager:
            return [*work(arguments)]
        kind = (key, self._graphs.settings(), *[_form(t) for t in arguments])
        where = (*kind, *[(t.data_ptr(), t.dtype, t.shape, t.stride(), t.requires_grad) for t in state])
        recording = self._recordings.get(where)
        if recording is None:
            if kind not in self._has_run:
                return self._first(work, arguments, state, kind)
            try:
                recording = self._recordings[where] = self._with_memory(work, arguments, state)
            except RuntimeError as error:
                if self._device.ran_out(error):
                    raise
                self._give_up(str(error).strip().partition("\n")[0])
                return [*work(arguments)]
        with torch.no_grad():
            recording.fill(arguments)
            recording.launch()
            return recording.results(arguments, state)

    def _first(
        self, work: Work, arguments: Optionals, state: Sequence[torch.Tensor], kind: Hashable
    ) -> list[torch.Tensor | None]:
        """Runs the work as it is: libraries make what they need at their first call, which can't be recorded."""
        given = [t for t in (*arguments, *state) if t is not None]
        if any(t.is_inference() for t in given):
            return [*work(arguments)]  # nothing tells whether it writes into them
        before = [t._version for t in given]
        results = [*work(arguments)]
        replaced = replaced_kernel()
        if replaced:
            self._give_up(f"a kernel of {replaced} is Python, which a recording would leave out")
        elif any(t._version != version for t, version in zip(given, before, strict=True)):
            self._give_up("it writes into its inputs or state")
        elif not all(t is None or _is_plain(t) for t in (*given, *results)):
            self._give_up("it has sparse, packed or conjugated tensors")
        self._has_run.add(kind)
        return results

    def _with_memory(self, work: Work, arguments: Optionals, state: Sequence[torch.Tensor]) -> _Recording:
        """Records work. In the meantime torch's allocator can't give back what it keeps for later."""
        try:
            return self._recorded(work, arguments, state)
        except RuntimeError as error:
            if not self._device.ran_out(error):
                raise
        self._device.empty_cache()
        return self._recorded(work, arguments, state)

    def _recorded(self, work: Work, arguments: Optionals, state: Sequence[torch.Tensor]) -> _Recording:
        places = [None if t is None else self._place(number, t) for number, t in enumerate(arguments)]
        made: list[torch.Tensor | None] = []
        with paused_collection():  # what the collector frees might be a recording, which can't end now
            launch = self._graphs.record(lambda: made.extend(work(places)))
        results = [None if t is None else self._result(t, places, state) for t in made]
        while len(self._recordings) >= _MOST:
            self._recordings.pop(next(iter(self._recordings)))
        return _Recording.of(launch, places, results)

    def _place(self, number: int, argument: torch.Tensor) -> torch.Tensor:
        """Memory for an argument of this form, with its holes; the forward and the backward share it."""
        key = number, _form(argument)
        if key not in self._places:
            size = _span(argument)
            # Of the graphs: the caller's streams may differ from call to call.
            nbytes = size * argument.element_size()
            memory = self._graphs.allocate(nbytes) if nbytes else self._device.allocate(0)
            self._places[key] = memory.view(argument.dtype).as_strided(argument.shape, argument.stride())
        return self._places[key]

    def _result(self, tensor: torch.Tensor, places: Optionals, state: Sequence[torch.Tensor]) -> _Result:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        layout = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        if nbytes == 0:
            return _Result(*layout, address, self._device.allocate(0))
        for is_argument, others in ((True, places), (False, state)):
            for number, other in enumerate(others):
                if other is None or other.untyped_storage().data_ptr() != address:
                    continue
                if other.dtype != tensor.dtype:
                    raise RuntimeError("a result is a view of what was given, in another dtype")
                return _Result(*layout, address, None, (is_argument, number, int(other.storage_offset())))
        return _Result(*layout, address, self._graphs.memory(address, nbytes))

    def forget(self, why: str) -> None:
        """Drops all recordings, and makes no more if there is a reason."""
        self._recordings.clear()
        self._places.clear()
        self.why_eager = self.why_eager or why

    def _give_up(self, reason: str) -> None:
        self.forget(reason)
        self._warn()

    def _warn(self) -> None:
        if self.why_eager and self._warns:
            text = f"the kernels of template {self._name} aren't recorded: {self.why_eager}"
            warnings.warn(text, EagerKernelsWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of recorded work.

    Args:
        offset: Where it begins in its storage, in elements.
        address: Of its storage; results may share one.
        memory: The whole storage; None for a view of what was given.
        given: What it is a view of: whether an argument or state, its number, and where that begins in its storage.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int
    address: int
    memory: torch.Tensor | None
    given: tuple[bool, int, int] = (False, 0, 0)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The result in a storage."""
        return memory.view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    @property
    def is_whole(self) -> bool:
        """Whether its elements are its whole storage, each once."""
        is_all = self.memory is not None and math.prod(self.shape) * self.dtype.itemsize == self.memory.nbytes
        return is_all and self.offset == 0

    def within(self, arguments: Optionals, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result as a view of what is given now."""
        is_argument, number, offset = self.given
        base = (arguments if is_argument else state)[number]
        assert base is not None
        base = base.detach()
        return base.as_strided(self.shape, self.stride, self.offset + base.storage_offset() - offset)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """Recorded work of a template, with its arguments' memory and its results.

    All copies from or to memory without holes are two calls, one for arguments and one for results.

    Args:
        dense: Arguments without holes: their numbers, and where the work reads them.
        others: Those of other arguments.
        sources: Of each result that has its storage for itself, the memory in which the work leaves it; else None.
    """

    launch: Callable[[], None]
    dense: tuple[Sequence[int], list[torch.Tensor]]
    others: Sequence[tuple[int, torch.Tensor]]
    found: Sequence[_Result | None]
    sources: Sequence[torch.Tensor | None]

    @classmethod
    def of(cls, launch: Callable[[], None], places: Optionals, found: Sequence[_Result | None]) -> _Recording:
        """Sorts arguments and results by how they are copied."""
        given = [(number, place) for number, place in enumerate(places) if place is not None]
        dense = [(number, place) for number, place in given if _is_copied_with_others(place)]
        others = [(number, place) for number, place in given if not _is_copied_with_others(place)]
        shared = Counter(result.address for result in found if result is not None)
        sources = [
            result.of(result.memory)
            if result is not None and result.memory is not None and result.is_whole and shared[result.address] == 1
            else None
            for result in found
        ]
        sources = [None if source is None or not _is_copied_with_others(source) else source for source in sources]
        return cls(launch, ([number for number, _ in dense], [place for _, place in dense]), others, found, sources)

    def fill(self, arguments: Optionals) -> None:
        """Copies the arguments to where the work reads them, holes included: those of expanded tensors are small."""
        numbers, places = self.dense
        if numbers:
            foreach_copy(places, whole([arguments[number] for number in numbers]))
        for number, place in self.others:
            argument = arguments[number]
            assert argument is not None
            size = _span(argument)
            flat = argument.detach().as_strided((size,), (1,), argument.storage_offset())
            place.as_strided((size,), (1,), place.storage_offset()).copy_(flat)

    def results(self, arguments: Optionals, state: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copies results to memory of their own, before another recording overwrites them."""
        owned: dict[int, torch.Tensor] = {}
        tensors: list[torch.Tensor | None] = []
        copied: list[torch.Tensor] = []
        for result, source in zip(self.found, self.sources, strict=True):
            if source is not None:
                tensors.append(fresh := torch.empty_like(source))  # which keeps the strides of what has no holes
                copied.append(fresh)
            elif result is None:
                tensors.append(None)
            elif result.memory is None:
                tensors.append(result.within(arguments, state))
            else:
                if result.address not in owned:
                    owned[result.address] = torch.empty_like(result.memory).copy_(result.memory)
                tensors.append(result.of(owned[result.address]))
        if copied:
            foreach_copy(copied, [source for source in self.sources if source is not None])
        return tensors


def whole(tensors: Optionals) -> list[torch.Tensor]:
    """The same tensors, none of which is missing."""
    found = [tensor for tensor in tensors if tensor is not None]
    assert len(found) == len(tensors)
    return found


def _is_copied_with_others(tensor: torch.Tensor) -> bool:
    """Whether one call copies it with others: not every device has that kernel for whole numbers and narrow floats."""
    is_wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return is_wide and is_dense(tensor.shape, tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (is_wrapper(tensor) or tensor.is_conj() or tensor.is_neg())


def _form(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)


def _span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


# Dropout draws eager's own numbers, in their order.
_OPTIONS: dict[str, Any] = {"fallback_random": True}
# Of a result's largest value. Rounding moves less; where a dropout drops another element, it moves more.
_OTHER_DRAWS = 0.05


_numbers = count()


class _OtherDrawsError(Exception):
    """The compiled form of a template isn't the same model."""


_Function = Callable[..., tuple[torch.Tensor, ...]]


class InductorCode(Code):
    """Runs a graph by kernels that inductor has made of it, forward and backward; by eager's where it can't.

    The kernels are made at the first call for each combination of grad mode and tensors that require gradients, and
    inductor's cache on disk keeps them. Weights are arguments, so that blocks share the kernels. A block that is
    repeated runs those of its first run.
    """

    __slots__ = ("_device", "_is_to_be_tried", "_name", "why_eager")

    def __init__(self, graph: fx.Graph, template: Template, device: Device):
        super().__init__(graph)
        self._name, self._device = template.name, device
        # Decompositions may draw in another order, or other numbers: the first run shows.
        self._is_to_be_tried = template.is_random
        self.why_eager = fixed_work_obstacle(template)
        self._warn()

    def _made(self) -> _Function:
        eager = super()._made()
        if self.why_eager:
            return eager
        _give_a_file(eager, self._name)
        compiled: _Function = torch.compile(eager, fullgraph=True, dynamic=False, options=_OPTIONS)

        def run(is_checked: bool, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self.why_eager:
                return eager(is_checked, *arguments)
            start = RngState.now(self._device) if self._is_to_be_tried else None
            try:
                # A backward may come twice (retain_graph), so that it must not write into what the forward has saved.
                with patch_functorch(donated_buffer=False):
                    if start is not None:
                        self._try(eager, compiled, arguments, start)
                    return compiled(True, *arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, of what it made, or of the model, whose own comes again here
                if start is not None:
                    start.restore(self._device)
                result = eager(is_checked, *arguments)
                self.why_eager = _told(error)
                self._warn()
                return result

        return run

    def _try(self, eager: _Function, compiled: _Function, arguments: Sequence[torch.Tensor], start: RngState) -> None:
        """Runs a template that draws random numbers in both ways, for nothing but to compare them."""
        ran: list[tuple[list[torch.Tensor], RngState]] = []
        for function in (eager, compiled):
            with repeated_rng(start, self._device):
                result = function(True, *(a.detach().clone().requires_grad_(a.requires_grad) for a in arguments))
                ran.append(([tensor.detach().cpu() for tensor in result], RngState.now(self._device)))
        (expected, end), (found, other_end) = ran
        gaps = (tensor_distance(e, f)[0] / (largest(e) or 1.0) for e, f in zip(expected, found, strict=True))
        if not end.is_same(other_end) or any(gap > _OTHER_DRAWS for gap in gaps):
            raise _OtherDrawsError("compiled, it draws other random numbers than eager PyTorch")
        self._is_to_be_tried = False

    def _warn(self) -> None:
        if self.why_eager:
            warnings.warn(
                f"template {self._name} runs on eager's kernels: {self.why_eager}", EagerKernelsWarning, stacklevel=2
            )


def _give_a_file(function: _Function, name: str) -> None:
    """Gives a function that came from text a file of its own, which is empty.

    torch.compile calls functions without a file from one wrapper. torch 2.11 counts what it compiles for all of them
    together, and refuses the ninth.
    """
    assert isinstance(function, FunctionType)
    file = f"<megatrain {name} {next(_numbers)}>"
    linecache.cache[file] = (0, None, [], file)
    function.__code__ = function.__code__.replace(co_filename=file)
    finalize(function, linecache.cache.pop, file, None)


def _told(error: Exception) -> str:
    """The first lines of an error of the compiler; the first one alone may say no more than who raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
