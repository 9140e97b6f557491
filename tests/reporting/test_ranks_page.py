"""The page of several ranks: a lane for each stream of each rank, every figure without a drawing, and its size."""

from __future__ import annotations

from megatrain.reporting.ranks_page import ranks_page_text
from tests.reporting.rank_steps import figures, tables
from tests.reporting.steps import EVIL
from tests.reporting.test_page import ASSETS, MOST_BYTES, Seen, data_of


def test_each_rank_has_its_streams_as_lanes_in_both_bands():
    made = figures(tables(4, micro_batches=(1, 2, 2, 1)))
    found = data_of(ranks_page_text(made))
    assert [band["name"] for band in found["bands"]] == [
        f"rank {rank}, {name}" for name in ("plan", "measured") for rank in range(4)
    ]
    assert len(found["tables"]) == 3  # both in the middle have one
    for which, band in enumerate(made.bands):
        for rank, each in enumerate(made.ranks):
            drawn, ops = found["bands"][4 * which + rank], found["tables"][found["bands"][4 * which + rank]["table"]]
            assert drawn["rank"] == rank
            assert drawn["first"] == 4 * which
            places = [(p.stream, p.tick) for p, _ in each.schedule.positions()]
            assert [(found["streams"][op[0]], op[1]) for op in ops] == places
            free: dict[str, int] = {}
            for timing, gap, lasts in zip(band.timelines[rank], drawn["gaps"][::2], drawn["gaps"][1::2], strict=True):
                begin = free.get(timing.position.stream, 0) + gap
                free[timing.position.stream] = begin + lasts
                assert begin == round(timing.start_s * 1e9)
                assert begin + lasts == round(timing.end_s * 1e9)
            for index, other, there, holds in drawn["across"]:
                assert band.others[rank, index] == (other, there)
                assert holds == (band.follows[rank][index] == (other, there))
                assert not holds or drawn["follows"][index] == -1
            assert drawn["path"] == [index for own, index in band.path if own == rank]
    assert sum(len(band["across"]) for band in found["bands"]) == sum(len(band.others) for band in made.bands)


def test_every_figure_is_there_without_a_drawing():
    made = figures()
    seen = Seen(ranks_page_text(made))
    assert {f"{line[0].upper()}{line[1:]}." for line in made.verdict} <= set(seen.texts)
    rows = [row for row in seen.rows if row[0].isdigit()]
    assert [row[0] for row in rows[:3]] == ["0", "1", "2"]
    lanes = {(row[0], row[1]): row for row in rows[3:]}
    for rank, each in enumerate(made.ranks):
        for stream in {position.stream for position, _ in each.schedule.positions()}:
            assert lanes[str(rank), str(stream)][2] == str(sum(op.stream == stream for op in each.schedule.ops))


def test_the_page_asks_for_nothing_and_no_name_becomes_a_part_of_it():
    page, harmless = ranks_page_text(figures(tables(3, prefix=EVIL))), ranks_page_text(figures())
    seen = Seen(page)
    assert {tag for tag, _ in seen.elements} == {tag for tag, _ in Seen(harmless).elements}
    links = [(tag, own.get("src"), own.get("href")) for tag, own in seen.elements if {"src", "href"} & set(own)]
    assert links == [("link", None, "data:,")]
    assert page.count("</script>") == 2
    assert data_of(page)["blocks"][0][0] == f"{EVIL}0"
    policy = next(own["content"] for _, own in seen.elements if own.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none';")
    for text in ASSETS.values():
        assert page.count(text) == 1


def test_eight_ranks_of_a_hundred_layers_fit_in_a_megabyte():
    """Planned and measured, with four micro-batches each."""
    found = tables(8, 100, "model.layers.", 4, updates="deferred", clip=True)
    page = ranks_page_text(figures(found))
    assert len(page.encode()) < MOST_BYTES


def test_many_lanes_are_narrow():
    few, many = (data_of(ranks_page_text(figures(tables(number))))["lane"] for number in (3, 16))
    assert few > many
