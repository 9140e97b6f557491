"""All cases of the zoo, by name."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from tests.zoo.case import Case, Family

REFUSED: dict[str, tuple[str, ...]] = {
    # max_norm scales the rows it reads, in place, in the weight that is being trained.
    "writes into its parameter": ("embedding_bag",),
}


FILES = (
    "handwritten", "causal", "moe", "hybrid", "encoders", "seq2seq", "vision", "audio", "multimodal", "diffusion",
    "lora", "adversarial", "adversarial_state", "extra",
)  # fmt: skip


def cases() -> dict[str, Case]:
    """Imports the files and collects their cases."""
    found: dict[str, Case] = {}
    for name in FILES:
        family: Family = import_module(f"tests.zoo.{name}").ZOO
        for case in family.cases:
            assert case.name not in found, f"two cases are called {case.name}"
            found[case.name] = case
    for reason, names in REFUSED.items():
        for name in names:
            found[name] = replace(found[name], refused=reason)
    return found
