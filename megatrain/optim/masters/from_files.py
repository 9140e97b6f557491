"""Weights of files, read into masters: each value is split as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from megatrain.files.weight_files import Stored, parts
from megatrain.optim.masters.halves import SplitMaster, read_, set_halves
from megatrain.optim.masters.registry import Masters
from megatrain.runtime.stores.weights import Weights


class MasterWeights(Weights):
    """Values in files for a model whose bf16 parameters have masters.

    fp32 values give both halves, bf16 values the high half. Only one piece at a time exists in fp32.

    Args:
        model: As of `Weights`.
        paths: As of `Weights`.
        masters: Of the model.
    """

    def __init__(self, model: nn.Module, paths: Sequence[Path], masters: Masters) -> None:
        super().__init__(model, paths)
        self._masters = masters

    def _fill(self, source: Stored, key: str, out: torch.Tensor) -> None:
        low = self._masters.room_for(key)
        if low is None:
            super()._fill(source, key, out)
            return
        for (high, values), part in zip(source.pieces(out), parts(low, source.piece_numel), strict=True):
            set_halves(high, part, values)

    def _is_same(self, source: Stored, key: str, out: torch.Tensor) -> bool:
        low = self._masters.room_for(key)
        if low is None:
            return super()._is_same(source, key, out)
        for (high, values), part in zip(source.pieces(out), parts(low, source.piece_numel), strict=True):
            master = SplitMaster(high.contiguous(), part.contiguous())
            found = read_(torch.empty(high.shape), master)
            expected = read_(torch.empty(high.shape), SplitMaster.of(values.to(torch.float32)))
            if not torch.equal(found.view(-1).view(torch.int32), expected.view(-1).view(torch.int32)):
                return False
        return True
