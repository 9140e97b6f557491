"""All cases of the zoo, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.zoo.case import Case, Family

FILES = (
    "handwritten", "causal", "moe", "hybrid", "encoders", "seq2seq", "vision", "audio", "multimodal", "diffusion",
    "lora", "adversarial", "adversarial_state", "extra",
)  # fmt: skip


def cases() -> dict[str, Case]:
    """Imports the families and collects their cases."""
    found: dict[str, Case] = {}
    for name in FILES:
        if not (Path(__file__).parent / f"{name}.py").exists():
            continue
        family: Family = import_module(f"tests.zoo.{name}").ZOO
        for case in family.cases:
            assert case.name not in found, f"two cases are called {case.name}"
            found[case.name] = case
    return found
