"""Why a capture starts again: it took a tensor for real that must be fake."""

from __future__ import annotations

from megatrain.tracer.source import SourceLine

# A call in the user's code, wherever it stands in a loop: its line and its name.
Site = tuple[SourceLine | None, str]


class MakeFakeError(Exception):
    """A real tensor is written into; the capture starts again with the outputs of this call fake."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.site = site
