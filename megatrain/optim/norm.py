"""The norm of all gradients, gathered block by block, with the bits of `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.base.native.native_kernel import NativeKernel
from megatrain.base.torch_private import group_by_dtype
from megatrain.errors import OptimizerError

_PIECE = 1 << 18  # elements: enough for a thread to be worth it
SQUARES = NativeKernel(
    Path(__file__).parents[1] / "base" / "native" / "squares.c",
    "squares",
    ("tensor", "tensor", "tensor", "tensor", "int64", "int64", "int32"),
)
DTYPES = (torch.float32, torch.bfloat16)
"""Whose elements `sums_of_squares` takes."""


def sums_of_squares(tensors: Sequence[torch.Tensor], threads: int) -> list[float]:
    """Adds up the squares of the elements of each of several tensors, in fp64, runs of 64 squares in fp32.

    A result has the same bits for any number of threads, and whatever other tensors there are. `SQUARES.fault()` says
    whether it can be called here.

    Args:
        tensors: Contiguous, on the host, each of one of `DTYPES`.
        threads: How many share the work.
    """
    starts = [range(0, tensor.numel(), _PIECE) for tensor in tensors]
    facts = [(t.data_ptr(), t.numel(), int(t.dtype == torch.bfloat16)) for t in tensors]
    owners = [number for number, own in enumerate(starts) for _ in own]
    sums = torch.empty(len(owners), dtype=torch.float64)
    SQUARES(
        *(torch.tensor(each, dtype=torch.int64) for each in (facts, owners, [i for own in starts for i in own])),
        sums,
        len(owners),
        _PIECE,
        threads,
    )
    left = iter(sums.tolist())
    return [math.fsum(next(left) for _ in own) for own in starts]


_LARGE = 1 << 17  # elements: a smaller gradient's norm is taken sooner than threads wake
_MASK = 1 << 20  # elements whose mask is in memory at a time


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where the trouble began: the first gradient of the last block that has one that isn't finite.

    Attributes:
        block: The block it came with.
        parameter: Its place in the parameters of `GradientNorm`.
    """

    block: int
    parameter: int


