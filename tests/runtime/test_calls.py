"""The ways in which people call a model: several times, without gradients, with other shapes, around optimizers."""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.tracer.trace import trace
from tests.comparing import assert_same_state
from tests.models import MODELS


def both(name: str = "gpt_loss", **options: Any) -> tuple[Any, Any, Any, Any]:
    """An eager model, its compiled copy, and their inputs."""
    model, args, kwargs = MODELS[name]()
    options = {"device": "cpu", "transfer": "copy", "activations": "recompute", **options}
    streamed = copy.deepcopy(model)
    return model, megatrain.compile(streamed, **options), args, kwargs


def test_several_calls_before_their_backwards() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        losses = [call(*args, **kwargs)[1] for _ in range(3)]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
    assert_same_state(eager, compiled)


def test_losses_of_several_calls_added() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        total = call(*args, **kwargs)[1] + 2 * call(*args, **kwargs)[1]
        total.backward()
    # The embedding is tied to the head: eager adds its four terms one by one, two calls add two sums of two. Two ways
    # to add four terms differ by at most 3 roundings of each partial sum.
    tied, others = eager.embed.weight, compiled.get_parameter("embed.weight")
    assert (tied.grad - others.grad).abs().max() <= 6 * 2**-24 * tied.grad.abs().max()
    others.grad = tied.grad
    assert_same_state(eager, compiled)


def test_second_backward_accumulates() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        for _ in range(3):
            call(*args, **kwargs)[1].backward()
    assert_same_state(eager, compiled)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_between_steps(to_none: bool) -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(call.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            call(*args, **kwargs)[1].backward()
            optimizer.step()
    assert_same_state(eager, compiled)


def test_kept_gradients_are_not_overwritten() -> None:
    _, compiled, args, kwargs = both()
    compiled(*args, **kwargs)[1].backward()
    kept = [p.grad for p in compiled.parameters()]
    copies = [g.clone() for g in kept]
    compiled.zero_grad(set_to_none=True)
    torch.manual_seed(9)
    compiled(*args, **kwargs)[1].backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_parameters_stay_the_models_own() -> None:
    model, args, kwargs = MODELS["gpt_loss"]()
    before = dict(model.named_parameters())
    compiled = megatrain.compile(model, device="cpu")
    compiled(*args, **kwargs)[1].backward()
    after = dict(model.named_parameters())
    assert all(before[n] is after[n] for n in before)
    assert dict(compiled.named_parameters()).keys() == before.keys()
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("change", ["in_place", "load_state_dict", "assign", "data"])
def test_next_call_sees_changed_parameters(change: str) -> None:
    eager, compiled, args, kwargs = both("mlp")
    other, _, _ = MODELS["mlp"]()
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    compiled(*args, **kwargs)
    for model in (eager, compiled):
        if change == "in_place":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        elif change == "data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.5
        else:
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=change == "assign")
    results = [call(*args, **kwargs) for call in (eager, compiled)]
    assert torch.equal(*results)
    for result in results:
        result.square().mean().backward()
    assert_same_state(eager, compiled)


def test_untying_recompiles() -> None:
    eager, compiled, args, kwargs = both()
    compiled(*args, **kwargs)[1].backward()
    for model in (eager, compiled.megatrain.model):
        model.zero_grad()
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for call in (eager, compiled):
        torch.manual_seed(1)
        call(*args, **kwargs)[1].backward()
    assert_same_state(eager, compiled.megatrain.model)


def test_eval_and_no_grad_calls_between_training() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        call.train()
        call(*args, **kwargs)[1].backward()
        call.eval()
        with torch.no_grad():
            call.scores = call(*args, **kwargs)[0]
        assert not call.scores.requires_grad
        call.train()
        call(*args, **kwargs)[1].backward()
    assert torch.equal(eager.scores, compiled.scores)
    assert_same_state(eager, compiled)


def test_no_grad_call_between_forward_and_backward() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        loss = call(*args, **kwargs)[1]
        with torch.no_grad():
            call(*args, **kwargs)
        loss.backward()
    assert_same_state(eager, compiled)


