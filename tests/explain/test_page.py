"""The page as a file: it is complete, its arrays are the reference's, and a large world becomes a slice."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from recorded_round import history

import epmoe_ref
from epmoe.explain import figures, stills, story, tape
from epmoe.explain.bundle import chapters, source
from epmoe.explain.inputs import routed_for
from epmoe.explain.world import drawn, totals
from epmoe.provenance import install
from epmoe.routing import make
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import UnavailableError

ROOT = Path(__file__).parents[2]
CFG = EPConfig(3, 6, 2, 64, 3)
SHOWN = drawn(CFG, routed_for(CFG, 0))
CHAPTERS = [c for c in chapters() if c.name != "broken"]  # those without recordings


@cache
def made():
    return story.page(SHOWN)


def stills_of(chapters):
    data, _ = story.data_of(SHOWN)
    return stills.call("stills", data=data, order=[c.name for c in chapters])


class Tags(HTMLParser):
    """All tags with their attributes; open tags must be closed."""

    VOID = {"meta", "link", "input"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.json, self.into = [], [], {}, None
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.into = dict(attributes).get("id") if dict(attributes).get("type") == "application/json" else None
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.into:
            self.json[self.into], self.into = json.loads(data), None


def test_the_page_is_one_file_and_asks_nothing_of_the_network():
    html, notes = made()
    page = Tags(html)
    assert notes == [] and len(html) < 1_500_000
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#")), (tag, attributes)
    assert not re.search(r"@import|url\(|\bimport |\bfetch\(|XMLHttpRequest", html)
    assert not re.search(r"\{\{|\[\[|@[A-Z]+@", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))


def test_every_chapter_is_there_with_a_picture_and_its_captions():
    html, _ = made()
    assert [c.name for c in CHAPTERS] == re.findall('<section class="chapter" id="(.*?)">', html)
    for c in CHAPTERS:
        section = re.search(f'<section class="chapter" id="{c.name}">.*?</section>', html, re.DOTALL)[0]
        assert section.count("<svg") == 1 and section.count("<li ") == len(c.captions), c.name


def test_the_arrays_in_the_page_are_those_of_the_reference_and_so_are_the_pictures():
    html, _ = made()
    held, routed = Tags(html).json["arrays"], routed_for(CFG, 0)
    want = [epmoe_ref.canonical(d) for d in epmoe_ref.dispatch(CFG, routed.x, routed.topk_ids)]
    for rank, d in enumerate(want):
        assert held["row_offsets"][rank] == d.row_offsets.tolist() and held["src_info"][rank] == d.src_info.tolist()
        assert held["recv_count"][rank] == d.recv_count.tolist()
        assert held["output_tokens"][rank] == np.asarray(d.output_tokens[:, :4], np.float32).tolist()
    titles = {}
    for chapter in ("arrived", "grouping"):
        section = re.search(f'<section class="chapter" id="{chapter}">.*?</section>', html, re.DOTALL)[0]
        titles[chapter] = set(re.findall(r"<title>(.*?)</title>", section))
    for rank, d in enumerate(want):
        for (le, src), count in np.ndenumerate(d.recv_count):
            assert f"recv_count[rank {rank}][local_expert {le}, src_rank {src}] = {count}" in titles["arrived"]
        for le in range(2):
            assert (
                f"row_offsets[rank {rank}][{le}] = {d.row_offsets[le]}, [{le + 1}] = {d.row_offsets[le + 1]}"
                in titles["grouping"]
            )


def test_without_the_engine_the_page_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "dukpy", None)
    html, notes = made.__wrapped__()
    assert notes[0].endswith(f": {install('explain')}") and "<figure" not in html
    Tags(html)


@pytest.mark.parametrize("sizes", [(8, 64, 8, 100), (2, 32, 4, 3), (5, 5, 1, 2), (3, 6, 2, 40)], ids=str)
def test_a_world_too_large_to_draw_becomes_a_slice_and_totals(sizes):
    ranks, experts, top_k, tokens = sizes
    cfg = EPConfig(ranks, experts, top_k, 64, tokens)
    routed = make(cfg, 3)
    shown = drawn(cfg, routed)
    assert "too many to draw" in shown.notes[0]
    world = shown.world
    assert world["ranks"] <= 4 and world["local"] <= 3 and world["topK"] <= 3 and max(map(len, world["ids"])) <= 4
    names = dict((int(n), int(e)) for n, e in re.findall(r"e(\d+) is expert (\d+)", shown.notes[0]))
    for rank, tokens_ in enumerate(world["ids"]):
        for t, ids in enumerate(tokens_):
            kept = [names[e] for e in ids if e >= 0]
            mine = routed.topk_ids[rank][t].tolist()
            assert kept == [e for e in mine if e in names.values()][: len(kept)]
    assert shown.whole == totals(cfg, routed.topk_ids)
    assert sum(map(sum, shown.whole["pairs"])) == sum(int((i >= 0).sum()) for i in routed.topk_ids)
    html, _ = story.page(shown)
    assert "too many to draw" in html
    Tags(html)


def test_times_in_the_page_are_those_that_were_measured():
    held = json.loads(source("measured.json"))
    file = json.loads((ROOT / held["source"]).read_text(encoding="utf-8"))
    assert held["link_gbps"] == file["link_gbps"] and len(held["rows"]) == 12
    for row in held["rows"]:
        assert any(
            all(row[k] == r[k] for k in row)
            and r["phase"] == "dispatch"
            and r["routing"] == "uniform"
            and r["format"] == "bf16"
            for r in file["rows"]
        ), row


def test_slides_are_every_stage_with_text_of_16_px(tmp_path, monkeypatch):
    monkeypatch.setattr(stills, "png", lambda svg: svg.encode())
    paths, notes = figures.write(SHOWN, tmp_path)
    names = {p.name for p in paths}
    assert notes == [] and {"01-one-gpu-1.svg", "01-one-gpu-3.png", "06-travel-3.png", "animation.svg"} <= names
    for number, c in enumerate(CHAPTERS, 1):
        assert {f"{number:02}-{c.name}-{n + 1}.svg" for n in range(len(c.captions))} <= names
    pngs = [p.read_bytes() for p in paths if p.suffix == ".png"]
    assert len(set(pngs)) == len(pngs) > 50
    svg = (tmp_path / "06-travel-3.svg").read_text(encoding="utf-8")
    size = re.search(r'width="(\d+)" height="(\d+)" viewBox="-8 -8 (\d+) (\d+)"', svg).groups()
    width, height, w, h = map(int, size)
    smallest = min(float(px) for px in re.findall(r"font(?:-size)?:(\d+)px", source("stage.css")))
    assert smallest * width / w >= 15.99 and smallest * height / h >= 15.99
    assert f'width="{w}" height="{h}"' in svg.split("</style>")[1], "the ground covers all of it"


def test_words_are_in_the_png_files_or_the_note_says_why_not():
    svg = stills.alone(stills_of(CHAPTERS[:1])[0])
    if not stills._draws_words():
        with pytest.raises(UnavailableError, match="need a font .* apt-get install"):
            stills.png(svg)
        return
    made = stills.png(svg)
    assert made.startswith(b"\x89PNG") and made != stills.png(re.sub("<text.*?</text>", "", svg))


def test_a_machine_without_fonts_is_told_so(monkeypatch):
    import resvg_py

    draw = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda svg_string: draw(svg_string, skip_system_fonts=True))
    stills._draws_words.cache_clear()
    try:
        with pytest.raises(UnavailableError, match="need a font .* apt-get install"):
            stills.png("<svg/>")
    finally:
        stills._draws_words.cache_clear()


def test_the_animation_of_the_readme_is_the_default_one():
    kept = (ROOT / "docs" / "dispatch.svg").read_text(encoding="utf-8")
    data, every = story.data_of(SHOWN)
    made_now = figures.animation(data, [c.name for c in every])
    assert kept == made_now, "copy animation.svg of `epmoe explain --figures FOLDER` to docs/dispatch.svg"
    assert "prefers-reduced-motion" in kept and len(kept) < 250_000


def test_pages_are_read_as_utf_8_whatever_the_locale(tmp_path):
    """An ASCII locale, without Python's UTF-8 mode, makes the same page."""
    code = (
        "from epmoe.explain import story; from epmoe.explain.world import drawn; "
        "from epmoe.explain.inputs import routed_for; from epmoe_ref.config import EPConfig; "
        "cfg = EPConfig(3, 6, 2, 64, 3); html, _ = story.page(drawn(cfg, routed_for(cfg, 0))); "
        "open('page.html', 'w', encoding='utf-8').write(html)"
    )
    subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code],
        cwd=tmp_path,
        check=True,
        timeout=100,
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    )
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == made()[0]


