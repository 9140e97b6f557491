"""Launches of Triton kernels, which no mode of torch sees, and which read the addresses that fake tensors lack."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OpaqueModelWarning, TraceError
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.passes.measuring.live_bytes import LiveBytes
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.torch_private import FakeTensor, FakeTensorMode
from megatrain.tracer.calls import call_text
from megatrain.tracer.capture.torch_triton import tensors_written
from megatrain.tracer.capture.triton_launches import launches_on_fakes
from megatrain.tracer.trace import trace
from tests.runtime.parity import assert_parity
from tests.stand_in_triton import (
    Autotuner,
    Config,
    Heuristics,
    JITFunction,
    KernelInterface,
    names_written,
    stand_in_triton,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _triton() -> Generator[None]:
    with stand_in_triton():
        yield


def fold(scores: torch.Tensor, labels: torch.Tensor, total: torch.Tensor, SCALE: float) -> None:
    total += scores.gather(-1, labels[:, None])[:, 0] * SCALE


def spread(grad: torch.Tensor, labels: torch.Tensor, result: torch.Tensor, SCALE: float) -> None:
    result.scatter_add_(-1, labels[:, None], grad[:, None] * SCALE)


def double(x: torch.Tensor) -> None:
    x.mul_(2)


folding, spreading, doubling = JITFunction(fold, ["total"]), JITFunction(spread, ["result"]), JITFunction(double, ["x"])


class Picked(torch.autograd.Function):
    """The score of each label: kernels in the forward and in the backward, and a running total made in between."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.full((len(labels),), 0.5)
        assert folding[(len(labels),)](scores, labels, total, SCALE=3.0) in (None, "compiled kernel")
        ctx.save_for_backward(labels)
        ctx.shape = scores.shape
        return total.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (labels,) = ctx.saved_tensors
        result = torch.zeros(ctx.shape)
        spreading[(len(labels),)](grads[0].contiguous(), labels, result, SCALE=3.0)
        return result, None


class Scoring(nn.Module):
    """Branches on the values of the labels after kernels have read them; some labels may be left out before.

    Args:
        leaves_out: Whether they are, so that a shape depends on values.
    """

    def __init__(self, *, leaves_out: bool) -> None:
        super().__init__()
        self.leaves_out = leaves_out
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        if self.leaves_out:
            is_asked = labels > 0
            labels, x = labels[is_asked], x[is_asked]
        picked: Any = Picked.apply(self.head(x), labels)
        return picked.mean() * (2 if labels.max() > 3 else 1)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(4, 6), torch.tensor([1, 0, 4, 0])


@pytest.mark.parametrize("options", [{}, {"memory": "64KiB"}, {"transfer": "copy", "activations": "keep"}])
def test_a_function_with_kernels_trains_with_the_bits_of_eager(options: dict[str, Any]):
    torch.manual_seed(0)
    compiled = assert_parity(Scoring(leaves_out=False), inputs(), {}, steps=3, **options)
    assert "opaque" not in str(compiled.program)
    assert {template.cost.unmeasured for template in compiled.program.templates.values()} == {""}


def test_a_function_with_kernels_trains_on_the_tokens_that_are_asked():
    torch.manual_seed(0)
    compiled = assert_parity(Scoring(leaves_out=True), inputs(), {}, steps=3, memory="64KiB")
    assert "opaque" not in str(compiled.program)


def test_nothing_is_launched_on_fakes_and_labels_stay_known():
    launched = len(folding.launched), len(spreading.launched)
    with torch.device("meta"):
        model = Scoring(leaves_out=False)  # no values of weights: the capture can't go on with these
    traced = trace(model, inputs())
    assert "Picked" in str(traced)
    assert (len(folding.launched), len(spreading.launched)) == launched


class InPlace(torch.autograd.Function):
    """Writes its own input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        doubling[(1,)](x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.one(x)
        before = y + 1
        InPlace.apply(y)
        return self.other(y) + before + y


def test_a_kernel_writes_the_input_of_its_function():
    torch.manual_seed(0)
    assert_parity(Doubled(), (torch.randn(2, 3),), {}, steps=2)
    traced = trace(Doubled(), (torch.randn(2, 3),))
    (call,) = [n for n in traced.graph.nodes if n.meta.get("writes")]
    assert "InPlace" in call_text(call)


class ByFunction(torch.autograd.Function):
    """Writes into a tensor without a history."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        folding[(1,)](x, torch.zeros(len(x), dtype=torch.long), total, 2.0)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, grads[0].expand(2, 3)


