"""The page of several ranks in a real browser: a lane for each stream of each rank, arrows, and no complaint."""

from __future__ import annotations

from pathlib import Path

from megatrain.reporting.ranks_page import ranks_page_text
from tests.reporting.browser import Page
from tests.reporting.rank_steps import figures, tables
from tests.reporting.test_browser import CANVASES, COLOURS, NARROW, at, shown

LANE, HEAD = 22, 24
# How many different colours each row of the canvas has, right of the names of streams.
ROWS = """(() => { const canvas = document.getElementById("lanes");
  const pixels = canvas.width - 94, wide = 4 * pixels;
  const { data } = canvas.getContext("2d").getImageData(84, 0, pixels, canvas.height);
  return Array.from({ length: canvas.height }, (_, y) => {
    const found = new Set();
    for (let at = y * wide; at < (y + 1) * wide; at += 4)
      found.add([0, 1, 2].map((part) => data[at + part] >> 4).join());
    return found.size;
  }); })()"""


def test_each_rank_and_stream_has_a_lane_whose_ops_the_mouse_finds(page: Page, tmp_path: Path):
    made = figures(tables(3, micro_batches=2))
    shown(page, tmp_path, ranks_page_text(made))
    whole = max(band.step_s for band in made.bands)
    top, y = page.eval("document.getElementById('lanes').getBoundingClientRect().top"), 4
    order = ["h2d", "compute", "d2h", "host", "receive", "send", "peers"]
    waited, colours = 0, page.eval(ROWS)
    for band in made.bands:
        for rank, each in enumerate(made.ranks):
            used = [s for s in order if any(position.stream == s for position, _ in each.schedule.positions())]
            assert ("receive" in used) == (rank > 0)
            for number, stream in enumerate(used):
                middle = y + HEAD + number * LANE + LANE // 2
                assert colours[middle - 3] >= 2, (rank, stream)
                found = [t for t in enumerate(band.timelines[rank]) if t[1].position.stream == stream]
                index, timing = max(found, key=lambda t: t[1].end_s - t[1].start_s)
                page.eval(f"window.scrollTo(0, {middle})")
                height = page.eval("document.getElementById('lanes').getBoundingClientRect().top") + middle
                page.point(at(page, (timing.start_s + timing.end_s) / 2, whole), height)
                said = page.eval("document.getElementById('tip').innerText")
                assert f"{stream} of rank {rank}, tick {timing.position.tick}" in said
                if (rank, index) in band.others:
                    other, there = band.others[rank, index]
                    place = band.timelines[other][there].position
                    op = made.ranks[other].schedule.ticks[place.tick][place.stream]
                    assert f"{op} ({place.stream} of rank {other}), " in said
                    waited += 1
            y += HEAD + len(used) * LANE + 8
    assert waited >= 2 * 3
    assert top > 0
    assert page.eval("document.getElementById('lanes').height") == y - 4 + 26


def test_keys_walk_from_rank_to_rank_and_all_ops_are_listed(page: Page, tmp_path: Path):
    made = figures()
    shown(page, tmp_path, ranks_page_text(made))
    page.eval("document.getElementById('lanes').focus()")
    page.key("ArrowRight")
    said = []
    for _ in range(7):
        said.append(page.eval("document.getElementById('tip').innerText"))
        page.key("ArrowDown")
    assert "h2d of rank 0" in said[0]
    assert "h2d of rank 1" in said[6]
    page.key("Escape")
    page.eval("document.getElementById('ops').open = true")
    page.wait("document.querySelector('#ops table') !== null")
    assert page.eval("document.querySelectorAll('#ops tbody tr').length") == sum(
        len(each.schedule.ops) for each in made.ranks
    )
    heads = page.eval("[...document.querySelectorAll('#ops thead th')].map((cell) => cell.textContent)")
    assert heads[:3] == ["op", "rank", "stream"]
    assert heads[-2:] == ["from, measured", "lasts, measured"]


def test_an_arrow_comes_with_the_op_that_needs_another_rank(page: Page, tmp_path: Path):
    made = figures(tables(2))
    shown(page, tmp_path, ranks_page_text(made))
    band = made.bands[0]
    plain = page.eval("document.getElementById('lanes').toDataURL()")
    (rank, index), _ = next((own, other) for own, other in band.others.items() if own[0] == 0)
    stream = band.timelines[rank][index].position.stream
    timing, number = band.timelines[rank][index], ["h2d", "compute", "d2h", "host", "send", "peers"].index(stream)
    height = page.eval("document.getElementById('lanes').getBoundingClientRect().top")
    whole = max(each.step_s for each in made.bands)
    page.point(at(page, (timing.start_s + timing.end_s) / 2, whole), height + 4 + HEAD + number * LANE + LANE / 2)
    marked = page.eval("document.getElementById('lanes').toDataURL()")
    assert marked != plain
    assert "of rank 1), " in page.eval("document.getElementById('tip').innerText")


def test_a_small_screen_and_many_ranks(page: Page, tmp_path: Path):
    page.resize(*NARROW)
    shown(page, tmp_path, ranks_page_text(figures(tables(16, micro_batches=2))))
    assert page.eval("document.documentElement.scrollWidth") <= NARROW[0]
    assert min(page.eval(f"{CANVASES}.map({COLOURS})")) >= 4
