"""The C functions of the simulated device, with their types."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

WATCHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p)
_INT, _LONG, _DOUBLE, _TEXT, _SIZE = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "sim_load": (None, [_LONG]),
    "sim_option": (_INT, [_TEXT, _DOUBLE]),
    "sim_order": (None, [_INT, _LONG, _INT, ctypes.c_uint64]),
    "sim_drop": (None, [_INT, _LONG]),
    "sim_count": (_LONG, [_INT]),
    "sim_watch": (None, [ctypes.c_void_p]),
    "sim_violations": (_TEXT, []),
    "sim_lock": (_INT, [_SIZE, _SIZE]),
    "sim_unlock": (_INT, [_SIZE]),
    "sim_fail_lock": (None, [_LONG, _INT]),
    "sim_locked_bytes": (_LONG, []),
    "sim_range_bytes": (_LONG, [_INT]),
    "sim_generator": (None, [_INT, _INT, ctypes.c_void_p]),
    "sim_ops": (_TEXT, [_INT]),
    "sim_profile": (_INT, [_TEXT, _DOUBLE]),
    "sim_reset_clocks": (None, []),
    "sim_host_clock": (_DOUBLE, []),
    "sim_set_host_clock": (None, [_DOUBLE]),
    "sim_stream_clock": (_DOUBLE, [_INT, _LONG]),
    "sim_pending": (_LONG, [_INT, _LONG]),
    "sim_private_memory": (ctypes.c_void_p, [_INT]),
    "sim_drop_memory": (None, [ctypes.c_void_p]),
    "sim_begin_recording": (ctypes.c_void_p, [_INT, ctypes.c_void_p]),
    "sim_end_recording": (None, [_INT]),
    "sim_recorded": (_LONG, [ctypes.c_void_p]),
    "sim_replay": (None, [_INT, ctypes.c_void_p]),
    "sim_drop_recorded": (None, [ctypes.c_void_p]),
    "sim_spans": (None, [_INT]),
    "sim_take_spans": (_TEXT, []),
}


def opened(path: Path) -> ctypes.CDLL:
    """The library that torch has loaded, with the types of its functions."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
