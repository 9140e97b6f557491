"""Well-known models by name: their figures make models with the published number of parameters, without a network."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from megatrain.tools import cli
from megatrain.tools.finetune.pretrained import model_on_paper
from megatrain.tools.sizing.known_models import KNOWN, known

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs


def parameters(name: str, layers: int) -> int:
    """Of a model with the figures of a name, and so many layers."""
    model = model_on_paper(name, replace(KNOWN[name], layers=layers).config(), "fp32", None)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_as_many_parameters_as_published(name: str):
    """Counted in one layer and in two: layers are alike."""
    one, two = parameters(name, 1), parameters(name, 2)
    assert one + (KNOWN[name].layers - 1) * (two - one) == KNOWN[name].parameters


@pytest.mark.nightly
@pytest.mark.parametrize("name", KNOWN)
def test_the_layers_of_a_known_model_are_alike(name: str):
    assert parameters(name, KNOWN[name].layers) == KNOWN[name].parameters


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
