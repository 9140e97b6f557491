"""The cache of the data sets that these tests read."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def cached_here(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Has data sets cached in a folder of the tests, here and in processes that these start."""
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield folder
