"""The site that `make docs` builds, in a browser: every page opens without an error, and the search finds names.

`pytest -m wide tests/site_pages` runs them, where there are a site and a Chromium.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.reporting.browser import Page, browser

SITE = Path(__file__).parents[2] / "site"
SHOWN = """(() => {
    const images = [...document.images].filter((image) => image.complete && image.naturalWidth == 0);
    const text = document.querySelector("article")?.innerText ?? "";
    const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
    return [document.querySelectorAll("h1").length, text.length, images.map((image) => image.src), wide];
})()"""

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no site: `make docs` builds it"),
    pytest.mark.skipif(browser() is None, reason="no Chromium or Chrome"),
]


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the site, as a server shows it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_every_page_opens_without_an_error(page: Page, address: str):
    names = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    assert len(names) > 100
    faults: dict[str, object] = {}
    for name in names:
        page.errors.clear()
        page.requests.clear()
        page.open(f"{address}/{name}/" if name != "." else f"{address}/")
        heads, length, broken, is_wide = page.eval(SHOWN)
        elsewhere = [each for each in page.requests if not each.startswith((address, "data:"))]
        if page.errors or elsewhere or heads != 1 or length < 60 or broken or is_wide:
            faults[name] = (page.errors[:], elsewhere, heads, length, broken, is_wide)
    assert faults == {}


@pytest.mark.parametrize("query", ["TrainStep", "gradient accumulation", "QLoRA", "torchrun"])
def test_the_search_finds_what_readers_look_for(page: Page, address: str, query: str):
    page.open(f"{address}/")
    page.wait("document.querySelector('input.md-search__input') !== null")
    page.eval(
        "(() => { const field = document.querySelector('input.md-search__input'); field.focus(); "
        f"field.value = {query!r}; field.dispatchEvent(new Event('keyup', {{bubbles: true}})); "
        "field.dispatchEvent(new Event('input', {bubbles: true})); return true; })()"
    )
    page.wait("document.querySelectorAll('.md-search-result__item a').length > 0")
    assert page.errors == []
