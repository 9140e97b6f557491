"""Simulator: what a test may ask and order of the simulated device."""

from __future__ import annotations

import ctypes
import gc
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isinf
from typing import Literal, NamedTuple, get_args

import torch

from megatrain.hardware.hardware import Hardware
from tests.simulated_device.interface import WATCHER
from tests.simulated_device.torch_module import COUNT

OrderName = Literal["early", "late", "seeded"]
CallName = Literal[
    "wait",
    "record",
    "record_stream",
    "event",
    "stream",
    "device",
    "item",
    "blocking copy",
    "pageable",
    "op",
    "allocator",
]
_CALLS: tuple[CallName, ...] = get_args(CallName)
_ORDERS: tuple[OrderName, ...] = get_args(OrderName)
_FIRST_SYNCHRONIZATION = _CALLS.index("event")
GIB = 1 << 30


class Synchronization(NamedTuple):
    """A call at which the host waited for the device, or would have if there had been work.

    Args:
        kind: `event`, `stream` and `device` are calls of synchronize(); `item` reads a number; `blocking copy` is a
            copy that waits for its end, `pageable` one that waits for the stream's earlier work; `op` is an op whose
            result has a size that only the device knows; `allocator` gives back memory.
        what: More words, such as the op's name.
        thread: Name of the host thread.
        stack: Its Python frames, outermost first.
        device: Index of the device.
        stream: Id of the stream; -1 for all.
    """

    kind: CallName
    what: str
    thread: str
    stack: traceback.StackSummary
    device: int
    stream: int

    def __str__(self) -> str:
        last = self.stack[-1] if self.stack else None
        place = f" at {last.filename}:{last.lineno}" if last else ""
        return f"{self.kind} {self.what} on {self.thread}{place}"


@dataclass(frozen=True)
class HardwareProfile:
    """How fast a card and its host are. A rate of 0 takes no time.

    Args:
        fp32: FLOP/s of products of float32.
        tf32: The same where `torch.set_float32_matmul_precision` allows fewer bits.
        half: FLOP/s of products of bfloat16 and float16.
        memory: Bytes/s of device memory.
        launch: Seconds of each kernel beyond its work.
        h2d: Bytes/s to the device, from page-locked memory.
        d2h: Bytes/s from the device, likewise.
        pageable: Bytes/s either way with other memory.
        both_ways: Part of `h2d + d2h` that the link moves while both directions are busy, 0.5 to 1.
        sync: Seconds of the host after the work that it waited for.
        issue: Seconds of the host for each kernel or copy.
        control: Seconds of the host for each event, recorded or waited for by a stream.
        measured: Seconds of the host for each second of its thread's CPU time between calls of the device; 0: none.
    """

    fp32: float = 0
    tf32: float = 0
    half: float = 0
    memory: float = 0
    launch: float = 0
    h2d: float = 0
    d2h: float = 0
    pageable: float = 0
    both_ways: float = 1
    sync: float = 0
    issue: float = 0
    control: float = 0
    measured: float = 0

    @staticmethod
    def of(machine: Hardware) -> HardwareProfile:
        """The rates of a machine, which has one for each class of dtypes."""
        both_ways = machine.h2d_beside * machine.h2d_bytes_per_s + machine.d2h_beside * machine.d2h_bytes_per_s
        return HardwareProfile(
            fp32=machine.product_rate("fp32"),
            tf32=machine.product_rate("tf32"),
            half=machine.product_rate("bf16"),
            memory=0 if isinf(machine.memory_bytes_per_s) else machine.memory_bytes_per_s,
            launch=machine.launch_s,
            h2d=machine.h2d_bytes_per_s,
            d2h=machine.d2h_bytes_per_s,
            pageable=machine.h2d_bytes_per_s / 4,
            both_ways=both_ways / (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s),
            sync=5e-6,
            issue=machine.issue_s,
            control=1.5e-6,
        )


class Span(NamedTuple):
    """A piece of work in virtual time, in seconds."""

    device: int
    stream: int
    begin: float
    end: float
    nbytes: float
    flops: float
    name: str


