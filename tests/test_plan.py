"""megatrain.plan: a training step on paper, also of models that no machine here could hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import megatrain
from megatrain.errors import ExecuteError, OptionError, ScheduleError
from tests.models import Gpt

ROOT = Path(__file__).parent.parent
IDS = torch.randint(0, 32, (2, 8))


def on_meta(**options: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(width=64, **options)


def two_layers() -> torch.nn.Module:
    """Of 129 KiB each."""
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(181, 181), torch.nn.Tanh(), torch.nn.Linear(181, 181))


def test_the_text():
    plan = megatrain.plan(on_meta(), IDS, device_memory="500KiB", host_memory="1MB", micro_batches=2)
    assert_expected_inline(
        str(plan),
        """\
plan: Gpt, 5 blocks, 103616 parameters; fp32, 2 micro-batches, updates none
device: 496.38 KiB of 500.00 KiB: fits, 3.62 KiB left
  at B3.1                    bytes        size
  weights                   142592  139.25 KiB
  workspace                 133888  130.75 KiB
  gradients of parameters   133888  130.75 KiB
  retained graphs            60800   59.38 KiB
  activations                24832   24.25 KiB
  gradients of activations   12288   12.00 KiB
  slots: 130.75 KiB, 8.50 KiB
  keeps: graphs of 3 of 5 blocks, inputs of the last 5, weights of 2; parks 0 activations
  moves: 686.25 KiB to the device, 412.75 KiB to the host
  reserve: 1.00 GiB of a card besides, assumed: a tenth of its memory, at least 1 GiB
host: 940.25 KiB of 976.56 KiB: fits, 36.31 KiB left
  what         bytes        size  B/parameter
  parameters  414464  404.75 KiB         4.00
  gradients   414464  404.75 KiB         4.00
  slab        133888  130.75 KiB         1.29
  total       962816  940.25 KiB         9.29""",
    )


def test_a_model_on_meta_gives_the_text_of_the_same_model_with_weights():
    options: dict[str, Any] = {"optimizer": "Adafactor", "precision": "bf16", "host_memory": "1GiB"}
    meta, real = on_meta(depth=1), Gpt(width=64, depth=1)
    texts = {str(megatrain.plan(*given, **options)) for given in ((meta, IDS), (meta, IDS.to("meta")), (real, IDS))}
    assert len(texts) == 1


def test_nothing_of_the_model_changes():
    model = Gpt()
    before = {name: (id(p), p.data_ptr(), p.dtype, p.clone()) for name, p in model.named_parameters()}
    generator = torch.get_rng_state()
    megatrain.plan(model, IDS, precision="bf16", optimizer=torch.optim.AdamW(model.parameters()))
    after = {name: (id(p), p.data_ptr(), p.dtype, p) for name, p in model.named_parameters()}
    assert before.keys() == after.keys()
    for name, (*identity, values) in before.items():
        assert identity == list(after[name][:3])
        assert torch.equal(values, after[name][3])
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_optimizer_may_be_a_name_a_class_or_over_the_models_own_parameters():
    model = on_meta(depth=1)
    given = (
        "SGD",
        torch.optim.SGD,
        torch.optim.SGD(model.parameters()),
        torch.optim.SGD(model.parameters(), momentum=0.9),
    )
    state = [megatrain.plan(model, IDS, optimizer=each).host.bytes_of("SGD") for each in given]
    assert state == [0, 0, 0, 4 * sum(p.numel() for p in model.parameters())]


@pytest.mark.usefixtures("no_smaller_blocks")
def test_a_device_that_is_too_small_is_planned_for_and_refused():
    plan = megatrain.plan(two_layers(), torch.ones(8, 181), device_memory="64KiB", host_memory="1GiB")
    assert not plan.fits
    assert "KiB of 64.00 KiB: doesn't fit, " in str(plan)
    with pytest.raises(ScheduleError, match=r"a memory of 65536 B is too small: at least \d+ B") as caught:
        plan.check()
    assert f"at least {plan.schedule.device_bytes} B" in str(caught.value), "the schedule shown is the most frugal"


def test_a_host_that_is_too_small_is_refused():
    model, x = two_layers(), torch.ones(8, 181)
    plan = megatrain.plan(model, x, optimizer="AdamW", host_memory="1MiB")
    assert not plan.fits
    with pytest.raises(ExecuteError, match=r"MiB of host memory, 1\.00 MiB are available"):
        plan.check()
    assert megatrain.plan(model, x, optimizer="AdamW", host_memory="1GiB").fits


def test_what_can_not_be_planned_is_refused():
    model = on_meta()
    with pytest.raises(OptionError, match="plan needs an example of a call"):
        megatrain.plan(model)
    with pytest.raises(OptionError, match="precision='fp8' is not known"):
        megatrain.plan(model, IDS, precision="fp8")
    with pytest.raises(OptionError, match="device_memory='much' is not a size"):
        megatrain.plan(model, IDS, device_memory="much")
    with pytest.raises(OptionError, match="optimizer='Adamw' is not known"):
        megatrain.plan(model, IDS, optimizer="Adamw")
    with pytest.raises(OptionError, match="activations='some' is not known"):
        megatrain.plan(model, IDS, activations="some")
    with pytest.raises(OptionError, match="no result of the model needs a gradient"):
        megatrain.plan(on_meta().requires_grad_(False), IDS)
    with pytest.raises(OptionError, match=r"model=3 is an int\.\n  model is an nn\.Module\."):
        megatrain.plan(3, IDS)  # type: ignore[arg-type]


# A process of its own, because the peak of resident memory belongs to a process.
SCRIPT = """
import json, resource, sys, time
import torch, transformers
import megatrain
transformers.logging.set_verbosity_error()
width, depth = map(int, sys.argv[1:])
config = transformers.LlamaConfig(
    hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=depth, num_attention_heads=32,
    use_cache=False,
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
ids = torch.randint(0, 1000, (1, 2048))
start = time.perf_counter()
plan = megatrain.plan(
    model, example_kwargs={"input_ids": ids, "labels": ids}, device_memory="10GiB", host_memory="64GiB",
    optimizer="AdamW", precision="bf16", micro_batches=8, max_grad_norm=1.0,
)
print(json.dumps({
    "parameters": plan.host.num_parameters, "seconds": time.perf_counter() - start, "fits": plan.fits,
    "device": plan.schedule.device_bytes, "there": plan.host.there_bytes,
    "rows": {row.name: row.nbytes for row in plan.host.rows},
    "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


@pytest.mark.nightly
def test_a_llama_of_seven_billion_parameters_is_planned_in_seconds_and_little_memory():
    width, depth = 4096, 32
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(width), str(depth)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    found = json.loads(done.stdout)
    of_a_layer = 4 * width**2 + 3 * width * (width * 43 // 16) + 2 * width
    assert found["parameters"] == depth * of_a_layer + 2 * 32000 * width + width > 6.7e9
    # What the device updates takes no memory of the host.
    on_host = found["parameters"] - found["there"] // 12
    assert 0.8 * found["parameters"] < on_host < found["parameters"]
    assert found["rows"]["AdamW.exp_avg"] == 4 * on_host
    assert found["rows"]["parameters"] == found["rows"]["low halves"] == 2 * on_host
    assert found["device"] <= 10 * 2**30
    assert not found["fits"], "12 bytes per parameter are 75 GiB"
    assert found["peak_bytes"] < 2 * 2**30
    # 2 seconds on an idle core; the bound leaves room for a loaded machine.
    assert found["seconds"] < 30
