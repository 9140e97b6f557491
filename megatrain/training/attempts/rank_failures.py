"""What a failure of this rank, or of another one, means for the steps that follow."""

from __future__ import annotations

from megatrain.errors import RanksError
from megatrain.ranks.meeting import words_of


def broken(error: BaseException) -> str:
    """Why no further step is possible.

    Args:
        error: Which ended a step that others had begun.
    """
    return (
        "the ranks are no longer at the same step, because one of them failed in the middle of one.\n"
        f"  {words_of(error)}\n"
        "  Start all ranks again, and load the latest checkpoint."
    )


def other_rank(error: BaseException) -> RanksError | None:
    """The failure of another rank that an error comes from."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RanksError):
        cause = cause.__cause__
    return cause
