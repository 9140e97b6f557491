"""The values of a call are looked through while transfers bring others back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from megatrain.runtime.call import Call
from megatrain.runtime.stores.device_arena import Meter


class Names(list[str]):
    """While it is asked, another thread brings a parked value back."""

    def __init__(self, call: Call) -> None:
        super().__init__(["x", "y"])
        self.call, self.threads = call, list[threading.Thread]()

    def __contains__(self, name: object) -> bool:
        value = torch.ones(1)
        back = threading.Thread(target=self.call.return_value, args=(f"back {len(self.threads)}", value))
        self.threads.append(back)
        back.start()
        back.join(0.1)
        return super().__contains__(name)


def test_values_may_come_back_while_versions_are_noted():
    parks: Any = SimpleNamespace(give=lambda: None)
    nothing: Any = None
    call = Call(Meter(), parks, nothing, nothing)
    call.set_value("x", torch.ones(1))
    call.set_value("y", torch.ones(1))
    names = Names(call)
    call.remember_versions(names)
    for thread in names.threads:
        thread.join()
    assert {"x", "y", "back 0"} <= call.values.keys()