def colours(theme):
    """{class: {property: colour}} of the stage's style sheet."""
    light, dark = source("stage.css").split("@media screen")
    rules = {}
    for names, body in re.findall(r"([.\w,>-]+)\{([^{}]*)\}", light if theme == "light" else dark):
        for name in names.split(","):
            rules.setdefault(name.strip().lstrip("."), {}).update(re.findall(r"(fill|stroke):(#\w+)", body))
    return rules


def _linear(colour):
    colour = colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(a, b):
    """WCAG contrast of two colours, 1 to 21."""
    high, low = sorted((sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), _linear(x))) for x in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_on_colours_can_be_read(theme):
    rules = colours(theme)
    for n in range(8):
        assert contrast(rules[f"x{n}"]["fill"], rules[f"s{n}"]["fill"]) >= 4.5
    for ink in ("t", "m"):
        for under in ("ground", "gpu", "cell", "expert", "inset"):
            assert contrast(rules[ink]["fill"], rules[under]["fill"]) >= 4.5, (ink, under)
    for under in ("cell", "wrong", "race", "report"):
        assert contrast(rules["t"]["fill"], rules[under]["fill"]) >= 4.5, under


# Machado, Oliveira, Fernandes 2009: severity 1.0, on linear light
BLINDNESS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_four_ranks_are_told_apart_without_colour_vision(theme, kind):
    def seen(colour):
        mixed = [max(0.0, sum(m * c for m, c in zip(row, _linear(colour)))) for row in BLINDNESS[kind]]
        return [255 * (1.055 * min(1.0, c) ** (1 / 2.4) - 0.055) for c in mixed]

    rules = colours(theme)
    found = [seen(rules[f"s{n}"]["fill"]) for n in range(4)]
    apart = [sum((a - b) ** 2 for a, b in zip(p, q)) ** 0.5 for n, p in enumerate(found) for q in found[:n]]
    assert min(apart) > 40


def test_every_class_that_is_drawn_has_a_rule():
    known = set(re.findall(r"\.([a-z][\w-]*)", source("stage.css")))
    behaviour = {"token", "chip", "hot", "mark", "message", "counter", "line", "flat"}
    for still in stills_of(CHAPTERS):
        used = {c for names in re.findall(r'class="([^"]*)"', still["svg"]) for c in names.split()}
        assert used - known - behaviour == set(), still["chapter"]


def test_the_tape_is_one_file_too():
    page = Tags(tape.page(history()))
    assert all(a.get(n, "data:").startswith("data:") for _, a in page.tags for n in ("src", "href"))
