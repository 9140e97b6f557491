"""Cases that megatrain refuses today, by a part of the reason. A refused case that starts to work needs no entry."""

REFUSED: dict[str, tuple[str, ...]] = {}
