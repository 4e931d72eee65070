"""The figures as files, what the timeline says of each block, and the colours."""

import re
import xml.etree.ElementTree as ET

import pytest
from epmoe.explain import figures, palette
from epmoe.explain.arrays import is_signal
from epmoe.explain.moments import moments
from epmoe.explain.phases import Timeline
from recorded_round import history

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("fused", [False, True])
def test_every_figure_is_an_svg_whose_classes_have_rules(fused):
    drawn = figures.drawn(history(fused=fused))
    assert set(drawn) == {"routing", "recv_buf", "rows", "counters", "timeline", "combine", "dispatch"}
    known = set(re.findall(r"\.([\w-]+)", re.sub(r"\d+\.\d+", "", palette.css())))
    behaviour = {"flow", "far", "arrow", "cursor", "tick"} | {f"g-{k}" for k in (
        "signal", "announcement", "release", "acquire", "fence", "barrier")}
    for name, text in drawn.items():
        root = ET.fromstring(text)
        assert root.tag == SVG + "svg" and float(root.get("width")) > 300, name
        used = {c for e in root.iter() if e.get("class") for c in e.get("class").split()}
        assert used - known - behaviour == set(), name
    assert len(drawn["dispatch"]) < 150_000


def test_every_colour_is_in_a_legend():
    """Each colour of the timeline is drawn with words beside it, and each rank's colour is named."""
    for name, text in figures.drawn(history()).items():
        root = ET.fromstring(text)
        used = {c for e in root.iter() for c in (e.get("class") or "").split() if re.fullmatch(r"s\d|k\d|p-\w+", c)}
        words = " ".join(e.text or "" for e in root.iter(SVG + "text"))
        for c in used:
            if c.startswith("p-"):
                assert palette.PHASES[c[2:]][0] in words, (name, c)
            else:
                assert f"rank {c[1]}" in words, (name, c)


def test_the_picture_in_the_readme_is_the_default_one():
    from pathlib import Path

    kept = ET.fromstring((Path(__file__).parents[2] / "docs" / "dispatch.svg").read_text())
    made = ET.fromstring(figures.drawn(history())["dispatch"])

    def routing(root):
        return [(e.get("data-at"), e.get("data-value")) for e in root.iter()
                if (e.get("data-at") or "").startswith(("topk_ids", "row_offsets"))]

    assert routing(kept) == routing(made) and len(routing(made)) > 15


@pytest.mark.parametrize("fused", [False, True])
def test_slices_of_a_block_follow_each_other(fused):
    timeline = Timeline(history(fused=fused))
    launches = history(fused=fused).recording.recorder.launches
    assert len(launches) == (6 if fused else 12) and len(timeline.lanes) == sum(n.grid for n in launches)
    for lane in timeline.lanes:
        assert all(a.end <= b.begin for a, b in zip(lane.slices, lane.slices[1:])), lane
        assert all(lane.begin <= s.begin <= s.end <= lane.end + 1 for s in lane.slices), lane
    phases = {s.phase for lane in timeline.lanes for s in lane.slices}
    assert {"read", "send", "copy", "return", "reduce"} <= phases <= {*palette.PHASES, "wait"}
    assert all(s.word for lane in timeline.lanes for s in lane.slices if s.phase == "wait")


@pytest.mark.parametrize("options", [dict(), dict(fused=True), dict(fused=True, seed=1)], ids=str)
def test_an_arrow_leads_from_every_signal_to_the_rank_that_it_is_for(options):
    h = history(**options)
    arrows = Timeline(h).arrows
    reached = {a.source.number: a.target.rank for a in arrows}
    for name in ("dispatch_recv_count", "combine_recv_count"):
        for rank in range(h.recording.cfg.n_ranks):
            for index, changes in h.of(name, rank).items():
                came = next(c for c in changes if is_signal(c.value))
                assert (came.event.order, came.event.scope) == ("release", "sys")
                if came.event.rank != rank:
                    assert reached.get(came.event.number) == rank, (name, rank, index)
    assert all(a.source.step < a.target.step for a in arrows)


def test_moments_follow_each_other_and_end_where_the_round_ends():
    h = history()
    every = moments(h)
    assert [m.step for m in every] == sorted(m.step for m in every)
    assert every[0].step == 0 and every[-1].step == h.recording.end
    assert {m.run for m in every} == {0, 1} and 40 < len(every) < 600


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_on_colours_can_be_read(theme):
    for colour in palette.RANKS[theme]:
        assert palette.contrast(palette.on(colour), colour) >= 4.5
    surface = palette.SURFACES[theme]
    for ink in (surface["ink"], surface["muted"]):
        for under in (surface["ground"], surface["cell"]):
            assert palette.contrast(ink, under) >= 4.5
    assert palette.contrast(surface["ink"], surface["new"]) >= 4.5


# Machado, Oliveira, Fernandes 2009: severity 1.0, on linear light
BLINDNESS = {"protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                            (-0.003882, -0.048116, 1.051998)),
             "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                              (-0.011820, 0.042940, 0.968881))}


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_four_ranks_are_told_apart_without_colour_vision(theme, kind):
    def seen(colour):
        linear = [((int(colour[i:i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5)]
        mixed = [max(0.0, sum(m * c for m, c in zip(row, linear))) for row in BLINDNESS[kind]]
        return [255 * (1.055 * min(1.0, c) ** (1 / 2.4) - 0.055) for c in mixed]

    colours = [seen(c) for c in palette.RANKS[theme][:4]]
    apart = [sum((a - b) ** 2 for a, b in zip(p, q)) ** 0.5
             for n, p in enumerate(colours) for q in colours[:n]]
    assert min(apart) > 40
