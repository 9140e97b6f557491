"""The arrow from `errors` to `training` and `tools`, left to right, read from the source of modules."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import networkx as nx

from tests.sources import MODULES, ROOT, nodes, parsed

# A module may import what stands in its own group or left of it; anything unnamed sits at the right end.
GROUPS = (
    "errors",
    "base",
    "device",
    "tracer",
    "files",
    "hardware",
    "passes",
    "scheduler",
    "runtime",
    "extending",
    "optim",
    "planning",
    "ranks",
    "training",
)
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "manager", "misc"}
MAX_LINES = 500
MAX_FILES = 16
# The one module of the scheduler that reads a Program; all others work on its plain description.
PROGRAM_READER = "megatrain.scheduler.from_program"


def dotted_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_names(source: str, module: str, *, is_package: bool = False) -> tuple[str, ...]:
    """Every module that `source` may import: lazily, relatively, or by a literal name at run time."""
    return tuple(_imported_names(source, module if is_package else module.rpartition(".")[0]))


def _imported_names(source: str, package: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, base]).rstrip(".")
            # Whether the last part is a module or a name inside one, it falls in the same group.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node.func).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def group_of(module: str) -> int:
    parts = module.split(".")
    return GROUPS.index(parts[1]) if len(parts) > 1 and parts[1] in GROUPS else len(GROUPS)


def rightward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    names = imported_names(source, module, is_package=is_package)
    ours = (name for name in names if name.split(".")[0] == "megatrain")
    return sorted({name for name in ours if group_of(name) > group_of(module)})


def imports_of(path: Path) -> list[str]:
    return list(imported_names(path.read_text(), dotted_name(path), is_package=path.name == "__init__.py"))


def test_a_module_imports_only_from_its_left():
    wrong = {
        dotted_name(path): rightward_imports(path.read_text(), dotted_name(path), is_package=path.name == "__init__.py")
        for path in MODULES
    }
    assert {module: names for module, names in wrong.items() if names} == {}


def test_the_scheduler_imports_no_torch_and_meets_programs_in_one_place():
    found = {dotted_name(path): imports_of(path) for path in MODULES if "scheduler" in path.parts}
    assert [module for module, names in found.items() if any(n.split(".")[0] == "torch" for n in names)] == []
    # The folders to its left import torch, so whatever imports those needs torch as well.
    left = (GROUPS.index("tracer"), GROUPS.index("passes"))
    assert [module for module, names in found.items() if any(group_of(n) in left for n in names)] == [PROGRAM_READER]


def circles(sources: Mapping[str, str], packages: Collection[str] = ()) -> list[list[str]]:
    """The modules that import each other in a loop, lazily or for types alone included."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, source in sources.items():
        for name in imported_names(source, module, is_package=module in packages):
            # `from a.b import c` names the module a.b.c, or c of the module a.b.
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                graph.add_edge(module, target)
    return sorted(sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1)


def test_no_two_modules_import_each_other():
    packages = {dotted_name(path) for path in MODULES if path.name == "__init__.py"}
    assert circles({dotted_name(path): path.read_text() for path in MODULES}, packages) == []


def entry_of(module: str, folder: str) -> str | None:
    """The file or folder of `folder` that holds a module."""
    inside = module.startswith(f"{folder}.")
    return f"{folder}.{module.removeprefix(f'{folder}.').split('.')[0]}" if inside else None


def folder_circles(sources: Mapping[str, str], folder: str) -> list[list[str]]:
    """The files and folders of `folder` that import each other in a loop, each folder taken as one."""
    merged: dict[str, str] = {}
    for module, source in sources.items():
        entry = entry_of(module, folder)
        if entry is not None:
            imports = [f"import {entry_of(name, folder) or name}\n" for name in imported_names(source, module)]
            merged[entry] = merged.get(entry, "") + "".join(imports)
    return circles(merged)


def test_the_files_and_folders_of_a_folder_are_in_an_order():
    sources = {dotted_name(path): path.read_text() for path in MODULES}
    folders = sorted({dotted_name(path.parent) for path in MODULES})
    assert {folder: found for folder in folders if (found := folder_circles(sources, folder))} == {}


def test_folders_that_import_each_other_are_seen():
    there = {"m.a.x": "from m.b import y", "m.b.y": "", "m.b.z": "from m.a.w import f", "m.a.w": ""}
    assert circles(there) == []
    assert folder_circles(there, "m") == [["m.a", "m.b"]]


def test_a_circle_is_seen_however_it_is_closed():
    late = {"megatrain.a": "from megatrain.b import x", "megatrain.b": "def f():\n    from megatrain import a"}
    typed = {"megatrain.a": "import megatrain.b", "megatrain.b": "if TYPE_CHECKING:\n    from megatrain.a import A"}
    assert circles(late) == circles(typed) == [["megatrain.a", "megatrain.b"]]


def test_no_two_classes_have_one_name():
    names = Counter(
        node.name for path in MODULES for node in parsed(path.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_has_more_files_than_a_reader_can_hold():
    files = Counter(dotted_name(path.parent) for path in MODULES if path.name != "__init__.py")
    assert [folder for folder, count in files.items() if count > MAX_FILES] == []


def test_a_module_has_a_telling_name_and_one_idea():
    assert [path for path in MODULES if VAGUE_NAMES & set(dotted_name(path).split("."))] == []
    assert [path for path in MODULES if len(path.read_text().splitlines()) > MAX_LINES] == []


RIGHTWARD = (
    "import megatrain.runtime.stores.host_store",
    "from megatrain import runtime",
    "from megatrain import compile",
    "import megatrain",
    "from ..runtime.host import HostStore",
    "def late():\n    from megatrain.scheduler.table import Op",
    "if TYPE_CHECKING:\n    from megatrain.passes.program import Program",
    "import importlib\nimportlib.import_module('megatrain.tools.cli')",
)
LEFTWARD = ("import torch", "from megatrain.errors import TraceError", "from . import state")


def test_every_way_to_import_rightward_is_seen():
    assert [source for source in RIGHTWARD if len(rightward_imports(source, "megatrain.tracer.spec")) != 1] == []
    assert [source for source in LEFTWARD if rightward_imports(source, "megatrain.tracer.spec")] == []
