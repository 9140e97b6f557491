"""update_traffic(): bytes of host memory that an update reads and writes."""

from __future__ import annotations

from collections.abc import Mapping

UPDATE_TRAFFIC: Mapping[str, int] = {"whole": 7, "exact": 13, "rounded": 11}
"""What an update of AdamW touches per byte of a parameter, by the kind of its master.

An update reads the gradient, and reads and writes the parameter and two moments: 28 bytes of an fp32 parameter. The
moments of a bf16 parameter with a master are fp32: with an exact master, whose low half is read and written, too, that
makes 2 + 2 * (2 + 2 + 8) = 26 bytes, without low halves 22.
"""


def update_traffic(dtype: str, masters: str) -> int:
    """The same of a parameter of some dtype.

    Args:
        dtype: Its text, such as `"torch.bfloat16"`.
        masters: The kind of master of bf16 parameters; all others are their own.
    """
    return UPDATE_TRAFFIC[masters if dtype == "torch.bfloat16" else "whole"]