class Totals(nn.Module):
    """A tensor made of constants alone becomes unknown when a kernel writes what depends on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(2)
        result: Any = ByFunction.apply(total, self.one(x).abs() + 1)
        return result * (2 if total.sum() > 1 else 1)


def test_a_known_tensor_that_a_kernel_writes_is_unknown_from_then_on():
    torch.manual_seed(0)
    assert_parity(Totals(), (torch.randn(2, 3),), {}, steps=2)


class OfInputs(nn.Module):
    """Launches on values: what depends on inputs alone is computed in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ByFunction.apply(total, x)
        return self.one(x) + total.sum()


class Launching(nn.Module):
    """Launches between torch functions, under no Function."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total = torch.zeros(len(x))
            scores = self.one(x)
            folding[(1,)](scores, torch.ones(len(x), dtype=torch.long), total, 2.0)
        return self.one(x) + total[:, None]


def test_a_launch_between_recorded_calls_makes_its_module_opaque():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Launching(), nn.Linear(3, 3))
    compiled = assert_parity(model, (torch.randn(2, 3),), {}, steps=2)
    text = str(compiled.program)
    assert "launches the Triton kernel `fold` at" in text
    assert "test_triton_launches.py" in text


def test_a_model_that_launches_itself_says_what_helps():
    torch.manual_seed(0)
    with pytest.warns(OpaqueModelWarning, match="launches the Triton kernel `fold`"):
        megatrain.compile(Launching(), device="cpu")(torch.randn(2, 3))


class OnConstants(nn.Module):
    """Nothing here is fake: even so the launch isn't a node, and its effect would be a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        doubling[(1,)](y)
        return self.one(y)


def test_a_launch_on_values_alone_is_no_constant():
    torch.manual_seed(0)
    model = nn.Sequential(OnConstants(), nn.Linear(3, 3))
    compiled = megatrain.compile(nn.Sequential(OnConstants(), nn.Linear(3, 3)), device="cpu")
    compiled.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(2, 3)
        assert torch.equal(compiled(x), model(x))


def test_a_stand_in_takes_no_memory_and_reads_and_writes():
    given = torch.empty(1 << 20)
    with exact_fakes() as mode:
        x = mode.from_tensor(given)
        labels = torch.zeros(1 << 10, dtype=torch.long)
        before = x._version, labels._version
        with LiveBytes([x, labels], CPU) as live:
            assert folding[(1,)](x, labels, total=x, SCALE=1.0) is None
        assert live.peak == 0
        assert x._version > before[0]
        assert labels._version == before[1]


def test_a_launch_of_another_thread_runs():
    launched = len(doubling.launched)
    tensor = torch.ones(2)
    with launches_on_fakes():
        thread = threading.Thread(target=lambda: doubling[(1,)](tensor))
        thread.start()
        thread.join()
        assert len(doubling.launched) == launched + 1
        doubling[(1,)](tensor)
    assert len(doubling.launched) == launched + 1
    assert tensor.tolist() == [2, 2]


def test_it_makes_no_difference_when_a_launcher_was_made():
    launched = len(doubling.launched)
    tensor, before = torch.ones(2), doubling[(1,)]
    with launches_on_fakes():
        kept = doubling[(1,)]
        for launcher in (before, kept, partial(doubling.run, grid=(1,), warmup=False)):
            launcher(tensor)
        doubling.run(tensor, grid=(1,), warmup=True)  # which compiles alone, in Triton
    assert len(doubling.launched) == launched + 1
    kept(tensor)
    before(tensor)
    assert len(doubling.launched) == launched + 3


def test_everything_is_as_before_afterwards():
    kinds = KernelInterface, JITFunction, Autotuner, Heuristics
    before, finders = [kind.run for kind in kinds], [*sys.meta_path]
    with launches_on_fakes():
        assert not {*before} & {kind.run for kind in kinds}
        assert sys.meta_path != finders
    assert [kind.run for kind in kinds] == before
    assert sys.meta_path == finders


def test_nothing_is_replaced_where_triton_is_not_imported():
    before, modules = JITFunction.run, set(sys.modules)
    with stand_in_triton(is_imported=False), launches_on_fakes():
        assert JITFunction.run is before
        assert not [name for name in sys.modules.keys() - modules if name.split(".")[0] == "triton"]


