"""Cuda: the features of CUDA beyond torch's generic interface."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.base.sizes import format_bytes
from megatrain.base.torch_allocator import end_capture_of_memory
from megatrain.base.torch_private import gpu_compiler, load_gpu_kernels
from megatrain.device.accelerator import Accelerator, cublas_workspace
from megatrain.device.host_pages import populate
from megatrain.device.interface import LaunchGraphs
from megatrain.errors import ExecuteError

_DEVICES = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LEAST_GT_PER_S = 8.0
"""PCIe 3. Bridges of Thunderbolt and of virtual machines say that they are older, and are not."""


def link_share(address: str, devices: Path = _DEVICES) -> float:
    """The part of a card's own link that its way to the host has: half for a card of 16 lanes in a slot of 8.

    A link is as fast as the slower of its ends (PCIe 3 and PCIe 4), and has the lanes that its ends agreed on. A
    switch on the way has a link of its own. A card at rest lowers its current speed, so the highest one counts.

    Returns:
        Above 0 and at most 1; 1 where the system doesn't say.
    """
    card = (devices / address).resolve()
    own = _figure(card, "max_link_speed") * _figure(card, "max_link_width")
    rates = [speed * lanes for speed, lanes in _ends(card) if speed >= _LEAST_GT_PER_S and lanes]
    return min(1.0, *(rate / own for rate in rates)) if own and rates else 1.0


def _ends(card: Path) -> Iterator[tuple[float, float]]:
    """GT/s and lanes of each end of a link between the card and the host: the card, and bridges on the way."""
    for device in (card, *card.parents):
        if _ADDRESS.fullmatch(device.name):
            yield _figure(device, "max_link_speed"), _figure(device, "current_link_width")


def _figure(device: Path, name: str) -> float:
    """The number with which such a file begins; 0 if there is none, or if it says `Unknown`."""
    with suppress(OSError, ValueError, IndexError):
        return float((device / name).read_text(encoding="utf-8").split()[0])
    return 0.0


# Of captures that CUDA has given up: torch's allocators refer to them from then on.
_broken: list[torch.cuda.CUDAGraph] = []
# Streams on which graphs of this process are captured, by device and handle.
_captured_on: set[tuple[int | None, int]] = set()
_lock = threading.Lock()
_POOL = 32
"""Streams that torch has of a device and priority, and hands out in turn."""


class CudaGraphs(LaunchGraphs):
    """CUDA graphs, captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _own_stream(device)
        weakref.finalize(self, _captured_on.discard, (device.index, self._stream.cuda_stream))
        self.release()

    def release(self) -> None:
        """Takes another pool: the one before goes with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()
        # With its last graph a pool is gone, and another capture into it fails: this one stays.
        self._first = self.record(lambda: torch.zeros(1, device=self._device))

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures a graph; other threads may go on with what they do, synchronisations included."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # `work` has said why
                    self._end(graph)
                raise
            self._end(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            _broken.append(graph)
            with contextlib.suppress(RuntimeError):  # it may have come so far by itself
                end_capture_of_memory(self._stream.device.index, self._pool)
            # In torch 2.11 the default generator, too, takes the capture for going on, until another one ends well:
            # each launch and each draw would fail.
            with contextlib.suppress(RuntimeError):
                again = torch.cuda.CUDAGraph()
                again.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                again.capture_end()
            raise

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Reads the address by the protocol that libraries for CUDA share."""
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nobody else captures: with a graph, torch drops cuBLAS's workspaces of the graph's stream.

    The default stream can't be captured.

    Raises:
        ExecuteError: If there is none left.
    """
    with _lock:
        for _ in range(_POOL):
            stream = torch.cuda.Stream(device)
            key = device.index, stream.cuda_stream
            if key not in _captured_on:
                _captured_on.add(key)
                return stream
    raise ExecuteError(
        f"no stream of {device} is left on which kernels could be recorded.\n"
        f"  torch has {_POOL} streams of a device, and each model with recorded kernels has one of its own.\n"
        '  Let go of models that are done, or compile with kernels="eager".'
    )


class _Bytes:
    """Memory of a GPU, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


# How the file of CUDA's runtime begins, or of AMD's, and its function of this purpose.
_LAST_ERROR = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}

# Of each thread: streams that wait for events, by device.
_waiting = threading.local()


_THREADS = 256


