"""What was saved comes back to the bit, into other objects, and training goes on as if never stopped."""

from __future__ import annotations

import collections
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import megatrain
from megatrain.saving import OptimizerState, Source, generators_now, load, restore_generators, save
from megatrain.tracer.spec import TensorSpec
from tests.models import MODELS
from tests.saving.training import Tied, adamw, refusal, same, save_trained, state_of, train, trained

OPTIMIZERS = {
    "adamw": adamw,
    "adamw amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, lr=torch.tensor(1e-2)),
    "adamw named": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "sgd plain": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "lbfgs": lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad], lr=1e-2),
}


def shared_state(**values: Any) -> dict[str, Any]:
    return {"generators": generators_now(), **values}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_training_goes_on_as_if_never_stopped(tmp_path: Path, name: str):
    torch.manual_seed(1)
    model = Tied()
    optimizer = OPTIMIZERS[name](model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(model, optimizer, 0, 4, scheduler)
    optimizer.param_groups[0]["weight_decay"] = 0.125
    extra = shared_state(scheduler=scheduler.state_dict(), step=4)
    save(tmp_path / "run", state_of(model), optimizer=optimizer, extra=extra)
    train(model, optimizer, 4, 4, scheduler)
    expected_rng = torch.get_rng_state()

    torch.manual_seed(99)
    resumed = Tied()
    again = OPTIMIZERS[name](resumed)
    schedule = lr_scheduler.LambdaLR(again, lambda step: 1 / (1 + step))
    checkpoint = load(tmp_path / "run")
    checkpoint.read_weights(resumed.state_dict())
    checkpoint.read_optimizer(again, dict(resumed.named_parameters()))
    schedule.load_state_dict(checkpoint.extra["scheduler"])
    restore_generators(checkpoint.extra["generators"])
    assert checkpoint.extra["step"] == 4
    train(resumed, again, 4, 4, schedule)
    assert same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert same(again.state_dict(), optimizer.state_dict())
    assert schedule.get_last_lr() == scheduler.get_last_lr()
    assert torch.equal(torch.get_rng_state(), expected_rng)


def test_a_compiled_model_goes_on_under_another_budget(tmp_path: Path):
    """Dropout and clipping on; the other half of the run recomputes and prefetches where the first kept all."""

    def made(**options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]]:
        model, args, kwargs = MODELS["gpt_loss"]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return megatrain.compile(model, device="cpu", **options), model, optimizer, args, kwargs

    def steps(call: Any, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> list[float]:
        losses = []
        for _ in range(3):
            model.zero_grad()
            _, loss = call(*args, **kwargs)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(3)
    first = made(activations="keep", transfer="bind")
    steps(*first)
    save(tmp_path / "run", state_of(first[1]), optimizer=first[2], extra=shared_state())
    expected = steps(*first)

    torch.manual_seed(4)
    second = made(activations="recompute", transfer="copy", block_bytes="4KiB")
    steps(*second)
    checkpoint = load(tmp_path / "run")
    checkpoint.read_weights(state_of(second[1]))
    checkpoint.read_optimizer(second[2], dict(second[1].named_parameters()))
    restore_generators(checkpoint.extra["generators"])
    assert steps(*second) == expected
    assert same(dict(second[1].state_dict()), dict(first[1].state_dict()))
    assert same(second[2].state_dict(), first[2].state_dict())


def test_state_of_an_optimizer_with_lists_of_tensors(tmp_path: Path):
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    save(tmp_path / "run", state_of(model), optimizer=optimizer)
    assert len(optimizer.state_dict()["state"][0]["old_dirs"]) > 1
    again = torch.optim.LBFGS(nn.Linear(3, 3).parameters())
    names: dict[str, torch.Tensor] = dict(zip(("weight", "bias"), again.param_groups[0]["params"], strict=True))
    load(tmp_path / "run").read_optimizer(again, names)
    assert same(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moments_keep_their_dtype_beside_parameters_of_another(tmp_path: Path, dtype: torch.dtype):
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        moments = {"exp_avg": torch.randn(p.shape, dtype=dtype), "exp_avg_sq": torch.rand(p.shape, dtype=dtype)}
        optimizer.state[p] = {"step": torch.tensor(3.0), **moments}
    save(tmp_path / "run", state_of(model), optimizer=optimizer)
    again = nn.Linear(4, 4, dtype=torch.bfloat16)
    resumed = torch.optim.AdamW(again.parameters())
    load(tmp_path / "run").read_optimizer(resumed, dict(again.named_parameters()))
    assert same(resumed.state_dict(), optimizer.state_dict())


def test_parameters_may_stand_in_another_order_within_their_groups(tmp_path: Path):
    model, optimizer = save_trained(tmp_path / "run")
    again = Tied()
    turned = adamw(again)
    for group in turned.param_groups:
        group["params"].reverse()
    load(tmp_path / "run").read_optimizer(turned, dict(again.named_parameters()))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert same(optimizer.state.get(p, {}), turned.state.get(q, {}))
    assert [g["lr"] for g in turned.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_state_that_is_there_is_overwritten_where_it_lies(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)
    model, optimizer = trained(seed=2)
    before = {p: optimizer.state[p]["exp_avg"] for p in optimizer.state}
    load(tmp_path / "run").read_optimizer(optimizer, dict(model.named_parameters()))
    assert all(optimizer.state[p]["exp_avg"] is tensor for p, tensor in before.items())
    assert same(optimizer.state_dict(), trained(seed=1)[1].state_dict())


def test_the_users_parameters_see_that_they_changed(tmp_path: Path):
    save_trained(tmp_path / "run")
    model = Tied()
    versions = {name: p._version for name, p in model.named_parameters()}
    load(tmp_path / "run").read_weights(state_of(model))
    assert all(p._version > versions[name] for name, p in model.named_parameters())
    assert all(p.requires_grad is (name != "frozen") for name, p in model.named_parameters())


SCHEDULERS = {
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_learning_rate_schedulers(tmp_path: Path, name: str):
    def stepped(scheduler: Any, count: int) -> list[float]:
        rates = []
        for i in range(count):
            optimizer.step()
            scheduler.step(*([float(i)] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    scheduler = SCHEDULERS[name](optimizer)
    stepped(scheduler, 4)
    save(tmp_path / "run", {}, extra={"scheduler": scheduler.state_dict()})
    state = load(tmp_path / "run").extra["scheduler"]
    assert same(state, dict(scheduler.state_dict()))


def test_generators_go_on_where_they_were(tmp_path: Path):
    def draw() -> list[Any]:
        return [torch.randn(3), random.random(), random.gauss(0, 1), np.random.rand(2), np.random.normal()]

    draw()
    save(tmp_path / "run", {}, extra={"generators": generators_now()})
    expected = draw()
    draw()
    restore_generators(load(tmp_path / "run").extra["generators"])
    assert same(draw(), expected)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]).flatmap(
        lambda dtype: st.sampled_from([(), (0,), (2, 3)]).map(lambda shape: torch.ones(shape, dtype=dtype))
    ),
    st.sampled_from([np.arange(3), np.ones((2, 2), np.float32), np.array(5, np.uint32)]),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=8,
)


@given(value=VALUES)
def test_any_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any):
    folder = tmp_path_factory.mktemp("values") / "run"
    save(folder, {}, extra={"value": value, "!tensor": "no tag", "a.b": torch.ones(1), "a": {"b": torch.zeros(2)}})
    found = load(folder).extra
    assert same(found["value"], value)
    assert found["!tensor"] == "no tag"
    assert same(found["a.b"], torch.ones(1))
    assert same(found["a"]["b"], torch.zeros(2))


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]),
    piece_bytes=st.sampled_from([1, 8, 4096]),
)
def test_weights_of_any_layout(tmp_path_factory: pytest.TempPathFactory, shape, order, dtype, piece_bytes):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    turned = values.permute(dims)
    folder = tmp_path_factory.mktemp("layouts") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.files.byte_source.PIECE_BYTES", piece_bytes)
        patch.setattr("megatrain.saving.saved.PIECE_BYTES", piece_bytes)
        save(folder, {"straight": values.clone(), "turned": turned})
        checkpoint = load(folder)
        straight = torch.empty(shape, dtype=dtype)
        other = torch.empty_like(values).permute(dims)
        checkpoint.read_weights({"straight": straight, "turned": other})
        pieces = [p.clone() for p in checkpoint.weights["turned"].pieces(max(piece_bytes, dtype.itemsize))]
    assert same(straight, values)
    assert same(other, turned)
    assert same(torch.cat([torch.empty(0, dtype=dtype), *pieces]), turned.reshape(-1))