def test_other_shapes_compile_variants_over_the_same_weights() -> None:
    eager, compiled, _, _ = both()
    for length in (8, 5, 8, 12):
        ids = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))
        for call in (eager, compiled):
            torch.manual_seed(length)
            call(ids, targets=ids)[1].backward()
        assert compiled.traced.inputs[0].meta["spec"].shape == (2, length)
    assert_same_state(eager, compiled)
    assert len(list(compiled.megatrain._variants)) == 3


def test_loss_outside_the_model_and_clipping() -> None:
    eager, compiled, args, _ = both("gpt")
    for call in (eager, compiled):
        torch.manual_seed(0)
        logits = call(*args)
        F.cross_entropy(logits.flatten(0, 1) / 0.7, args[0].flatten()).backward()
        call.norm_before = torch.nn.utils.clip_grad_norm_(call.parameters(), 0.01)
    assert torch.equal(eager.norm_before, compiled.norm_before)
    assert_same_state(eager, compiled)


def test_parameter_hooks_act_on_the_whole_gradient() -> None:
    eager, compiled, args, kwargs = both()
    seen: list[str] = []
    for call in (eager, compiled):
        for name, parameter in call.named_parameters():
            parameter.register_hook(lambda g: g * 0.5)
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.append(n))
        torch.manual_seed(0)
        call(*args, **kwargs)[1].backward()
    assert_same_state(eager, compiled)
    assert sorted(seen) == sorted([n for n, _ in eager.named_parameters()] * 2)


def test_backward_twice_is_refused() -> None:
    _, compiled, args, kwargs = both()
    loss = compiled(*args, **kwargs)[1]
    loss.backward()
    with pytest.raises(ExecuteError, match="backward ran a second time on the same output of a call"):
        loss.backward()
    compiled(*args, **kwargs)[1].backward()


def test_parameters_changed_before_backward_are_refused() -> None:
    _, compiled, args, kwargs = both()
    loss = compiled(*args, **kwargs)[1]
    with torch.no_grad():
        next(iter(compiled.parameters())).add_(1)
    with pytest.raises(ExecuteError, match=r"parameter `embed.weight` was modified between forward and backward"):
        loss.backward()
    compiled(*args, **kwargs)[1].backward()


def test_output_that_no_backward_reads_may_be_written() -> None:
    eager, compiled, args, kwargs = both()
    for call in (eager, compiled):
        torch.manual_seed(0)
        logits, loss = call(*args, **kwargs)
        with torch.no_grad():
            logits.zero_()
        loss.backward()
    assert_same_state(eager, compiled)


def test_dropped_outputs_free_what_their_call_held() -> None:
    _, compiled, args, kwargs = both(activations="offload")
    compiled(*args, **kwargs)[1].backward()
    floor = compiled.megatrain.engine.meter.current
    for _ in range(5):
        compiled(*args, **kwargs)
    gc.collect()
    assert compiled.megatrain.engine.meter.current == floor


def test_non_differentiable_output_refuses_backward() -> None:
    _, compiled, args, kwargs = both()
    with torch.no_grad():
        loss = compiled(*args, **kwargs)[1]
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_mixed_with_modules_outside() -> None:
    eager, compiled, args, _ = both("gpt")
    head = nn.Linear(32, 4)
    streamed = copy.deepcopy(head)
    for call, top in ((eager, head), (compiled, streamed)):
        torch.manual_seed(0)
        top(call(*args)).square().mean().backward()
    assert_same_state(eager, compiled)
    assert_same_state(head, streamed)