def _compiled(source: str, function: str) -> Any:
    """Compiles a kernel for the current GPU; torch's own compile function wants the headers of a toolkit.

    Raises:
        RuntimeError: If NVRTC refuses it.
    """
    nvrtc, major_minor = gpu_compiler(), torch.cuda.get_device_capability()
    program, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    flags = [f"--gpu-architecture=sm_{major_minor[0]}{major_minor[1]}".encode(), b"--fmad=false"]
    steps = [
        lambda: nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None),
        lambda: nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)),
        lambda: nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(nbytes)),
    ]
    for step in steps:
        if (code := step()) != 0:
            raise RuntimeError(f"NVRTC refuses `{function}`: error {code}")
    binary = ctypes.create_string_buffer(nbytes.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return load_gpu_kernels(binary.raw, [function])[function]


class Cuda(Accelerator):
    """A GPU of NVIDIA, or of AMD under the same name."""

    name = "cuda"
    # Drivers fail from 512 GiB on: what they note of each page is one array of less than 2 GiB.
    lock_bytes = 64 << 30
    has_inductor = True

    def __init__(self, index: int | None = None) -> None:
        super().__init__(self.name, index)
        _silence(_COMPACTED)

    @property
    def has_launch_graphs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With torch's own allocator: memory that cudaMallocAsync gives in a capture belongs to that graph alone."""
        return torch.cuda.get_allocator_backend() == "native"

    def lacking(self) -> Sequence[str]:
        """Nothing: CUDA has all of the generic interface."""
        return ()

    def identity(self) -> str:
        """The number that the maker gave the card."""
        return str(getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", ""))

    def link_share(self) -> float:
        """Asks the system about a card of NVIDIA. Those of AMD use fewer lanes at rest."""
        if torch.version.hip is not None:
            return 1.0
        card = torch.cuda.get_device_properties(self.torch_device)
        return link_share(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")

    def _software(self) -> str:
        version = Path("/proc/driver/nvidia/version")
        driver = version.read_text(encoding="utf-8").partition("\n")[0] if version.is_file() else ""
        return f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, {driver}"

    def kernel(self, source: str, function: str) -> Callable[..., None] | None:
        """Compiles by NVRTC, which comes with torch; None on cards of AMD, and where it or the driver refuses."""
        if torch.version.hip is not None or gpu_compiler is None or load_gpu_kernels is None:
            return None
        try:
            with torch.cuda.device(self.torch_device):
                made = _compiled(source, function)
        except (AttributeError, AssertionError, KeyError, OSError, RuntimeError, TypeError):  # private parts of torch
            return None

        def launch(number: int, *arguments: torch.Tensor | int | float) -> None:
            with torch.cuda.device(self.torch_device):
                made(grid=(-(-number // _THREADS), 1, 1), block=(_THREADS, 1, 1), args=[*arguments])

        return launch

    def launch_graphs(self) -> CudaGraphs:
        """Captures CUDA graphs."""
        return CudaGraphs(self.torch_device)

    def synchronize(self) -> None:
        """Sleeps, with an event of CUDA's own kind: a wait for a stream spins, and `torch.Event` ignores `blocking`."""
        _sleep_until(torch.cuda.current_stream(self.torch_device))

    def wait_for(self, event: Any) -> None:
        """Sleeps likewise, by a stream of this thread's that waits for the event."""
        if event.query():
            return
        streams = vars(_waiting)
        stream = streams.get(str(self))
        if stream is None:
            stream = streams[str(self)] = torch.cuda.Stream(self.torch_device)
        stream.wait_event(event)
        _sleep_until(stream)

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Multiplies in the dtype of the two, on its tensor cores, which add in fp32."""
        if left.dtype == total.dtype:
            super().add_product(total, left, right)
        else:
            total.add_(torch.mm(left, right, out_dtype=total.dtype))

    def uncounted(self) -> tuple[tuple[str, int], ...]:
        """Adds the workspaces of cuBLAS, one for each thread that computes: the caller's and autograd's."""
        capability = torch.cuda.get_device_capability(self.torch_device)
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # noqa: TID251  # torch reads it, so it says what torch takes
        nbytes = cublas_workspace(capability, config)
        return (("cuBLAS workspaces", 2 * nbytes), *super().uncounted())

    def ran_out(self, error: BaseException) -> bool:
        """Knows the errors of libraries that couldn't get memory of their own, too."""
        is_librarys = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
        return is_librarys or super().ran_out(error)

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Registers the memory with the driver: copies from and to pageable memory would block the host."""
        populate(address, nbytes)
        with torch.cuda.device(self.torch_device):
            code = int(_cudart().cudaHostRegister(address, nbytes, 0))
            if code != 0:
                self._forget_error()
        if code != 0:
            raise ExecuteError(
                f"the system can't page-lock {format_bytes(nbytes)} of host memory: CUDA error {code}.\n"
                "  Transfers that overlap with compute need page-locked memory.\n"
                f"  {HOW_TO_LOCK_MORE}"
            )
        return partial(self._unlock, address)

    def _unlock(self, address: int) -> None:
        if int(_cudart().cudaHostUnregister(address)) != 0:
            self._forget_error()

    def _forget_error(self) -> None:
        """Clears this thread's last error: the next launch of a kernel would report it as its own."""
        forget = _last_error()
        if forget is not None:
            forget()
            return
        # The runtime is a part of torch's own library. So let a launch report it that nobody waits for.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)


def _sleep_until(stream: torch.cuda.Stream) -> None:
    """Waits for the work that a stream has now."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


# cuDNN copies the weights of an RNN into one piece of memory for each call, and says how to avoid the copies: the user
# can't, because the weights lie in slots.
_COMPACTED = "RNN module weights are not part of single contiguous chunk of memory"


def _silence(message: str) -> None:
    """Ignores warnings that begin so, unless they are; each new filter makes Python repeat all earlier warnings."""
    counts = (action for action, text, kind, *_ in warnings.filters if _applies(text, kind, message))
    if next(counts, None) != "ignore":
        warnings.filterwarnings("ignore", message)


def _applies(text: Any, kind: Any, message: str) -> bool:
    return issubclass(UserWarning, kind) and (text is None or text.match(message) is not None)


HOW_TO_LOCK_MORE = "WSL2 and containers limit it: raise `memory` in .wslconfig, or the container's own limit of memory."
_NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def _cudart() -> Any:
    return torch.cuda.cudart()


def _last_error() -> Callable[[], int] | None:
    """The loaded runtime's function that returns a thread's last error and forgets it, which torch doesn't expose."""
    for path in loaded_libraries():
        for library, function in _LAST_ERROR.items():
            if path.name.startswith(library):
                with contextlib.suppress(OSError, AttributeError):
                    return getattr(ctypes.CDLL(str(path)), function)
    return None


def loaded_libraries() -> list[Path]:
    """The files that are mapped into this process, libraries among them; empty where the system doesn't tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [Path(name) for name in dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/" in line)]