def test_a_source_may_make_its_values_while_it_is_written(tmp_path: Path):
    high, low = torch.arange(6, dtype=torch.int32) << 16, torch.arange(6, dtype=torch.int32)

    def pieces():
        buffer = torch.empty(2, dtype=torch.float32)
        for start in range(0, 6, 2):
            buffer.copy_((high[start : start + 2] | low[start : start + 2]).view(torch.float32))
            yield buffer

    source = Source(TensorSpec((2, 3), torch.float32), pieces)
    state = OptimizerState("kind", {"w": "f32[2, 3]"}, [{"params": ["w"], "lr": 1.0}], {"w": {"moment": source}}, {})
    save(tmp_path / "run", {"w": source}, optimizer=state)
    expected = (high | low).view(torch.float32).view(2, 3)
    out = torch.empty(2, 3)
    checkpoint = load(tmp_path / "run")
    checkpoint.check()
    checkpoint.read_weights({"w": out})
    assert same(out, expected)


@pytest.mark.parametrize("made", [[torch.zeros(5)], [torch.zeros(4), torch.zeros(4)], [torch.zeros(6).double()], []])
def test_a_source_that_gives_other_values_than_it_says(tmp_path: Path, made: list[torch.Tensor]):
    save_trained(tmp_path / "run", seed=1)
    source = Source(TensorSpec((6,), torch.float32), lambda: iter(made))
    text = refusal(lambda: save(tmp_path / "run", {"w": source}))
    assert text.startswith("the source of `w` gives other values than its spec f32[6]")
    assert load(tmp_path / "run").extra == {"seed": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_infinite_and_undefined_numbers_are_valid_json(tmp_path: Path):
    save(tmp_path / "run", {}, extra={"best": math.inf, "worst": -math.inf, "loss": math.nan, "zero": -0.0})
    found = load(tmp_path / "run").extra
    assert found["best"] == math.inf
    assert found["worst"] == -math.inf
    assert math.isnan(found["loss"])
    assert math.copysign(1, found["zero"]) == -1
    text = (tmp_path / "run" / "checkpoint.json").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