class Simulator:
    """The simulated device of this process.

    Args:
        library: The C functions.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._watcher: object | None = None
        self._found: list[Synchronization] | None = None
        self._sites: list[tuple[CallName, Callable[[traceback.StackSummary], bool]]] = []

    def reset(self) -> None:
        """Goes back to a device as it is after loading. Memory that is held stays; work that is left runs."""
        self._library.sim_watch(None)
        self._watcher = self._found = None
        self._sites.clear()
        for index in range(len(_CALLS)):
            self._library.sim_drop(index, -1)
        self.order("early")
        for index in range(COUNT):
            torch.accelerator.synchronize(index)
        torch.accelerator.set_device_index(0)
        self.fail_lock(None)
        self.configure(capacity=2 * GIB, poison=True, segments=True, compute=True, item=0, lock_limit=1 << 60)
        self.set_profile(None)
        self.violations()

    # -- order -----------------------------------------------------------------------------------------------

    def order(self, order: OrderName, *streams: torch.Stream, seed: int = 0) -> None:
        """Chooses when the tasks of streams run: as early or as late as the waits allow, or by a seeded generator.

        Args:
            order: Which.
            streams: Whose; none given means all streams of all devices.
            seed: For `"seeded"`.
        """
        number = _ORDERS.index(order)
        if not streams:
            self._library.sim_order(-1, -1, number, seed)
        for stream in streams:
            self._library.sim_order(stream.device_index, stream.stream_id, number, seed)

    def late_but_default(self) -> None:
        """All streams are late but each device's default one, which is early."""
        self.order("late")
        for index in range(COUNT):
            self._library.sim_order(index, 0, _ORDERS.index("early"), 0)

    def pending(self, stream: torch.Stream) -> int:
        """The number of tasks of a stream that haven't run."""
        return self._library.sim_pending(stream.device_index, stream.stream_id)

    # -- what the host calls ---------------------------------------------------------------------------------

    def drop(self, kind: CallName, nth: int | None) -> None:
        """Has the n-th call of a kind from now, counted from 0, do nothing; None drops none. Starts `count` anew.

        Calls that return values can't be dropped, only counted: from `"item"` on in the list of kinds.
        """
        self._library.sim_drop(_CALLS.index(kind), -1 if nth is None else nth)

    def drop_where(self, kind: CallName, is_there: Callable[[traceback.StackSummary], bool]) -> None:
        """Drops each call of a kind whose Python stack `is_there` accepts, until `reset`."""
        self._sites.append((kind, is_there))
        self._watch()

    def count(self, kind: CallName) -> int:
        """The number of calls of a kind since `drop` or `reset`."""
        return self._library.sim_count(_CALLS.index(kind))

    @contextmanager
    def synchronizations(self) -> Generator[list[Synchronization]]:
        """Notes each time that the host waits, during the body."""
        # Memory that earlier tests left unlocks itself when it is collected, which waits for the device.
        gc.collect()
        before, self._found = self._found, []
        self._watch()
        try:
            yield self._found
        finally:
            self._found = before
            self._watch()

    def _watch(self) -> None:
        if self._found is None and not self._sites:
            self._library.sim_watch(None)
            return
        if self._watcher is None:
            # Kept: C has no other hold on it. It runs before the device's lock is taken, as it needs Python's.
            self._watcher = WATCHER(self._saw)
        self._library.sim_watch(ctypes.cast(self._watcher, ctypes.c_void_p))  # pyright: ignore[reportArgumentType]

    def _saw(self, call: int, device: int, stream: int, what: bytes) -> int:
        kind = _CALLS[call]
        sites = [is_there for name, is_there in self._sites if name == kind]
        is_noted = self._found is not None and call >= _FIRST_SYNCHRONIZATION
        if not sites and not is_noted:
            return 0
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
        stack.reverse()
        del stack[-1:]
        if self._found is not None and is_noted:
            thread = threading.current_thread().name
            self._found.append(Synchronization(kind, what.decode(), thread, stack, device, stream))
        return int(any(is_there(stack) for is_there in sites))

    def ops(self, *, waiting: bool) -> dict[str, int]:
        """How often each op ran since loading: those that made the host wait, or those that didn't."""
        lines = self._library.sim_ops(int(waiting)).decode().splitlines()
        return {name: int(n) for name, n in (line.split() for line in lines)}

    # -- memory ----------------------------------------------------------------------------------------------

    def configure(
        self,
        *,
        capacity: int | None = None,
        poison: bool | None = None,
        segments: bool | None = None,
        compute: bool | None = None,
        item: float | None = None,
        lock_limit: int | None = None,
    ) -> None:
        """Changes options; None leaves one as it is.

        Args:
            capacity: Bytes of segments that each device gives.
            poison: Fill memory with 0xFF when it is new and when it is freed, in stream order.
            segments: Cut blocks from segments as CUDA's allocator does. If not, a block takes its size, rounded up to
                512 bytes, and no more. Change it while the device holds no memory.
            compute: Run kernels and copies. If not, they only take virtual time, and values are arbitrary.
            item: What reading a number gives then.
            lock_limit: Bytes of host memory that can be page-locked.
        """
        given = {"poison": poison, "segments": segments, "compute": compute, "item": item, "lock_limit": lock_limit}
        given |= {f"capacity:{index}": capacity for index in range(COUNT)}
        for key, value in given.items():
            if value is not None:
                assert self._library.sim_option(key.encode(), float(value)) == 0

    def set_capacity(self, index: int, nbytes: int) -> None:
        """Sets the capacity of one device."""
        assert self._library.sim_option(f"capacity:{index}".encode(), float(nbytes)) == 0

    def lock(self, address: int, nbytes: int) -> int:
        """Page-locks host memory.

        Returns:
            0, or a code of cudaHostRegister: 1 invalid value, 2 out of memory, 712 already registered.
        """
        return self._library.sim_lock(address, nbytes)

    def unlock(self, address: int) -> int:
        """The reverse of `lock`, with its first address; returns 0, or 713 if it isn't registered."""
        return self._library.sim_unlock(address)

    def fail_lock(self, nth: int | None, code: int = 2) -> None:
        """Has the n-th `lock` from now, counted from 0, return `code`; None takes that back."""
        self._library.sim_fail_lock(-1 if nth is None else nth, code)

    @property
    def locked_bytes(self) -> int:
        """Bytes of host memory that are page-locked now."""
        return self._library.sim_locked_bytes()

    def violations(self) -> list[str]:
        """Takes the notes of mistakes that a real device would answer with undefined behaviour."""
        return self._library.sim_violations().decode().splitlines()

    # -- recorded work ---------------------------------------------------------------------------------------

    def private_memory(self, index: int) -> int:
        """Memory of recordings that nothing else gets; returns what names it."""
        return self._library.sim_private_memory(index)

    def drop_memory(self, memory: int) -> None:
        """The reverse."""
        self._library.sim_drop_memory(memory)

    @contextmanager
    def recording(self, index: int, memory: int) -> Generator[int]:
        """Records the work of the current stream, which isn't issued, during the body; gives what names it."""
        recorded = self._library.sim_begin_recording(index, memory)
        try:
            yield recorded
        finally:
            self._library.sim_end_recording(index)

    def replay(self, index: int, recorded: int) -> None:
        """Issues recorded work to the current stream."""
        self._library.sim_replay(index, recorded)

    def num_recorded(self, recorded: int) -> int:
        """Pieces of work in a recording."""
        return self._library.sim_recorded(recorded)

    def drop_recorded(self, recorded: int) -> None:
        """Forgets a recording."""
        self._library.sim_drop_recorded(recorded)

    # -- virtual time ----------------------------------------------------------------------------------------

    def set_profile(self, profile: HardwareProfile | None) -> None:
        """Starts virtual time, all clocks at 0; None stops it."""
        for key, value in asdict(profile or HardwareProfile()).items():
            assert self._library.sim_profile(key.encode(), float(value)) == 0
        self._library.sim_profile(b"is_on", float(profile is not None))
        self._library.sim_reset_clocks()

    @property
    def host_clock(self) -> float:
        """Virtual seconds on the calling thread's clock; autograd's thread uses that of the thread that called it."""
        return self._library.sim_host_clock()

    @host_clock.setter
    def host_clock(self, seconds: float) -> None:
        self._library.sim_set_host_clock(seconds)

    def stream_clock(self, stream: torch.Stream) -> float:
        """Virtual seconds at which a stream's last task ends."""
        return self._library.sim_stream_clock(stream.device_index, stream.stream_id)

    @contextmanager
    def spans(self) -> Generator[list[Span]]:
        """Fills a list, at the end of the body, with all work that was issued during it."""
        found: list[Span] = []
        self._library.sim_spans(1)
        try:
            yield found
        finally:
            for line in self._library.sim_take_spans().decode().splitlines():
                device, stream, begin, end, nbytes, flops, name = line.split(" ", 6)
                found.append(
                    Span(int(device), int(stream), float(begin), float(end), float(nbytes), float(flops), name)
                )
            self._library.sim_spans(0)
