"""A browser that the tests of a module share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.reporting.browser import NAMES, Page, browser

WIDE = (1280, 1000)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    if browser() is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is on this machine")
    with Page(tmp_path_factory.mktemp("browser"), *WIDE) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Generator[Page]:
    """No test leaves an error on the console, nor a request for anything but the page itself."""
    window.errors.clear()
    window.requests.clear()
    window.resize(*WIDE)
    window.scheme("light")
    yield window
    assert window.errors == []
    assert {address.split("/")[-1] for address in window.requests} == {"report.html"}
