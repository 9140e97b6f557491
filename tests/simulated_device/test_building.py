"""The library is compiled once, by one process, and a compiler's refusal is shown."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.simulated_device import building, loading


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.setattr(building, "SOURCES", folder)
    monkeypatch.setattr(building, "UNITS", {"one": "-O0"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_refusal_has_the_compilers_words(sources: Path):
    (sources / "one.cpp").write_text("int f() { return nothing_of_this_name; }")
    with pytest.raises(building.BuildError, match="nothing_of_this_name"):
        building.built_library()
    assert not building.library_path().exists()
    assert [path.name for path in building.library_path().parent.iterdir()] == ["lock"]


def test_many_callers_compile_once(sources: Path, monkeypatch: pytest.MonkeyPatch):
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    runs: list[list[list[str]]] = []
    run = building._run

    def counted(commands: list[list[str]]) -> None:
        runs.append(commands)
        run(commands)

    monkeypatch.setattr(building, "_run", counted)
    threads = [threading.Thread(target=building.built_library) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 2  # compiled and linked
    assert sorted(path.name for path in building.library_path().parent.iterdir()) == ["libsimulated.so", "lock"]


def test_other_sources_are_another_library(sources: Path):
    (sources / "one.cpp").write_text("int one;")
    first = building.library_path()
    (sources / "one.cpp").write_text("int two;")
    assert building.library_path() != first


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.setattr(loading, "compiler", lambda: None)
    assert loading.unavailable() == "the simulated device needs a C++ compiler: none is in PATH, nor in $CXX"
