"""When two values are the same to Python code: one notion for guards, attributes, globals, arguments and checks."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch


def is_equal(left: Any, right: Any) -> bool:
    """Compares numbers, texts, arrays, and containers of such.

    NaN is the same as NaN, although `nan != nan`: nothing has changed. 0.0 isn't the same as -0.0, nor 1 as 1.0 or
    True, although they are equal: a forward can tell them apart.
    """
    if left is right:
        return True
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, np.ndarray | np.generic) and isinstance(right, np.ndarray | np.generic):
        return _is_same_array(np.asarray(left), np.asarray(right))
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    if isinstance(left, float | complex | slice | array):
        return repr(left) == repr(right)  # slices and arrays may hold NaN too
    return bool(left == right)


def _is_same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(left, right) if left.dtype.hasobject else left.tobytes() == right.tobytes()
