"""What was saved comes back to the bit, into other objects, and training goes on as if never stopped."""

from __future__ import annotations

import collections
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from megatrain.files import OptimizerState, Source, generators_now, load, restore_generators, save
from megatrain.tracer.spec import TensorSpec
from tests.saving.training import Tied, adamw, refusal, same, save_trained, state_of, train, trained

OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "adamw amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, lr=torch.tensor(1e-2)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
}
"""Each with a scheduler whose state is of another kind."""
SCHEDULERS: tuple[Any, ...] = (
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]),
)


def drawn() -> list[Any]:
    return [torch.randn(3), random.random(), random.gauss(0, 1), np.random.rand(2), np.random.normal()]


@pytest.mark.parametrize(("name", "scheduler"), [*zip(OPTIMIZERS, SCHEDULERS, strict=True)], ids=[*OPTIMIZERS])
def test_training_goes_on_as_if_never_stopped(tmp_path: Path, name: str, scheduler: Any):
    def made(seed: int) -> tuple[Tied, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = Tied()
        optimizer = OPTIMIZERS[name](model)
        return model, optimizer, scheduler(optimizer)

    first, again = made(1), made(99)
    train(*first[:2], 0, 4, first[2])
    first[1].param_groups[0]["weight_decay"] = 0.125
    drawn()
    extra = {"generators": generators_now(), "scheduler": first[2].state_dict(), "step": 4}
    save(tmp_path / "run", state_of(first[0]), optimizer=first[1], extra=extra)
    train(*first[:2], 4, 3, first[2])
    expected = drawn()

    checkpoint = load(tmp_path / "run")
    checkpoint.read_weights(again[0].state_dict())
    checkpoint.read_optimizer(again[1], dict(again[0].named_parameters()))
    again[2].load_state_dict(checkpoint.extra["scheduler"])
    restore_generators(checkpoint.extra["generators"])
    assert checkpoint.extra["step"] == 4
    train(*again[:2], 4, 3, again[2])
    assert same(dict(again[0].state_dict()), dict(first[0].state_dict()))
    assert same(again[1].state_dict(), first[1].state_dict())
    assert again[2].get_last_lr() == first[2].get_last_lr()
    assert same(drawn(), expected)


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
    text = (folder / "checkpoint.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


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
        patch.setattr("megatrain.files.disk.PIECE_BYTES", piece_bytes)
        patch.setattr(sys.modules["megatrain.files.load"], "PIECE_BYTES", piece_bytes)  # not its function `load`
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
