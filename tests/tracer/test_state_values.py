"""The values behind fake state: aliases on the host, copies elsewhere, which go when their block has run."""

from __future__ import annotations

import torch
from torch import nn

from megatrain.tracer.inventory import StateEntry, StateValues
from megatrain.tracer.spec import TensorSpec

SPEC = TensorSpec((2,), torch.float32)
ENTRIES = {
    kind: StateEntry(kind, {"weight": "parameter"}.get(kind, kind), SPEC, kind == "weight")
    for kind in ("weight", "buffer")
}


def test_copies_on_another_device_are_let_go_and_made_again() -> None:
    # The meta device stands for any that isn't the host.
    weight, buffer = nn.Parameter(torch.ones(2)), torch.ones(2)
    fakes = {"weight": torch.empty(2, device="meta", requires_grad=True), "buffer": torch.empty(2, device="meta")}
    values = StateValues(fakes, {"weight": weight, "buffer": buffer}, ENTRIES)
    first, running = values.value(fakes["weight"]), values.value(fakes["buffer"])
    assert first is values.value(fakes["weight"])
    assert first.requires_grad
    values.let_go()
    assert values.value(fakes["weight"]) is not first
    assert values.value(fakes["buffer"]) is running, "what the forward has written must last"


def test_parameters_on_the_host_are_aliased_and_buffers_copied() -> None:
    weight, buffer = nn.Parameter(torch.ones(2)), torch.ones(2)
    fakes = {"weight": torch.empty(2), "buffer": torch.empty(2)}
    values = StateValues(fakes, {"weight": weight, "buffer": buffer}, ENTRIES)
    value = values.value(fakes["weight"])
    assert value.data_ptr() == weight.data_ptr()
    assert values.value(fakes["buffer"]).data_ptr() != buffer.data_ptr()
    values.let_go()
    assert values.value(fakes["weight"]) is value
