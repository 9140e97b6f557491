"""verify(): what is compared, what it says, and that nothing around the model changes."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import megatrain
import megatrain.training.compiled.inside  # pyright: ignore[reportUnusedImport]
from megatrain import Report, verify
from megatrain.tools.verification import Difference, side_by_side
from megatrain.tools.verification.compare import Tolerance as Allowed
from megatrain.tools.verification.compare import compare, distance
from tests.models import MODELS, Stack

CPU: dict[str, Any] = {"device": "cpu"}


def kinds(report: Report) -> set[str]:
    return {d.kind for d in report.differences}


def names(report: Report, kind: str) -> set[str]:
    return {d.name for d in report.differences if d.kind == kind}


# -- models that are right -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_loss", "random_path", "nested_outputs", "no_grad_region"])
def test_a_right_model_is_equal_bit_for_bit(name):
    model, args, kwargs = MODELS[name]()
    model.train(name != "gpt_loss")
    report = verify(model, *args, **CPU, memory="1MiB", activations="recompute", **kwargs)
    assert model.training is (name != "gpt_loss")
    assert report.ok
    assert report.max_error == 0
    assert report.first_difference is None
    assert {"output", "gradient", "parameter", "rng"} <= kinds(report)
    (line,) = str(report).splitlines()
    count = len(report.differences)
    assert line.startswith(
        f"verify {type(model).__name__}: equal to eager PyTorch; {count} of {count} tensors bit for bit ("
    )
    assert "in 2 steps), largest relative difference 0.00e+00 (tolerance " in line


def test_outputs_are_named_by_their_path_and_plain_values_are_compared():
    model, args, kwargs = MODELS["nested_outputs"]()
    report = verify(model, *args, **CPU, **kwargs)
    assert names(report, "output") == {
        "logits", "extras.pair.first", "extras.pair.second", "extras.list[0]", "extras.list[1][0]", "extras.list[1][1]",
        "extras.list[1][2]", "extras.none", "loss",
    }  # fmt: skip


# -- options -------------------------------------------------------------------------------------------------


def test_the_options_reach_compile(monkeypatch):
    seen: list[dict[str, Any]] = []
    real = megatrain.compile
    monkeypatch.setattr(side_by_side, "compile_model", lambda m, **o: (seen.append(o), real(m, **o))[1])
    options = {"memory": "1MiB", "activations": "offload", "transfer": "copy", "block_bytes": 100}
    report = verify(
        Stack(), torch.ones(2, 3), **CPU, **options, compile_options={"memory": "2MiB", "precision": "fp32"}
    )
    assert report.ok
    assert seen == [{"device": "cpu", **options, "precision": "fp32"}]


def test_a_loss_of_ones_own_decides_what_gets_a_gradient():
    model, args, kwargs = MODELS["gpt_loss"]()
    report = verify(model, *args, **CPU, loss=lambda output: output[1], **kwargs)
    assert report.max_error == 0
    with pytest.raises(megatrain.OptionError, match=r"loss returned a tensor of shape \(2, 8, 32\)"):
        verify(model, *args, **CPU, loss=lambda output: output[0], **kwargs)


def test_an_option_that_the_forward_takes_too_is_refused():
    class Decoder(torch.nn.Module):
        def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
            return x if memory is None else x + memory

    with pytest.raises(megatrain.OptionError, match="both an option of verify and an argument of the model's forward"):
        verify(Decoder(), torch.ones(2), memory="10GiB")


# -- the model and the world are left alone ----------------------------------------------------------------


def numpy_words() -> list[int]:
    state: Any = np.random.get_state()
    return state[1].tolist()


def test_model_inputs_and_generators_are_left_as_they_were():
    model, args, kwargs = MODELS["hidden_collected"]()
    model.eval()
    model.blocks[1].train()
    x = args[0].requires_grad_()
    x.grad = torch.ones_like(x)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, i) if i % 2 else None
    tensors = {
        n: (t, t.data_ptr(), t._version, t.detach().clone()) for n, t in model.state_dict(keep_vars=True).items()
    }
    grads = {n: p.grad for n, p in model.named_parameters()}
    copied = {n: g.clone() for n, g in grads.items() if g is not None}
    attributes = {n: dict(vars(m)) for n, m in model.named_modules()}
    modes = [m.training for m in model.modules()]
    worlds = (
        random.getstate(),
        numpy_words(),
        torch.get_rng_state(),
        torch.initial_seed(),
    )
    for broken in (False, True):
        if broken:
            model.blocks[0].forward = type(model.blocks[0]).forward.__get__(model.blocks[0])
            attributes["blocks.0"] = dict(vars(model.blocks[0]))
        assert verify(model, x, **CPU, memory="1MiB", **kwargs).ok
    for name, (tensor, address, version, content) in tensors.items():
        now = model.state_dict(keep_vars=True)[name]
        assert now is tensor
        assert (now.data_ptr(), now._version) == (address, version)
        assert torch.equal(now, content)
    for name, p in model.named_parameters():
        assert p.grad is grads[name]
        assert p.grad is None or torch.equal(p.grad, copied[name])
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == attributes
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(x.grad, torch.ones_like(x))
    assert random.getstate() == worlds[0]
    assert numpy_words() == worlds[1]
    assert torch.equal(torch.get_rng_state(), worlds[2])
    assert torch.initial_seed() == worlds[3]


def test_a_model_that_cannot_be_copied_is_refused():
    model = Stack()
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(megatrain.ExecuteError, match="can't be copied"):
        verify(model, torch.ones(2, 3), **CPU)


# -- parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "absolute", "reason"),
    [
        (torch.ones(2), torch.ones(3), float("inf"), "shape (3,) instead of (2,)"),
        (torch.ones(2), torch.ones(2).double(), float("inf"), "dtype f64 instead of f32"),
        (torch.ones(2), None, float("inf"), "None instead of a tensor"),
        (None, torch.ones(2), float("inf"), "a tensor instead of None"),
        (torch.ones(2), torch.ones(2).requires_grad_(), float("inf"), "requires_grad True instead of False"),
        (torch.tensor([True, False]), torch.tensor([True, True]), float("inf"), "1 of 2 elements differ"),
        (torch.tensor([float("nan"), 1]), torch.tensor([float("nan"), 3]), 2.0, ""),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), float("inf"), "NaN or infinite on one side only"),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), 0.0, ""),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0, ""),
        (torch.tensor([5]), torch.tensor([7]), 2.0, ""),
        (torch.empty(0), torch.empty(0), 0.0, ""),
        (0.5, 0.5, 0.0, ""),
        (float("nan"), float("nan"), 0.0, ""),
        (1, True, float("inf"), "True instead of 1"),
        (1, 2, float("inf"), "2 instead of 1"),
        ("a", "b", float("inf"), "'b' instead of 'a'"),
        (np.ones(2), np.ones(2), 0.0, ""),
        (np.ones(2), np.zeros(2), float("inf"), "a ndarray instead of a ndarray"),
    ],
)
def test_distance(left, right, absolute, reason):
    assert distance(left, right) == (absolute, reason)


def test_relative_to_the_tensor_itself_but_not_below_a_hundredth_of_its_kind():
    expected = {("gradient", "large"): torch.tensor([10.0]), ("gradient", "small"): torch.tensor([1e-6])}
    found = {("gradient", "large"): torch.tensor([10.0]), ("gradient", "small"): torch.tensor([2e-6])}
    large, small = compare(expected, found, 0, Allowed())
    assert (large.absolute, large.relative) == (0, 0)
    assert small.relative == pytest.approx(1e-6 / 0.1)
    found["gradient", "large"] = torch.tensor([10.001])
    assert next(compare(expected, found, 0, Allowed())).relative == pytest.approx(1e-4, rel=1e-2)
    one, index = {("output", "a"): torch.ones(1)}, ("output", "index")
    assert [d.reason for d in compare(one, {}, 0, Allowed())] == ["missing"]
    assert [d.reason for d in compare({}, one, 0, Allowed())] == ["eager PyTorch has nothing of that name"]
    # Whole numbers have to be equal, whatever the tolerance.
    (found,) = compare({index: torch.tensor([100000])}, {index: torch.tensor([100001])}, 0, Allowed(0.5))
    assert not found.ok


def test_a_report_says_what_was_compared_and_lists_only_what_differs():
    equal = tuple(Difference(kind, "a", step, 0, 0) for kind in ("output", "gradient", "gradient") for step in (0, 1))
    said = "verify Model: equal to eager PyTorch; 6 of 6 tensors bit for bit (4 gradient, 2 output in 2 steps), "
    figures = "largest relative difference 0.00e+00 (tolerance 5e-02), 3 blocks"
    assert str(Report(equal, 0.05, "Model", 3)) == said + figures
    assert str(Report(equal, 0.05, "Model", 3, notes=("all is NaN",))).splitlines()[1:] == ["  note: all is NaN"]
    close = Difference("gradient", "b", 1, 0.01, 0.01, tolerance=0.05)
    lines = str(Report((close, *equal), 0.05, "Model", 3)).splitlines()
    assert "equal to eager PyTorch; 6 of 7 tensors bit for bit (5 gradient, 2 output in 2 steps)" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["kind", "gradient"]
    assert "(nothing compared)" in str(Report((), 0.05, "Model", 3))