class GradientNorm:
    """The L2 norm of the gradients of one step, read once, in any order of blocks, from several threads.

    Each gradient's own norm is kept, and they are combined in the order of the parameters: so the total has the bits
    that `clip_grad_norm_` computes from all gradients at once. A gradient is searched for elements that are not finite
    only if its norm isn't.

    On the host torch takes a gradient's norm on one thread, and of a bf16 gradient it makes an fp32 copy first: a
    second and more for a billion parameters, in which a GPU waits. So a device takes the norms of gradients that are
    whole as they leave it, by eager's function. Of all others (of tied parameters, parts, several processes, or with
    hooks) large ones are, with `threads`, summed in fp64 by a function of C, where there is a compiler. Such a norm is
    closer to the exact one; its bits are the same for any number of threads, but not torch's.

    Args:
        parameters: In the order in which `clip_grad_norm_` would get them.
        masters: Of parameters with fp32 masters: the norm is then taken of fp32 gradients, for any dtype of theirs.
        threads: How many sum large gradients; None leaves all to torch.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        masters: Container[torch.Tensor] = (),
        *,
        threads: int | None = None,
    ):
        self._masters = masters
        self._threads = threads
        self._place = {parameter: place for place, parameter in enumerate(parameters)}
        self._norms: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
        self._first: NonFinite | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forgets the last step."""
        self._norms.clear()
        self._first = None

    @property
    def num_gradients(self) -> int:
        """How many gradients were added since `begin`."""
        return len(self._norms)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter was added since `begin`."""
        return self._place.get(parameter) in self._norms

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first gradient of the last block that has one with an element that is not finite; None if there is none.

        A backward visits the last block first, so there the trouble began.
        """
        return self._first

    @torch.no_grad()
    def add(
        self,
        block: int,
        gradients: Mapping[torch.Tensor, torch.Tensor | None],
        norms: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Takes in the whole gradients of some parameters; those of other parameters are left out.

        Args:
            block: Where they come from, for `first_nonfinite`.
            gradients: By parameter; None where there is none. They may be overwritten after the call.
            norms: Those that are known already, fp32; such a gradient is only read if its norm isn't finite.

        Raises:
            OptimizerError: For a sparse gradient, which `clip_grad_norm_` refuses too.
        """
        known = {} if norms is None else norms
        sums = self._sums({parameter: each for parameter, each in gradients.items() if parameter not in known})
        for parameter, gradient in gradients.items():
            place = self._place.get(parameter)
            if gradient is None or place is None:
                continue
            if gradient.layout != torch.strided:
                raise OptimizerError(
                    f"a sparse gradient, of a {tuple(parameter.shape)} parameter, has no norm to clip by.\n"
                    "  torch.nn.utils.clip_grad_norm_ takes dense gradients only.\n"
                    "  Leave max_grad_norm out, or build the embedding with sparse=False."
                )
            assert place not in self._norms, f"parameter {place} has a whole gradient once a step"
            dtype = torch.float32 if gradient.dtype == torch.bfloat16 and parameter in self._masters else gradient.dtype
            if parameter in known:
                norm = known[parameter].to(dtype)
            elif parameter in sums:
                norm = sums[parameter].sqrt().to(dtype)
            else:
                norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            self._norms[place] = norm, dtype
            if not math.isfinite(norm.item()) and not _is_finite(gradient):
                with self._lock:
                    if self._first is None or block > self._first.block:
                        self._first = NonFinite(block, place)

    def _sums(self, gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> dict[torch.Tensor, torch.Tensor]:
        """The sums of the squares of large gradients, in one call for all, if there is a C compiler."""
        if self._threads is None:
            return {}
        found = {p: gradient for p, gradient in gradients.items() if gradient is not None and p in self._place}
        large = {p: gradient.contiguous() for p, gradient in found.items() if _is_large(gradient)}
        if not large or SQUARES.fault() is not None:
            return {}
        sums = sums_of_squares([*large.values()], self._threads)
        return {parameter: torch.tensor(s, dtype=torch.float64) for parameter, s in zip(large, sums, strict=True)}

    def told(self) -> dict[int, tuple[float, str]]:
        """The norm of each gradient that was added, and its dtype, by the place of its parameter."""
        return {place: (norm.item(), str(dtype)) for place, (norm, dtype) in self._norms.items()}

    def hear(self, told: Sequence[Mapping[int, tuple[float, str]]]) -> None:
        """Takes in what other processes have `told` of gradients that were added there."""
        for place, (norm, name) in ((place, each) for one in told for place, each in one.items()):
            if place not in self._norms:
                dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
                self._norms[place] = torch.tensor(norm, dtype=dtype), dtype

    @torch.no_grad()
    def total(self) -> torch.Tensor:
        """Returns the norm of all gradients, a tensor without dimensions; 0 if there are none."""
        if not self._norms:
            return torch.tensor(0.0)
        kept = [self._norms[place] for place in sorted(self._norms)]
        norms = [kept[index][0] for index in _order([dtype for _, dtype in kept])]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def coefficient(self, max_norm: float) -> torch.Tensor:
        """Returns the factor of `clip_grad_norm_` for every gradient: at most 1, a tensor without dimensions."""
        return torch.clamp(float(max_norm) / (self.total() + 1e-6), max=1.0)


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Returns the order in which torch combines norms: by dtype, in an order of its own, then by place."""
    if len(set(dtypes)) == 1:
        return list(range(len(dtypes)))
    # Torch's own function, on tensors without elements.
    groups = group_by_dtype([[torch.empty(0, dtype=dtype) for dtype in dtypes]], with_indices=True)
    return [index for _, indices in groups.values() for index in indices]


def _is_large(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.numel() > _LARGE and gradient.dtype in DTYPES


def _is_finite(gradient: torch.Tensor) -> bool:
    # A piece at a time: the mask of a large gradient would be a large tensor, and a device may have no room for any.
    return all(bool(piece.cpu().isfinite().all()) for piece in gradient.reshape(-1).split(_MASK))
