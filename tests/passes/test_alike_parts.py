"""Of parts that are alike the first and the last are measured, and the costs are those of measuring all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.hardware.work import total_kernels
from megatrain.passes.cost import TemplateCost
from megatrain.passes.measuring.kernels import KernelWork
from megatrain.passes.pipeline import Rewrite, lower
from megatrain.passes.rewrites.head.head_loss import chunk_head_loss
from megatrain.passes.rewrites.masked_attention import banded_attention
from megatrain.passes.rewrites.parts import AlikeParts, InParts, computed_parts
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from tests.rewrites import test_masked_attention as masked
from tests.rewrites.test_head_loss import FORMS, WEIGHTED, Reader, ids_of
from tests.rewrites.test_tile_tokens import Model

META = torch.device("meta")


def measured(model: nn.Module, args: Any, rewrite: Rewrite) -> dict[str, TemplateCost | None]:
    program = lower(megatrain.trace(model, args), rewrites=[rewrite])
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    in_parts: list[Any] = [node.target for node in nodes if isinstance(node.target, InParts)]
    assert in_parts, "something is computed in parts"
    assert all(getattr(target, "head", target).alike is None for target in in_parts), "steps compute all of them"
    return {name: template.cost for name, template in program.templates.items()}


def assert_as_all(model: nn.Module, args: Any, rewrite: Rewrite, fewer: int, patch: pytest.MonkeyPatch) -> None:
    """Measures by some parts and by all; `fewer` are left out each time."""
    left_out, computed = list[int](), AlikeParts.computed

    def counted(self: AlikeParts, parts: Iterable[Hashable]) -> Iterator[bool]:
        count = 0
        for is_computed in computed(self, parts):
            count += not is_computed
            yield is_computed
        left_out.append(count)

    patch.setattr(AlikeParts, "computed", counted)
    found = measured(model, args, rewrite)
    assert set(left_out) == {fewer}
    patch.setattr(AlikeParts, "computed", lambda _, parts: (True for _ in parts))
    assert found == measured(model, args, rewrite)


def test_parts_of_attention(monkeypatch: pytest.MonkeyPatch):
    """The first part sees fewer keys; the others have as many, and those of padding further flags."""
    model = masked.Model(masked.window(1024), own=True)
    assert_as_all(model, masked.batch(3072, texts=1), partial(banded_attention, rows=512), 2, monkeypatch)


@pytest.mark.parametrize(
    ("parts", "computed"),
    [("", ""), ("a", "1"), ("aa", "11"), ("aaaa", "1001"), ("aabaa", "11111"), ("aaabbbba", "10110011")],
)
def test_parts_are_alike_only_where_they_follow_each_other(parts: str, computed: str):
    assert [str(int(each)) for each, _ in computed_parts(AlikeParts(), parts, str)] == list(computed)
    assert list(computed_parts(None, parts, str)) == [(True, part) for part in parts]


def kernels(sizes: list[int], known_by: Callable[[int], Hashable]) -> list[int]:
    """The kernels that are noted of a loop with one before it and one more in the first part, by nested modes."""
    alike, x = AlikeParts(), torch.empty(4, device=META)
    with KernelWork(META, alike) as outer, KernelWork(META) as unaware:
        x.add(1)
        with KernelWork(META, alike) as inner:
            for number, (is_computed, size) in enumerate(computed_parts(alike, sizes, known_by)):
                for _ in range(size + (number == 0)) if is_computed else ():
                    x.mul(2)
    return [total_kernels(each.take()) for each in (outer, inner, unaware)]


def test_parts_that_are_left_out_count_as_the_last_of_theirs():
    assert kernels([2, 2, 2, 2, 3, 3, 3], lambda size: size) == [19, 18, 12]
    # Where the last is known to be another one, all in between are measured.
    assert kernels([2, 2, 2, 5], lambda size: size)[1] == 12


def test_chunks_of_a_head(monkeypatch: pytest.MonkeyPatch):
    """99 rows: 3 chunks of 13 rows and 5 of 12."""
    form = (FORMS | WEIGHTED)["rows"]
    assert_as_all(Reader(form), (ids_of(0),), partial(chunk_head_loss, rows=14), 4, monkeypatch)


def test_tiles(monkeypatch: pytest.MonkeyPatch):
    """The last tile is longer: it looks like the others, and has other shapes."""
    ids = torch.zeros(1, 330, dtype=torch.long)
    assert_as_all(Model(), (ids, ids), partial(tile_tokens, rows=64), 2, monkeypatch)
