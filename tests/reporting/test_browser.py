"""The page in a real browser, which has no network: it draws, answers mouse and keyboard, and complains of nothing."""

from __future__ import annotations

from pathlib import Path

from megatrain.reporting.page import page_text
from tests.reporting.browser import Page
from tests.reporting.steps import EVIL, evil, long, made, small

NARROW = (390, 844)
CANVASES = "[...document.querySelectorAll('canvas')]"
# How many different colours a canvas has, nearly equal ones taken as one.
COLOURS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), found = new Set();
  for (let at = 0; at < data.length; at += 4) found.add([0, 1, 2].map((part) => data[at + part] >> 4).join());
  return found.size;
}"""
LEFT, RIGHT, HEAD, LANE = 84, 10, 28, 26


def shown(page: Page, folder: Path, text: str) -> None:
    (folder / "report.html").write_text(text)
    page.open(folder / "report.html")
    page.settle()


def lane(page: Page, band: int, stream: int) -> float:
    """The height of the middle of a lane within the window."""
    top = page.eval("document.getElementById('lanes').getBoundingClientRect().top")
    return top + 4 + band * (24 + 4 * LANE + 8) + 24 + (stream + 0.4) * LANE


def at(page: Page, seconds: float, whole_s: float) -> float:
    """Where a moment is within the window, while the whole step is shown."""
    box = page.eval("(({left, width}) => [left, width])(document.getElementById('lanes').getBoundingClientRect())")
    return box[0] + LEFT + (box[1] - RIGHT - LEFT) * seconds / whole_s


def test_all_is_drawn_and_the_numbers_are_there(page: Page, tmp_path: Path):
    report = made()
    shown(page, tmp_path, page_text(report.figures))
    counts = page.eval(f"{CANVASES}.map({COLOURS})")
    assert len(counts) == 2 + len(report.figures.maps)
    assert min(counts) >= 4, counts
    assert counts[0] >= 8, counts
    text = page.eval("document.body.innerText")
    for line in report.verdict:
        assert f"{line[0].upper()}{line[1:]}." in text
    assert page.eval("document.querySelectorAll('#legend li').length") == 7  # W A F B A G U
    page.eval("document.getElementById('ops').open = true")
    page.wait("document.querySelector('#ops table') !== null")
    assert page.eval("document.querySelectorAll('#ops tbody tr').length") == len(report.figures.schedule.ops)


def test_the_mouse_finds_each_op_in_both_bands(page: Page, tmp_path: Path):
    report = made()
    shown(page, tmp_path, page_text(report.figures))
    whole, ops = max(band.step_s for band in report.figures.bands), dict(report.figures.schedule.positions())
    streams = ["h2d", "compute", "d2h", "host"]
    for number, band in enumerate(report.figures.bands):
        for timing in band.timeline[::7]:
            middle = (timing.start_s + timing.end_s) / 2
            page.point(at(page, middle, whole), lane(page, number, streams.index(timing.position.stream)))
            said = page.eval("document.getElementById('tip').innerText")
            assert said.startswith(str(ops[timing.position])), (timing, said)
            assert f"{timing.position.stream}, tick {timing.position.tick}" in said
    page.point(2, 2)
    assert page.eval("document.getElementById('tip').hidden")


def test_zoom_moves_all_drawings_together(page: Page, tmp_path: Path):
    shown(page, tmp_path, page_text(made().figures))
    drawn = f"{CANVASES}.map((canvas) => canvas.toDataURL())"
    whole = page.eval(drawn)
    page.eval("document.querySelector('[data-do=in]').click()")
    page.settle()
    closer = page.eval(drawn)
    assert all(one != other for one, other in zip(whole, closer, strict=True))
    page.drag(at(page, 0.5, 1), lane(page, 0, 1), 200)
    page.point(2, 2)
    moved = page.eval(drawn)
    assert all(one != other for one, other in zip(closer, moved, strict=True))
    page.eval("document.querySelector('[data-do=all]').click()")
    page.settle()
    assert page.eval(drawn) == whole


def test_the_keyboard_walks_the_ops(page: Page, tmp_path: Path):
    report = made()
    shown(page, tmp_path, page_text(report.figures))
    page.eval("document.getElementById('lanes').focus()")
    of = {stream: [str(op) for op in small().ops if op.stream == stream] for stream in ("h2d", "compute")}
    said: list[str] = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "+", "Enter", "0"):
        page.key(key)
        said.append(page.eval("document.getElementById('tip').querySelector('b').textContent"))
    assert said[:4] == [of["h2d"][0], of["h2d"][1], of["h2d"][2], of["h2d"][1]]
    assert said[4].rstrip("*") in of["compute"]
    assert len(set(said[4:])) == 1
    page.key("Escape")
    assert page.eval("document.getElementById('tip').hidden")


def test_colours_follow_the_scheme(page: Page, tmp_path: Path):
    shown(page, tmp_path, page_text(made().figures))
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.eval(background), page.eval("document.getElementById('lanes').toDataURL()")
    page.scheme("dark")
    page.settle()
    assert page.eval(background) != light
    assert page.eval("document.getElementById('lanes').toDataURL()") != drawn


def test_a_small_screen_scrolls_in_one_direction_alone(page: Page, tmp_path: Path):
    page.resize(*NARROW)
    shown(page, tmp_path, page_text(made().figures))
    assert page.eval("document.documentElement.scrollWidth") <= NARROW[0]
    assert min(page.eval(f"{CANVASES}.map({COLOURS})")) >= 4


def test_names_stay_names(page: Page, tmp_path: Path):
    shown(page, tmp_path, page_text(made(evil()).figures))
    assert page.eval("document.querySelectorAll('b').length") == 0
    page.eval("document.getElementById('lanes').focus()")
    page.key("ArrowRight")
    assert f"0 ({EVIL}0)" in page.eval("document.getElementById('tip').textContent")
    assert page.eval("document.querySelectorAll('#tip b').length") == 1


def test_a_hundred_layers_and_a_plan_alone(page: Page, tmp_path: Path):
    shown(page, tmp_path, page_text(made(long(), is_measured=False).figures))
    assert min(page.eval(f"{CANVASES}.map({COLOURS})")) >= 4
