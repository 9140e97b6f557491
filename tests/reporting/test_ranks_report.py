"""megatrain.report of a step of several devices: what it takes, writes and refuses."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import megatrain
from megatrain.errors import OptionError, ScheduleError
from megatrain.planning.what_if.devices_plan import DevicesPlan
from megatrain.scheduler.timing.ranks_run import RanksRun
from tests.reporting.rank_steps import HOST, run_of_ranks, tables
from tests.reporting.steps import run_of, small
from tests.reporting.test_page import data_of
from tests.reporting.test_report import refused


@cache
def devices() -> DevicesPlan:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    plan = megatrain.plan(model, torch.zeros(32, 64), optimizer="AdamW", hardware=HOST, micro_batches=2)
    return plan.on_devices(3)


def test_a_plan_of_devices_is_drawn(tmp_path: Path):
    made = megatrain.report(devices(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert [band["name"] for band in data_of(page)["bands"]] == [f"rank {rank}, plan" for rank in range(3)]
    assert [line.partition(":")[0] for line in data_of(page)["sources"]] == ["test_ranks_report.py"]
    made.perfetto(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert repr(made) == "<RanksReport Sequential: plan, 3 ranks>"
    assert_expected_inline(
        str(made),
        """\
report: Sequential, 3 ranks, 3 blocks, 87 ops
  plan: 62.3 us a step of 3 devices, 0.68 of what as many devices alone would do
  plan: held up by compute of rank 0 45% of the time
    then compute of rank 2 25%, compute of rank 1 11%, d2h of rank 2 3%, others 16%
    of all ranks together: compute 82%, send 5%, d2h 5%, h2d 3%, receive 2%, host 2%, peers 2%
  plan: because of other ranks, compute of rank 2 stands idle longest, 18.3 us or 29% of the step""",
    )


def test_a_measured_step_of_ranks_is_drawn_alone_or_below_a_plan(tmp_path: Path):
    found = tables(3)
    run = run_of_ranks(found)
    alone = megatrain.report(found[0], tmp_path / "alone.html", measured=run)
    both = megatrain.report(found[0], tmp_path / "both.html", measured=run, costs=HOST)
    assert [band.name for band in alone.figures.bands] == ["measured"]
    assert [band.name for band in both.figures.bands] == ["plan", "measured"]
    assert both.verdict[-1] == "the measured step took 25% longer than the plan"
    assert set(alone.verdict) < set(both.verdict)
    several = megatrain.report(found[0], tmp_path / "hosts.html", measured=run_of_ranks(found, hosts="aab"))
    assert several.verdict[-1].startswith("the clocks of 2 hosts are set by the end of the step")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    page, found = tmp_path / "report.html", tables(3)
    run: RanksRun = run_of_ranks(found)
    plan: object = devices()  # which the types of costs and measured refuse as well
    refused(
        lambda: megatrain.report(plan, page, costs=HOST),  # type: ignore[call-overload]
        OptionError,
        "the report of a DevicesPlan takes no costs.",
    )
    refused(
        lambda: megatrain.report(plan, page, measured=run),  # type: ignore[call-overload]
        OptionError,
        "the report of a DevicesPlan takes no measured run.",
    )
    refused(
        lambda: megatrain.report(small(), page, measured=run),
        ScheduleError,
        "the measured run is of another schedule.",
    )
    measured: object = run_of(small()).measured()
    refused(
        lambda: megatrain.report(found[0], page, measured=run, costs=measured),  # type: ignore[call-overload]
        OptionError,
        "costs of single ops are no plan of several ranks.",
    )
    apart = run_of_ranks(found, hosts="abb")
    refused(
        lambda: megatrain.report(found[0], page, measured=apart, costs=HOST),
        OptionError,
        "the ranks ran on 2 hosts, and a plan is of ranks of one host.",
    )
    assert not page.exists()


def test_the_same_step_is_the_same_page(tmp_path: Path):
    for name in ("one", "other"):
        made = megatrain.report(devices(), tmp_path / f"{name}.html")
        made.perfetto(tmp_path / f"{name}.json")
    for kind in ("html", "json"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"other.{kind}").read_bytes()


@pytest.mark.parametrize("number", [1, 65])
def test_so_many_devices_are_refused(number: int):
    with pytest.raises(OptionError, match="num_devices"):
        devices().alone.on_devices(number)  # type: ignore[attr-defined]