def test_triton_imported_in_the_middle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "triton" / "runtime").mkdir(parents=True)
    for folder in ("triton", "triton/runtime"):
        (tmp_path / folder / "__init__.py").write_text("")
    code = "from tests.stand_in_triton import JITFunction, KernelInterface\n"
    (tmp_path / "triton" / "runtime" / "jit.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    before, launched, tensor = JITFunction.run, len(doubling.launched), torch.ones(2)
    with stand_in_triton(is_imported=False), launches_on_fakes():
        importlib.import_module("triton.runtime.jit")
        assert JITFunction.run is not before
        doubling[(1,)](tensor)
    assert JITFunction.run is before
    assert len(doubling.launched) == launched
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]


def test_tokens_that_a_kernel_may_mix_are_not_tiled():
    def mix(x: torch.Tensor) -> None:
        x.copy_(x.flip(0))

    mixing = JITFunction(mix, ["x"])

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            mixing[(1,)](y)
            return y

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            dx = grads[0].clone()
            mixing[(1,)](dx)
            return dx

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = Mixed.apply(layer(x).sin()).cos()  # pyright: ignore
            return x

    torch.manual_seed(0)
    compiled = assert_parity(
        Mixing(), (torch.randn(300, 4),), {}, steps=1, passes=[partial(tile_tokens, rows=64)], tolerance=1e-6
    )
    assert "Mixed" in str(compiled.program)


def test_a_kernel_on_weights_alone_runs_in_each_tile():
    def unpack(packed: torch.Tensor, weight: torch.Tensor) -> None:
        weight.copy_(packed)

    unpacking = JITFunction(unpack, ["weight"])

    class Unpacked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
            weight = torch.empty(packed.shape, dtype=x.dtype)
            unpacking[(1,)](packed, weight)
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] @ ctx.saved_tensors[0].t(), None

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.register_buffer("packed", torch.randint(-3, 3, (8, 8), dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Unpacked.apply(self.one(x).sin(), self.packed).cos()  # pyright: ignore

    torch.manual_seed(0)
    passes = [partial(tile_tokens, rows=64)]
    compiled = assert_parity(Packed(), (torch.randn(300, 8),), {}, steps=1, passes=passes, tolerance=1e-6)
    assert "Unpacked" not in str(compiled.program), "it is within a region of tiles"


def add(x: torch.Tensor, y: torch.Tensor, bias: Any, HAS_BIAS: bool) -> None:
    y.copy_(x + bias if HAS_BIAS else x)


adding = JITFunction(add, ["y"])


@pytest.mark.parametrize(
    ("kernel", "args", "kwargs", "written"),
    [
        (adding, ("x", "y", None), {"HAS_BIAS": False}, "y"),
        (adding, (), {"HAS_BIAS": True, "y": "y", "bias": "b", "x": "x"}, "y"),
        (Heuristics(adding, {"HAS_BIAS": lambda given: given["bias"] is not None}), ("x", "y", "b"), {}, "y"),
        (Autotuner(adding, [Config({"HAS_BIAS": True})]), ("x", "y", "b"), {}, "y"),
        (Autotuner(adding, [Config({"HAS_BIAS": True})], reset_to_zero=["x"]), ("x", "y", "b"), {}, "xy"),
        (Autotuner(adding, [Config({"HAS_BIAS": True}, pre_hook=print)]), ("x", "y", "b"), {}, None),
        (
            Autotuner(Heuristics(adding, {"HAS_BIAS": lambda given: True}), [Config()]),
            ("x",),
            {"y": "y", "bias": "b"},
            "y",
        ),
        (adding, ("x", "y", ("b", "x")), {"HAS_BIAS": False}, None),
        (adding, ("x", "y"), {"HAS_BIAS": False}, None),
    ],
    ids=["positions", "names", "heuristics", "tuned", "reset", "hook", "both", "tuple", "missing"],
)
def test_what_is_written_is_found_by_name(kernel: Any, args: Any, kwargs: Any, written: str | None):
    tensors = {name: torch.empty(2) for name in "xyb"}
    assert names_written(kernel, args, kwargs, tensors) == written


def test_nothing_is_known_of_a_kernel_whose_heuristic_fails():
    def fail(given: Any) -> Any:
        raise ZeroDivisionError

    x, y = torch.empty(2), torch.empty(2)
    assert tensors_written(Heuristics(adding, {"HAS_BIAS": fail}), (x, y, None), {}) is None


def test_an_op_with_a_fake_kernel_of_its_own_is_a_node():
    @torch.library.custom_op("stand_in_triton::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        doubling[(1,)](y)
        return y

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return doubled(self.one(doubled(x)))

    torch.manual_seed(0)
    compiled = assert_parity(Doubling(), (torch.randn(2, 3),), {}, steps=2)
    assert "opaque" not in str(compiled.program)


def scale(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(x * weight)


unread = JITFunction(scale, None)


class Scaled(torch.autograd.Function):
    """Its kernel can't be read: nothing tells what a launch writes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        made = torch.empty_like(x)
        unread[(1,)](x, weight, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        made = torch.empty_like(x)
        unread[(1,)](grads[0].contiguous(), weight, made)
        return made, (grads[0] * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)  # pyright: ignore


class Shift(nn.Module):
    """A launch under no Function, of a kernel that can't be read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        unread[(1,)](x.detach(), self.weight, made)
        return x + made


@pytest.mark.parametrize(("kind", "said"), [(Scale, "Scaled.apply("), (Shift, "opaque")])
def test_a_kernel_that_cannot_be_read_is_captured_on_values(kind: type[nn.Module], said: str):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), kind(), nn.Tanh()) for _ in range(3)))
    compiled = assert_parity(model, (torch.randn(2, 3),), {}, steps=3, memory="64KiB", transfer="copy")
    assert said in str(compiled.program)
    assert len(compiled.program.blocks) == 3
    assert "" not in {template.cost.unmeasured for template in compiled.program.templates.values()}


