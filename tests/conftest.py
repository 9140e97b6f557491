"""What every test shares: golden texts, hypothesis profiles, sane thread counts, the markers."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine

from megatrain.passes import kept_results
from megatrain.planning import plan_step
from megatrain.training.compiled import captures as compiled_captures
from tests import captures
from tests.hidden_accelerators import hide_accelerators

IMPORTS_OF_NOTE = 100
"""Modules; transformers imports hundreds of its own when a test first needs them."""


class Frozen:
    """The plugin of pytest: freezes what is alive after the collection of tests, and again after many imports.

    What is frozen is never collected, so that it happens only between two files, when the fixtures of both are gone.
    """

    def __init__(self) -> None:
        self.num_modules = 0
        self.path: Path | None = None

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self.num_modules = len(sys.modules)

    def pytest_collection_finish(self) -> None:
        self.freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if item.path != self.path and len(sys.modules) >= self.num_modules + IMPORTS_OF_NOTE:
            self.freeze()
        self.path = item.path


GOLDEN = Path(__file__).parent / "golden"
SHRINKING_S = 60
GPU_TESTS = Path(__file__).resolve().parent / "gpu"
DEVICE_TESTS = [GPU_TESTS.with_name(name) for name in ("gpu", "simulated_device", "simulated_runs")]

# A loaded machine may take seconds for an example; a deadline would only report the load. Without `explain`, which
# takes as long as shrinking does, and with a minute for shrinking, a failure is reported before `faulthandler_timeout`.
settings.register_profile(
    "default",
    max_examples=25,  # in percent: tests/draws.py
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("seeds", settings.get_profile("default"), max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite golden texts instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    # All other tests are of the CPU; where they found an accelerator, it would be the default device.
    if not _names(config, GPU_TESTS):
        hide_accelerators()
    assert hasattr(engine, "MAX_SHRINKING_SECONDS"), "this hypothesis bounds shrinking in another place"
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S
    config.pluginmanager.register(Frozen(), "frozen")
    settings.load_profile("ci" if os.environ.get("CI") else "default")
    # Tensors are small here. Threads of torch wait for each other by spinning: many times as long on a busy machine.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--accept"):
        os.environ["EXPECTTEST_ACCEPT"] = "1"  # expecttest reads nothing else


def _names(config: pytest.Config, folder: Path) -> bool:
    """Tells whether the command asks for a folder of tests, or for something in it."""
    named = [config.invocation_params.dir / name.split("::")[0] for name in config.args]
    return any(folder in (path, *path.parents) for path in map(Path.resolve, named))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of a device are read where the command names them; elsewhere each would be read to be skipped."""
    return True if collection_path in DEVICE_TESTS and not _names(config, collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Examples in docstrings are the library's: files beside the tests aren't read for any."""
    found = yield
    return [collector for collector in found if type(collector) is pytest.Module]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    if "nightly" not in str(config.getoption("-m")):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator; run by `make gpu`")


@pytest.fixture(autouse=True)
def _ctrl_c() -> Generator[None]:
    """Makes SIGINT raise KeyboardInterrupt, here and in children, also where a shell started the tests to ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _once(request: pytest.FixtureRequest) -> Generator[None]:
    """A file compiles few models many times: equal captures share a program, and equal optimizers what they need.

    Rooms whose files share more than that have a fixture of this name.
    """
    # The rooms that find these out, and the one that plants faults in programs.
    if request.path.parent.name in ("passes", "optim", "verification"):
        yield
        return
    with captures.lowered_once(), captures.rehearsed_once():
        yield


@pytest.fixture
def one_thread() -> Generator[None]:
    """Gives this process one thread, as each process of several has: threads split sums, and may add in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has attention's results count as worth keeping for texts of 1024 tokens, as they do for longer ones."""
    monkeypatch.setattr(kept_results, "LEAST_FLOPS_PER_BYTE", 256)


@pytest.fixture
def no_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are refused and ask nothing of `block_bytes`: the planning of smaller blocks takes seconds."""
    for module in (plan_step, compiled_captures):
        assert hasattr(module, "with_true_hint")
        monkeypatch.setattr(module, "with_true_hint", lambda error, *_: error)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with `tests/golden/<name>.txt`; `make accept` writes the file instead."""
    accept = bool(request.config.getoption("--accept"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"{path.name} does not exist yet; `make accept` writes it"
        assert text == path.read_text(), f"differs from {path.name}; if it should, run `make accept` and read the diff"

    return compare
