"""Of parts that are alike the first and the last are measured, and the costs are those of measuring all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.passes.interpret import ExactFakes, exact_fakes
from megatrain.passes.pipeline import Rewrite, lower
from megatrain.passes.program import TemplateCost
from megatrain.passes.rewrites import parts
from megatrain.passes.rewrites.head_loss import chunk_head_loss
from megatrain.passes.rewrites.masked_attention import banded_attention
from megatrain.passes.rewrites.parts import computed_parts
from tests.rewrites import test_masked_attention as masked
from tests.rewrites.test_head_loss import Reader, flat, ids_of


def measured(model: nn.Module, args: Any, rewrite: Rewrite) -> dict[str, TemplateCost | None]:
    program = lower(megatrain.trace(model, args), rewrites=[rewrite])
    return {name: template.cost for name, template in program.templates.items()}


def assert_as_all(model: nn.Module, args: Any, rewrite: Rewrite, fewer: int, patch: pytest.MonkeyPatch) -> None:
    """Measures by some parts and by all; of the longest run of alike parts `fewer` are left out."""
    left_out, repeated = list[int](), ExactFakes.repeated

    def counted(self: ExactFakes, number: int) -> Any:
        left_out.append(number - 1)
        return repeated(self, number)

    patch.setattr(ExactFakes, "repeated", counted)
    found = measured(model, args, rewrite)
    assert max(left_out) == fewer
    left_out.clear()
    patch.setattr(parts, "FakeTensor", parts.Piece)  # no tensor is one
    assert found == measured(model, args, rewrite)
    assert not left_out


def test_parts_of_attention(monkeypatch: pytest.MonkeyPatch):
    """The first part sees fewer keys; the others have as many, and those of padding further flags."""
    model = masked.Model(masked.window(1024), own=True)
    assert_as_all(model, masked.batch(3072, texts=1), partial(banded_attention, rows=512), 2, monkeypatch)


def test_parts_are_alike_only_where_they_follow_each_other_and_have_no_values():
    fakes: Any
    with exact_fakes() as fakes:
        without_values = torch.empty(2)
        for known, computed in (("", ""), ("a", "1"), ("aaaa", "1003"), ("aabaa", "11111"), ("aaabbbba", "10210031")):
            found = computed_parts([without_values], known, str)
            assert "".join(str(is_computed * fakes.repeats) for is_computed, _ in found) == computed
    assert list(computed_parts([torch.ones(2)], "aaa", str)) == [(True, "a")] * 3


def test_chunks_of_a_head(monkeypatch: pytest.MonkeyPatch):
    """99 rows: 3 chunks of 13 rows and 5 of 12."""
    assert_as_all(Reader(flat), (ids_of(0),), partial(chunk_head_loss, rows=14), 3, monkeypatch)
