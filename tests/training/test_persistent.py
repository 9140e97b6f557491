"""Frozen weights that stay on the device across steps: moved once, and as in eager whatever happens to the host's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.device.bus import Bus
from megatrain.errors import ExecuteError
from megatrain.runtime.stores import slots as persisting
from tests.training.parity import SideBySide, adamw, labelled

MEMORY = "64MiB"


class Moved:
    """Bytes that cross to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        to_device = Bus.to_device

        def counted(bus: Bus, out: torch.Tensor, *args: Any, **options: Any) -> None:
            self.nbytes += out.nbytes
            to_device(bus, out, *args, **options)

        monkeypatch.setattr(Bus, "to_device", counted)

    def since(self) -> int:
        """Bytes since the last question."""
        found, self.nbytes = self.nbytes, 0
        return found


def roomy(**options: Any) -> SideBySide:
    """Adapters on frozen layers, with memory for all of them."""
    return SideBySide.of("lora", adamw, compile_options={"memory": MEMORY}, **options)


def frozen_weight(model: Any) -> nn.Parameter:
    return model.model.layers[0].self_attn.q_proj.base.weight


def test_frozen_weights_cross_once_for_all_steps(monkeypatch: pytest.MonkeyPatch):
    run, moved = roomy(), Moved(monkeypatch)
    for step in range(4):
        run.take(labelled(step, 2), seed=step)
        schedule = run.step.schedule
        assert schedule.persistent
        work = schedule.known_workload()
        frozen = sum(work.blocks[block].frozen_bytes for block in schedule.persistent)
        assert frozen > 0.8 * sum(block.state_bytes for block in work.blocks)
        # The copies leave out the padding between tensors; the first step brings what then stays.
        expected = schedule.h2d_bytes + (frozen if step == 0 else 0)
        assert 0.8 * expected <= moved.since() <= expected, step
    run.assert_same()


def nudge_data(parameter: nn.Parameter) -> None:
    """As little as merging an adapter and taking it out again may leave behind."""
    parameter.data.copy_(torch.nextafter(parameter.data, torch.full_like(parameter.data, 9)))


def take_other_memory(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("change", [nudge_data, take_other_memory])
def test_a_frozen_weight_that_the_user_changes_is_the_new_one_in_the_next_step(
    change: Callable[[nn.Parameter], None], monkeypatch: pytest.MonkeyPatch
):
    run = roomy()
    run.take(labelled(0, 2), seed=0)
    assert 0 in run.step.schedule.persistent or 1 in run.step.schedule.persistent
    for step in (1, 2):
        for model in (run.eager, run.streamed):
            change(frozen_weight(model))
        moved = Moved(monkeypatch)
        run.take(labelled(step, 2), seed=step)
        assert moved.since() > run.step.schedule.h2d_bytes
    run.assert_same()


def test_memory_that_was_given_back_holds_nothing_any_more():
    run = roomy()
    for step in range(3):
        run.take(labelled(step, 2), seed=step)
        engine = run.compiled.megatrain.engine
        nbytes = engine.arena.nbytes
        engine.release_slots()
        engine.arena.resize(nbytes)  # other bytes, as those of other tensors might be
        engine.arena.slot(0, nbytes).fill_(0xFF)
    run.assert_same()


def test_a_single_element_written_through_numpy_ends_in_an_error_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(persisting, "_SAMPLES", 1)
    monkeypatch.setattr(persisting, "_PIECE", 4096)
    run = roomy()
    run.take(labelled(0, 2), seed=0)
    weight = frozen_weight(run.streamed)
    weight.detach().numpy().reshape(-1)[weight.numel() // 2 + 1] += 0.5
    works = run.step.schedule.known_workload().blocks
    tensors = max(len(list(layer.parameters())) for layer in run.streamed.model.layers)  # of a block
    most = max(work.frozen_bytes for work in works) // 4096 + tensors

    def go_on() -> None:
        for step in range(most * (len(run.step.schedule.persistent) + 1)):
            run.step(labelled(step, 2))

    refused = r"frozen weights of block .* have changed in a way that torch"
    with pytest.raises(ExecuteError, match=refused):
        go_on()
    # From then on the device has the new weights, and nothing is refused again.
    go_on()
    # A copy of what is trained now goes on with the same bits.
    run.step.flush()
    run.eager.load_state_dict(run.streamed.state_dict())
    run.eager_optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.take(labelled(0, 2), seed=0)
    run.assert_same()
