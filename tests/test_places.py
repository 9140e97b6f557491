"""What stands in one place only: what differs between devices (megatrain/device), and private names of torch.

Read from the source of modules, so a violation is found whether or not its line ever runs.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.sources import MODULES, ROOT, nodes

OF_DEVICES = [path for path in MODULES if "device" in path.parts]
KINDS = {"cuda", "xpu", "mps", "hpu", "mtia", "maia", "privateuseone"}
"""Of torch's devices; the host has no kind that one could ask for: `is_on_host` tells."""
MODULES_OF_KINDS = {*KINDS, "accelerator", "get_device_module", "Stream", "Event"}
"""What `torch.` has of them."""
OF_ONE_KIND = {"cudart", "cudaHostRegister", "cudaHostUnregister", "pin_memory", "record_stream", "is_cpu", "is_cuda"}

OF_PRIVATE_NAMES = [path for path in MODULES if path.name.startswith("torch_")]
ATTRIBUTES = {
    "_version": "the counter of writes into a tensor; tried by torch_features",
    "_base": "the tensor that a view keeps alive, which is nobody else's holding of its memory",
    "_cdata": "the identity of a storage that has no address: fake tensors, meta",
    "_indices": "parts of a sparse tensor that isn't coalesced; `indices()` refuses that one",
    "_values": "as `_indices`",
    "_backward_hooks": "the user's hooks on a tensor or module; a streamed copy has to run them itself",
    "_backward_pre_hooks": "as `_backward_hooks`",
    "_post_accumulate_grad_hooks": "as `_backward_hooks`",
    "_parameters": "the registries of a module; `parameters()` hides names, ties and what is None",
    "_buffers": "as `_parameters`",
    "_modules": "as `_parameters`",
    "_non_persistent_buffers_set": "which buffers a state_dict leaves out; no public list exists",
    "_forward_hooks": "the hooks of a module, which a capture compares and runs",
    "_forward_pre_hooks": "as `_forward_hooks`",
    "_optimizer_step_pre_hooks": "the hooks of an optimizer, which want to see the whole step",
    "_optimizer_step_post_hooks": "as `_optimizer_step_pre_hooks`",
    "_opt_called": "by which a scheduler of torch tells that a step was taken",
    "_is_param": "by which a tensor that stands for a parameter is one for `isinstance`",
    "_apply": "what `.to()`, `.half()` and the like call on a module",
    "_schema": "the arguments of an operation that it writes",
    "_erased": "whether a node has left its graph",
}
"""Private attributes of torch's objects that any file may read: they are data, and there is no other way to them."""
OF_PYTHON = {"_getframe", "_DummyThread", "_replace", "_fields"}


def names_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; empty if it doesn't begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def torch_imports(source: str) -> Iterator[tuple[int, str, list[str]]]:
    """What is imported of torch: line, the name it is bound to, and its dotted name in parts."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "torch":
                    yield node.lineno, alias.asname or parts[0], parts
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, [*(node.module or "").split("."), alias.name]


def questions_about_devices(source: str) -> list[str]:
    """What of `source` only megatrain/device may say: `line: code`."""
    found = [(n, ".".join(parts)) for n, _, parts in torch_imports(source) if set(parts[1:]) & MODULES_OF_KINDS]
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            names = chain(node)
            is_torchs = names[:1] == ["torch"] and len(names) == 2 and names[1] in MODULES_OF_KINDS
            # `x.device.type`, `device.type`, `accelerator.type`: nothing else of megatrain has a `type`.
            if is_torchs or node.attr == "type" or node.attr in OF_ONE_KIND:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in KINDS:
            found.append((node.lineno, repr(node.value)))
    return [f"{line}: {code}" for line, code in sorted(found)]


def private_names(source: str, own: Collection[str] = ()) -> list[str]:
    """The private names of torch in `source` that only megatrain/base/torch_private.py may say: `line: code`.

    Args:
        source: Of a module.
        own: Private names that megatrain defines itself.
    """
    imports = list(torch_imports(source))
    bound = {name for _, name, _ in imports}
    found = [(line, ".".join(parts)) for line, _, parts in imports if any(map(is_private, parts))]
    allowed = {*ATTRIBUTES, *OF_PYTHON, *own}
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names = chain(node)
            if names[:1] in (["self"], ["cls"]) and len(names) == 2:
                continue
            if node.attr not in allowed or (names and names[0] in bound):
                found.append((node.lineno, ast.unparse(node)))
    return [f"{line}: {code}" for line, code in sorted(found)]


def defined(source: str) -> Iterator[str]:
    """The private names that a module gives to functions, classes, variables and attributes of its objects."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node)[:1] == ["self"]:
            yield node.attr


@functools.cache
def own_names() -> frozenset[str]:
    return frozenset(name for path in MODULES for name in defined(path.read_text()) if is_private(name))


def test_only_the_device_folder_knows_kinds_of_devices():
    found = {names_of(path): questions_about_devices(path.read_text()) for path in MODULES if path not in OF_DEVICES}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_private_names_of_torch_come_from_one_file():
    others = [path for path in MODULES if path not in OF_PRIVATE_NAMES]
    found = {names_of(path): private_names(path.read_text(), own_names()) for path in others}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_places_are_where_such_names_are():
    asked = "\n".join(path.read_text() for path in OF_DEVICES)
    assert len(questions_about_devices(asked)) > 20
    private = "\n".join(path.read_text().replace("from __future__ import annotations", "") for path in OF_PRIVATE_NAMES)
    assert len(private_names(private, own_names())) > 5


def test_every_attribute_that_is_allowed_is_read_somewhere():
    read = {n.attr for path in MODULES for n in nodes(path.read_text()) if isinstance(n, ast.Attribute)}
    assert ATTRIBUTES.keys() - read == set()


ASK = (
    'if tensor.device.type == "cpu": pass',
    "is_host = accelerator.type != x",
    "torch.cuda.synchronize()",
    "torch.accelerator.current_stream()",
    "torch.Stream(device=device)",
    "import torch.cuda as gpu",
    "from torch import cuda",
    "from torch.cuda import is_available",
    'x.to("cuda:0")',
    'kind in ("xpu", x)',
    "library.cudaHostRegister(address, nbytes, 0)",
    "tensor.is_cuda",
)
PRIVATE = (
    "import torch._C",
    "import torch._subclasses.fake_tensor as fakes",
    "from torch import _C",
    "from torch._subclasses import FakeTensor",
    "from torch.optim.optimizer import _global_optimizer_pre_hooks",
    "import torch\ntorch._C._current_graph_task_id()",
    "from torch import nn\nnn.Module._apply",
    "import torch\ntorch.Tensor._version",
    "def late():\n    from torch import _dynamo",
    "tensor._is_zerotensor()",
)
ANYBODYS = (
    "self._device.can_bind",
    'tensor.to("cpu")',
    "from torch import nn",
    "tensor._version",
    "self._private",
    "options._replace(x=1)",
    "threading.Event()",
)


def test_every_way_to_ask_for_a_kind_of_device_or_a_private_name_is_seen():
    assert [source for source in ASK if not questions_about_devices(source)] == []
    assert [source for source in PRIVATE if not private_names(source, own_names())] == []
    assert [s for s in ANYBODYS if questions_about_devices(s) or private_names(s, own_names())] == []