class Hands(torch.autograd.Function):
    """Gives the parameter a gradient that is somebody else's memory."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, ctx.saved_tensors[0]


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Hands.apply(x, self.weight) + self.bias


@pytest.mark.parametrize("transfer", ["bind", "copy"])
def test_gradients_never_share_memory_with_what_others_hold(transfer: str) -> None:
    model = Handed()
    compiled = megatrain.compile(model, device="cpu", transfer=transfer)
    x, gradient = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    compiled(x).backward(gradient)
    for parameter in model.parameters():
        parameter.grad.zero_()
    assert x.tolist() == [1, 2, 3]
    assert gradient.tolist() == [4, 5, 6]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, factor, part):
        return torch.copysign(self.layer(x), torch.tensor(factor))[part]


def test_other_literals_compile_other_variants_and_equal_ones_do_not() -> None:
    eager = Scaled()
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(3, 2)
    for factor in (0.0, -0.0, 1.0, 0.0, float("nan"), float("nan")):  # a number that changes is followed
        for part in (slice(0, 2), slice(1, 3), slice(0, 2)):
            assert torch.equal(eager(x, factor, part), compiled(x, factor, part))
    assert len(list(compiled.megatrain._variants)) == 6


@pytest.mark.parametrize("first", ["inference", "training"])
def test_inference_mode(first: str) -> None:
    eager, compiled, args, kwargs = both(activations="offload")
    order = [True, False] if first == "inference" else [False, True]
    for is_inference in [*order, *order]:
        results = []
        for call in (eager, compiled):
            torch.manual_seed(0)
            if is_inference:
                with torch.inference_mode():
                    results.append(call(args[0].clone(), **kwargs)[1])
            else:
                call.zero_grad()
                results.append(call(*args, **kwargs)[1])
                results[-1].backward()
        assert torch.equal(*results)
    assert_same_state(eager, compiled)


def test_calls_from_several_threads_take_turns() -> None:
    _, compiled, args, kwargs = both()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            compiled(*args, **kwargs)[1].backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@dataclass
class Outputs(OrderedDict[str, Any]):
    """A class of outputs that are fields, attributes and items; a copy is made of the fields, in their order."""

    loss: Any = None
    image: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if self.__dict__.get(field.name) is not None:
                self[field.name] = self.__dict__[field.name]

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, field.name) for field in fields(self)), *rest


class Adding(nn.Linear):
    """Adds items to a result that is made already, and takes an attribute back."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        found = Outputs(logits=y, hidden=(y * 2, {"deep": Outputs(hidden=y * 3)}))
        found["image"] = y * 4
        found.loss = y.sum()
        found.hidden[1]["deep"].logits = y * 5
        found.hidden[1]["deep"].hidden = None
        return [found]


@pytest.mark.parametrize("how", ["call", "step"])
def test_items_of_a_result_keep_their_order_and_attributes(how: str) -> None:
    shown: list[Any] = []

    def show(outputs: Any) -> Any:
        items = [(key, show(value) if isinstance(value, Outputs) else type(value)) for key, value in outputs.items()]
        return type(outputs), items, {name: value is None for name, value in vars(outputs).items()}

    def loss(result: Any, batch: Any) -> torch.Tensor:
        shown.append((show(result[0]), show(result[0].hidden[1]["deep"])))
        return result[0].loss

    for compiles in (False, True):
        model: Any = Adding(4, 4)
        call = megatrain.compile(model, device="cpu") if compiles else model
        if compiles and how == "step":
            step = megatrain.TrainStep(call, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
            for _ in range(2):
                step(torch.ones(2, 4))
        else:
            for _ in range(2):
                loss(call(torch.ones(2, 4)), None)
    assert [key for key, _ in shown[0][0][1]] == ["logits", "hidden", "image", "loss"]
    assert shown[1:] == [shown[0]] * (len(shown) - 1)


@torch.library.custom_op("tests_calls::narrow", mutates_args=())
def narrow(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 4:
        raise RuntimeError("five rows are too many")
    return x.sin()


@narrow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this kernel needs values")


narrow.register_autograd(lambda ctx, gradient: gradient)  # pyright: ignore[reportUnknownMemberType]


def test_kernels_that_fail_without_values_print_nothing_where_the_capture_goes_on(capfd: Any) -> None:
    """Another failure is an error of its own, which tells of both."""

    class Narrow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return narrow(super().forward(x))

    model = Narrow(4, 4)
    compiled = megatrain.compile(model, device="cpu")
    y = compiled(torch.ones(2, 4))
    y.sum().backward()
    assert torch.equal(y, narrow(nn.functional.linear(torch.ones(2, 4), model.weight, model.bias)))
    with pytest.raises(RuntimeError, match="five rows are too many"):
        compiled(torch.ones(5, 4))
    with pytest.raises(RuntimeError, match="this kernel needs values"):
        trace(Narrow(4, 4, device="meta"), (torch.ones(2, 4),))
    printed = capfd.readouterr()
    assert printed.err == printed.out == ""
