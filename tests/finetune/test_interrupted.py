"""A training that is interrupted or killed goes on by the same command, to the bits of an undisturbed one."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.tools.finetune.callbacks import StopBetweenSteps
from tests.comparing import assert_same
from tests.finetune.commands import ROOT, data, log_of, losses_of, save_model, started, train, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
NUM_STEPS = 12
GIVEN = (
    *("--device=cpu", "--length=16", f"--steps={NUM_STEPS}", "--accumulate=2", "--lr=1e-2", "--save-every=4"),
    *("--eval-fraction=0.2", "--memory=150KiB"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    save_model(folder / "model")
    data(folder, "messages")
    assert train(*arguments(folder, folder / "out")) == 0
    return folder


def arguments(materials: Path, out: Path) -> list[object]:
    return [materials / "model", materials / "messages.jsonl", "--out", out, *GIVEN]


def ended_by(number: int, command: list[object], out: Path, checkpoint: str) -> tuple[int, str, str]:
    """Starts the command, and sends a signal when it writes a checkpoint."""
    process = started(*command)
    while process.poll() is None and not (out / checkpoint).exists():
        time.sleep(0.002)
    process.send_signal(number)
    said, wrong = process.communicate(timeout=600)
    return process.returncode, said, wrong


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert log_of(out) == log_of(undisturbed / "out") == losses_of(out)
    assert_same(weights_of(out), weights_of(undisturbed / "out"))


@pytest.mark.nightly
def test_ctrl_c_saves_and_the_same_command_goes_on(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status, _, wrong = ended_by(signal.SIGINT, arguments(undisturbed, out), out, "checkpoint-4")
    assert status == 130, wrong
    saved = max(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))
    assert f"interrupted; step {saved} of {NUM_STEPS} is saved in `{out}`" in wrong
    assert "The same command goes on from there." in wrong
    assert not list(out.glob("*.safetensors"))
    assert train(*arguments(undisturbed, out), "--memory=1MiB") == 0  # the budget may change
    assert f"resume  step {saved} of {NUM_STEPS}, from" in capsys.readouterr().out
    assert_same_run(out, undisturbed)


@pytest.mark.nightly
def test_a_killed_training_goes_on_from_the_newest_whole_checkpoint(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status, _, _ = ended_by(signal.SIGKILL, arguments(undisturbed, out), out, "checkpoint-8")
    assert status == -signal.SIGKILL
    assert train(*arguments(undisturbed, out)) == 0
    # The checkpoint of step 8 is whole or isn't, by the moment of the kill.
    said = capsys.readouterr().out
    assert any(f"resume  step {step} of {NUM_STEPS}, from" in said for step in (4, 8))
    assert_same_run(out, undisturbed)


@pytest.mark.nightly
def test_a_killed_training_goes_on_with_its_optimizer_state_in_a_file(undisturbed: Path, tmp_path: Path) -> None:
    out, offloaded = tmp_path / "out", ("--offload", ROOT / "tests", "--host-memory=415KiB")
    status, _, _ = ended_by(signal.SIGKILL, [*arguments(undisturbed, out), *offloaded], out, "checkpoint-8")
    assert status == -signal.SIGKILL
    assert train(*arguments(undisturbed, out), *offloaded) == 0
    assert_same_run(out, undisturbed)


def test_the_first_ctrl_c_ends_at_the_next_checkpoint_and_the_second_at_once() -> None:
    control: Any = SimpleNamespace(should_save=False, should_training_stop=False)
    before, stop = signal.getsignal(signal.SIGINT), StopBetweenSteps()
    stop.on_step_end(None, None, control)
    stop.on_save(None, None, control)
    assert (control.should_save, control.should_training_stop) == (False, False)
    with stop:
        signal.raise_signal(signal.SIGINT)
        stop.on_save(None, None, control)
        assert (control.should_save, control.should_training_stop) == (False, True)
        stop.on_step_end(None, None, control)
        assert (control.should_save, control.should_training_stop) == (True, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
