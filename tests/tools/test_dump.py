"""compiled.dump: every stage of each capture as text, in a folder that holds nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain import ExecuteError, LowerError, OptionError
from megatrain.passes.rewriter import Rewriter
from megatrain.scheduler.text import workload_text
from tests.models import Gpt

IDS = torch.arange(16).reshape(2, 8)
STAGES = (
    "traced", "canonicalize", "partition", "lift_state", "dedup", "measure", "program", "workload", "schedule",
    "instructions", "plan",
)  # fmt: skip


def compiled_gpt(**options: Any) -> Any:
    torch.manual_seed(0)
    return megatrain.compile(Gpt(depth=1), device="cpu", **options)


def read(paths: list[Path]) -> dict[str, str]:
    return {path.name: path.read_text() for path in paths}


def test_a_dump_has_each_stage_of_each_capture_in_order(tmp_path: Path):
    compiled = compiled_gpt(memory="1MiB")
    compiled(IDS)
    with torch.no_grad():
        compiled(IDS)
    folder = tmp_path / "made" / "here"
    paths = compiled.dump(folder)
    assert [path.name for path in paths] == [
        f"capture-{capture}-{index:02d}-{stage}.txt" for capture in (1, 2) for index, stage in enumerate(STAGES)
    ]
    assert sorted(folder.iterdir()) == paths  # the names sort as the stages come
    texts = read(paths)
    found = {
        "00-traced": compiled.traced,
        "06-program": compiled.program,
        "07-workload": workload_text(compiled.schedule.known_workload()),
        "08-schedule": compiled.schedule,
        "09-instructions": compiled.schedule.instructions,
    }
    for name, value in found.items():
        assert texts[f"capture-2-{name}.txt"] == f"{value}\n"
    for capture in (1, 2):
        assert texts[f"capture-{capture}-05-measure.txt"] == texts[f"capture-{capture}-06-program.txt"]
    assert ", 1 template" not in texts["capture-1-03-lift_state.txt"].splitlines()[0]
    assert texts["capture-1-08-schedule.txt"] != texts["capture-2-08-schedule.txt"]
    assert f"{compiled.schedule.device_bytes}  " in texts["capture-2-10-plan.txt"]


def test_a_dump_is_the_same_again_and_replaces_an_earlier_one(tmp_path: Path):
    compiled = compiled_gpt()
    compiled(IDS)
    compiled(IDS[:1])
    first = read(compiled.dump(str(tmp_path)))
    assert read(compiled.dump(tmp_path)) == first
    other = compiled_gpt()
    other(IDS)
    assert len(other.dump(tmp_path)) == len(STAGES)
    assert len(list(tmp_path.iterdir())) == len(STAGES)
    assert {name: first[name] for name in read(other.dump(tmp_path))} == read(other.dump(tmp_path))


def test_a_dump_before_the_first_call_is_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(ExecuteError, match=r"nothing is compiled yet(.|\n)*Call the model once, or give"):
        compiled_gpt().dump(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path):
    compiled = compiled_gpt()
    compiled(IDS)
    compiled.dump(tmp_path)
    before = sorted(tmp_path.iterdir())
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(OptionError, match=r"holds other files: notes.md\.\n  A dump replaces"):
        compiled.dump(tmp_path)
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "notes.md"]
    with pytest.raises(OptionError, match="can't be written: File exists"):
        compiled.dump(tmp_path / "notes.md")
    with pytest.raises(OptionError, match="folder=7 is not a path"):
        compiled.dump(7)


def test_a_pass_that_does_something_else_the_second_time_is_refused(tmp_path: Path):
    runs: list[str] = []

    def renames(traced: Any) -> Any:
        runs.append("x")
        editor = Rewriter(traced)
        if len(runs) > 1:
            for node in editor.calls(torch.nn.functional.gelu):
                editor.replace(node, editor.call(node, torch.relu, node.args[0]))
        return editor.done()

    compiled = compiled_gpt(passes=[renames])
    compiled(IDS)
    with pytest.raises(LowerError, match="the passes made a program from capture 1 that differs from the one in use"):
        compiled.dump(tmp_path)