def test_a_kernel_that_cannot_be_read_needs_the_values_of_the_weights():
    with torch.device("meta"):
        model = nn.Sequential(Scale(), Scale())
    with pytest.raises(TraceError) as refused:
        trace(model, (torch.randn(2, 3),))
    said, rule, way_out = str(refused.value).splitlines()
    assert "Scaled.apply" in said
    assert "test_triton_launches.py" in said
    assert rule.endswith("`scale` needs tensors with values: it isn't known which tensors it writes.")
    assert "Load the weights before compiling" in way_out


def test_a_kernel_that_cannot_be_read_is_never_launched_without_values():
    real, out = torch.ones(2), torch.empty(2)
    launched, before = len(unread.launched), unread[(1,)]
    with exact_fakes() as mode:
        for tensor in (mode.from_tensor(real), real, torch.empty(2, device="meta")):
            for launcher in (before, unread[(1,)]):
                with pytest.raises(RuntimeError, match="the Triton kernel `scale` needs tensors with values"):
                    launcher(tensor, real, out)
    assert len(unread.launched) == launched


class IntoTotal(ByFunction):
    """As `ByFunction`, by a kernel that can't be read."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        unread[(1,)](x.sum(1), torch.ones(2), total)
        return x.sum()


class UnreadTotals(Totals):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(2)
        result: Any = IntoTotal.apply(total, self.one(x).abs() + 1)
        return result * total.sum()


def test_what_a_kernel_that_cannot_be_read_has_changed_is_found():
    torch.manual_seed(0)
    traced = trace(UnreadTotals(), (torch.randn(2, 3),))
    (call,) = [node for node in traced.graph.nodes if node.meta.get("writes")]
    assert "IntoTotal" in call_text(call)
    assert_parity(UnreadTotals(), (torch.randn(2, 3),), {}, steps=2)


class OfUnreadInputs(OfInputs):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        IntoTotal.apply(total, x)
        return self.one(x) + total.sum()


@pytest.mark.parametrize("kind", [OfInputs, OfUnreadInputs])
def test_a_kernel_writes_an_input_of_the_model(kind: type[nn.Module]):
    torch.manual_seed(0)
    model = kind()
    x, total, other = torch.randn(2, 3), torch.zeros(2), torch.zeros(2)
    compiled = megatrain.compile(kind(), device="cpu")
    compiled.load_state_dict(model.state_dict())
    for _ in range(2):
        assert torch.equal(compiled(x, total), model(x, other))
        assert torch.equal(total, other), "each call writes once, the capture never"
    assert total.abs().sum() > 0


def test_a_kernel_that_writes_by_addresses_is_refused():
    addressed = JITFunction(lambda x: None, [])

    class Addressed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            addressed[(1,)](x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0]

    class Addressing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Addressed.apply(super().forward(input))  # pyright: ignore

    with pytest.raises(TraceError, match="which writes none of its tensors"):
        trace(Addressing(3, 3), (torch.randn(2, 3),))
    with exact_fakes(), pytest.raises(RuntimeError, match="which tensors it writes"):
        addressed[(1,)](torch.empty(2))


def test_fakes_never_reach_a_kernel():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert isinstance(fake, FakeTensor)
    with pytest.raises(AssertionError, match="without values"):
        doubling[(1,)](fake)
