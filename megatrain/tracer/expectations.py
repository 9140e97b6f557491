"""Expectation: a value that Python code read in mid-step, checked where the graph computes it."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.tracer.calls import call_name, literal_text
from megatrain.tracer.equal import is_equal
from megatrain.tracer.source_line import SourceLine


class GuardFailedError(Exception):
    """A value in mid-step isn't the one that the capture saw: another graph stands for this call.

    Nothing was committed yet; the call starts again with another variant. Users never see it.

    Args:
        text: What was expected, with the user's line.
        actual: The value found, as text.
        calls: The module calls around the check, outermost first.
    """

    def __init__(self, text: str, actual: str, calls: tuple[str, ...]):
        super().__init__(f"{text}; it is {actual}")
        self.text = text
        self.actual = actual
        self.calls = calls


class Expectation:
    """Repeats a read of the capture and compares; the target of a graph node without a result.

    Two are equal if they read and expect the same: layers that share a template may check at different places.

    Args:
        op: `"call_method"` or `"call_function"`.
        target: What is called.
        expected: The value read at capture.
        source: The user's line.
        calls: The module calls around it.
        name: Of what is read, for messages.
    """

    __name__ = "check"
    __slots__ = ("calls", "expected", "name", "op", "source", "target")

    def __init__(
        self, op: str, target: Any, expected: Any, source: SourceLine | None, calls: tuple[str, ...], name: str = "..."
    ):
        self.op = op
        self.target = target
        self.expected = expected
        self.source = source
        self.calls = calls
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises `GuardFailedError` if the value isn't the one expected."""
        with torch.no_grad():
            if self.op == "call_method":
                actual = getattr(args[0], self.target)(*args[1:], **kwargs)
            else:
                actual = self.target(*args, **kwargs)
        if not is_equal(actual, self.expected):
            name = str(self.target).strip("_") if self.op == "call_method" else call_name(self.target)
            text = f"{name}({self.name}) == {literal_text(self.expected)} at {self.source}"
            raise GuardFailedError(text, repr(actual), self.calls)

    def call_text(self, arguments: str) -> str:
        """Prints the check on arguments that are printed already."""
        name = self.target if self.op == "call_method" else call_name(self.target)
        return f"check {name}({arguments}) == {literal_text(self.expected)}"

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.op, self.target, type(self.expected), repr(self.expected)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expectation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
