"""What Python code reads from inputs becomes a guard, with the user's line, read again before a step."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import TraceError
from megatrain.tracer.guards import Guard, GuardCheck
from megatrain.tracer.trace import trace
from tests.models import MODELS, Stack
from tests.tracer.parity import assert_same_step, eager_step, graph_step


def _failure(traced, *inputs: torch.Tensor) -> Guard | None:
    return GuardCheck(traced.guards, traced.graph, traced.constants).first_failure(inputs)


def test_a_branch_on_a_mask_is_guarded_with_its_line():
    model, args, _ = MODELS["mask_read"]()
    traced = trace(model, args)
    (guard,) = traced.guards
    assert guard.source is not None
    assert guard.source.file.endswith("models.py")
    assert guard.source.text == "if not mask.all():"
    assert "__bool__(all_1) == False at models.py" in str(guard)
    assert _failure(traced, *args) is None
    assert _failure(traced, args[0], torch.ones(3, dtype=torch.bool)) is guard
    # Another mask with the same answer takes the same road.
    assert _failure(traced, args[0], torch.zeros(3, dtype=torch.bool)) is None


def test_a_list_read_from_an_input_is_compared_as_it_was_when_it_was_read():
    class Popping(Stack):
        def forward(self, x, lengths):
            left = lengths.tolist()
            while left:
                x = x + left.pop()
            return super().forward(x)

    traced = trace(Popping(), (torch.randn(2, 3), torch.tensor([1, 2])))
    assert traced.guards[0].expected == [1, 2]
    assert _failure(traced, torch.randn(2, 3), torch.tensor([1, 2])) is None
    assert _failure(traced, torch.randn(2, 3), torch.tensor([2, 1])) is traced.guards[0]


def test_guards_are_asked_in_order_so_that_later_reads_may_rely_on_earlier_ones():
    class Dependent(Stack):
        def forward(self, x, sizes):
            rows = sizes.tolist()
            part = x.split(rows)[1]
            return super().forward(x) if part.sum() > 0 else super().forward(-x)

    traced = trace(Dependent(), (torch.ones(2, 3), torch.tensor([1, 1])))
    assert len(traced.guards) == 2
    # The split can't even run on these sizes.
    assert _failure(traced, torch.ones(2, 3), torch.tensor([5, 5])) is traced.guards[0]
    assert _failure(traced, -torch.ones(2, 3), torch.tensor([1, 1])) is traced.guards[1]


def test_a_slice_up_to_a_tensor_is_guarded_by_its_value():
    class Sliced(Stack):
        def forward(self, x, count):
            return super().forward(x[:count])

    model, args = Sliced(), (torch.randn(4, 3), torch.tensor(2))
    traced = trace(model, args)
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))
    assert _failure(traced, args[0], torch.tensor(2)) is None
    assert _failure(traced, args[0], torch.tensor(3)) is not None


def test_a_selection_by_an_input_mask_is_guarded_by_its_size():
    class Selected(Stack):
        def forward(self, x):
            return super().forward(x[x[:, 0] > 0])

    model, args = Selected(), (torch.tensor([[1.0, 2, 3], [-1, 2, 3], [1, 1, 1]]),)
    traced = trace(model, args)
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))
    assert _failure(traced, -args[0]) is not None
    # Another selection of the same size is computed anew, by the same graph.
    other = args[0].flip(0) * 2
    assert _failure(traced, other) is None
    assert_same_step(graph_step(traced, model, (other,), {}), eager_step(model, (other,), {}))


def test_what_the_spec_of_an_input_fixes_needs_no_guard():
    class Shapes(Stack):
        def forward(self, x):
            assert x.dim() == len(x.shape)
            assert x.size(0) == len(x)
            assert x.is_floating_point()
            assert x.numel() > 0
            return super().forward(x.view(x.size(0), -1))

    assert trace(Shapes(), (torch.randn(2, 3),)).guards == ()


def test_a_value_that_depends_on_weights_is_no_guard():
    class Gated(Stack):
        def forward(self, x):
            scores = self.stem(x)
            if scores.max() > 0:
                x = x * 2
            return super().forward(x)

    traced = trace(Gated(), (torch.randn(2, 3),))
    assert traced.guards == ()
    assert "check gt.__bool__" in str(traced) or "check __bool__(gt)" in str(traced)
    with torch.device("meta"):
        model = Gated()
    with pytest.raises(TraceError, match=r"test_guards.py:\d+: `if scores.max\(\) > 0:`"):
        trace(model, (torch.randn(2, 3),))
