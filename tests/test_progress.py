"""stage(): a line on a terminal, after a while, and none elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time

import pytest
import torch

from megatrain.base.progress import ProgressLine, stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, seconds: float, **options: float) -> str:
    """What the terminal, or the file, got of work that takes so long, or ends as soon as there is a line."""
    monkeypatch.setattr("sys.stderr", stream)
    until = time.monotonic() + seconds
    with contextlib.suppress(KeyError), stage("planning", **options):
        while time.monotonic() < until and "planning: 00:0" not in stream.getvalue():
            time.sleep(0.01)
        raise KeyError
    assert "megatrain-planning" not in {thread.name for thread in threading.enumerate()}
    return stream.getvalue()


def test_work_that_takes_a_while_has_a_line_that_goes_with_it(monkeypatch: pytest.MonkeyPatch):
    text = said(monkeypatch, Terminal(), 10, after_s=0, every_s=0.01)
    assert "planning: 00:0" in text
    assert text.rpartition("\r")[2].strip() == ""  # and it is gone at the end


def test_a_file_gets_plain_lines_of_long_work_alone(monkeypatch: pytest.MonkeyPatch):
    assert said(monkeypatch, io.StringIO(), 0.3, after_s=0, every_s=0.01) == ""
    monkeypatch.setattr("megatrain.base.progress._PLAIN_EVERY_S", 0.01)
    assert said(monkeypatch, io.StringIO(), 0.3).startswith("megatrain: planning: 0 s\n")
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with ProgressLine(4, 8, lambda: 2, lambda: 0) as line:
        time.sleep(0.02)
        line.update(torch.tensor(1.5))
    assert re.fullmatch(r"megatrain: step 2 of 4, loss 1.500, \d+ tokens/s\n", file.getvalue())


def test_of_stages_within_each_other_the_outermost_is_shown(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stage("planning", after_s=0, every_s=0.01), stage("capturing", after_s=0, every_s=0.01):
        time.sleep(0.3)
    assert "planning" in terminal.getvalue()
    assert "capturing" not in terminal.getvalue()
