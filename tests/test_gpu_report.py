"""The report of a machine with a GPU: how its commands end, and what it says of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import LIMIT_S, PARTS, Options, Stage, run

CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def python(code: str, limit_s: float = 60) -> Stage:
    return Stage("A stage", (sys.executable, "-c", code), limit_s)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_command_that_ends_has_its_status_and_both_streams():
    outcome = run(python("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"))
    assert outcome.status == 3
    assert sorted(outcome.output.split()) == ["one", "two"]
    assert str(outcome).startswith("status 3, ")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_command_that_takes_too_long_ends_with_all_that_it_started():
    outcome = run(python(CHILD, limit_s=2))
    assert outcome.status is None
    assert str(outcome).startswith("ended by its time limit")
    child, until = int(outcome.output), time.monotonic() + 10
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("harness", [Path("folder"), None])
def test_all_commands_of_a_part_fit_into_nine_minutes(part: str, harness: Path | None):
    for is_small in (False, True):
        found = list(PARTS[part](Options("cuda", harness, is_small)))
        assert found
        assert sum(stage.limit_s for stage in found) <= LIMIT_S


def test_the_report_is_written_after_each_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    report = tmp_path / "reports" / "A.md"

    def two(_: Options) -> list[Stage]:
        look = f"import os, sys; sys.exit(0 if os.path.exists({os.fspath(report)!r}) else 4)"
        return [python(look), python(look)]

    monkeypatch.setitem(PARTS, "A", two)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--part", "A", "--reports", str(report.parent)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert "status 4" in report.read_text(), "of the first stage, which found no report"
    assert "status 0" in report.read_text(), "of the second"
    assert ended.value.code == 4, "the first status that isn't 0"


def test_a_device_that_is_not_there_is_refused_before_any_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    report = tmp_path / "reports"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "nonsense", "--reports", str(report)])
    with pytest.raises(SystemExit, match=r"'nonsense' is not a device\.\n.*see docs/gpu\.md"):
        gpu.main()
    assert not report.exists()
