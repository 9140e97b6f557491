"""Well-known models by name: their figures make models with the published number of parameters, without a network."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from megatrain.tools import cli
from megatrain.tools.finetune.pretrained import model_on_paper
from megatrain.tools.sizing.known_models import KNOWN, known

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_as_many_parameters_as_published(name: str):
    model = model_on_paper(name, KNOWN[name].config(), "fp32", None)
    assert sum(parameter.numel() for parameter in model.parameters()) == KNOWN[name].parameters


def test_a_name_is_known_with_and_without_its_owner():
    assert known("qwen3-8b") is known("Qwen/Qwen3-8B") is KNOWN["Qwen/Qwen3-8B"]
    assert known("Qwen3") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nomodel", "there is no folder `nomodel`"),
        ("nowhere/config.json", "there is no file `nowhere/config.json`"),
        ("Qwen/Qwen3-8", "Did you mean Qwen/Qwen3-8B?"),
    ],
)
def test_a_name_that_nothing_has_says_what_was_tried(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def silent(*_: Any, **__: Any) -> socket.socket:
        time.sleep(60)  # longer than anybody waits
        raise OSError

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr("megatrain.tools.sizing.known_models._SECONDS", 0.1)
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    assert cli.main(["plan", name, "--hardware", "rtx-4090"]) == 2
    assert said in capsys.readouterr().err
