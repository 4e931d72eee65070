"""Right beside broken: each mistake shows in the recording, and the race report names operations of the picture."""

from functools import cache

import pytest
from worlds_of_the_page import worlds

from epmoe.explain import broken, operations, stills, story
from epmoe.explain.bundle import chapter, source
from epmoe.explain.operations import ACCESS
from epmoe.explain.world import Drawn
from epmoe.kernels import plain
from epmoe_ref.errors import EPError

NAMES = [m.name for m in broken.MISTAKES]


@cache
def pairs():
    return {p["name"]: p for p in operations.pairs()}


@pytest.mark.parametrize("seed", range(6))
def test_the_plain_kernels_are_right_under_every_schedule(seed):
    for again, slow in ((None, ()), (None, (0,)), ("combine", (1,))):
        made = broken.run(plain, seed, again=again, slow=slow)
        assert made.reports == [] and made.row() == broken.FIRST
        assert again is None or made.row("row2") == broken.SECOND


@pytest.mark.parametrize("name", NAMES)
def test_the_mistake_shows_on_the_right_and_only_there(name):
    pair = pairs()[name]
    assert not any(o["wrong"] or o["race"] for o in pair["right"]["operations"])
    assert any(o["race"] for o in pair["broken"]["operations"])
    wrong = [o["text"] for o in pair["broken"]["operations"] if o["wrong"]]
    expected = {"missing-release": [], "early-reset": ["waits for ever"]}.get(
        name, ["reads the message", "writes row 0"]
    )
    assert [e for e in expected if not any(e in text for text in wrong)] == [] and (wrong == []) == (expected == [])


@pytest.mark.parametrize("name", NAMES)
def test_the_race_report_points_at_operations_of_the_picture(name):
    pair = pairs()[name]
    accesses = ACCESS.findall("\n".join(pair["report"]))
    assert len(accesses) == 2 and "data race on" in pair["report"][0]
    for _, line, rank, block in accesses:
        at = [
            o
            for o in pair["broken"]["operations"]
            if o["race"] and o["text"].endswith(f"({line})") and o["text"].startswith(f"rank {rank} block {block}:")
        ]
        assert at or any(line in o["text"] and o["race"] for o in pair["broken"]["operations"]), (line, rank, block)
    words = pair["broken"]["words"]
    region = pair["report"][0].split("data race on ")[1].split("[")[0].removeprefix("dispatch_")
    racing = {words[o["word"]]["name"] for o in pair["broken"]["operations"] if o["race"]}
    assert racing == {{"recv_buf": "message"}.get(region, region)}


def test_the_second_dispatch_differs_in_nothing_but_the_missing_combine():
    mistake = next(m for m in broken.MISTAKES if m.rounds)
    assert mistake.edits == () and broken.edited(mistake) is plain


def test_an_edit_that_no_longer_fits_is_noticed():
    stale = broken.MISTAKES[0]._replace(edits=(("not in the file", ""),))
    with pytest.raises(EPError, match="stands 0 times in plain/dispatch.py, not once"):
        broken.edited(stale)


def test_every_step_of_the_recordings_changes_the_stage():
    drawn = Drawn(worlds(1)[0]["world"], None, [])
    data, _ = story.data_of(drawn, list(pairs().values()))
    made = stills.call("stills", data=data, order=["broken"])
    assert len(made) == sum(p["length"] for p in pairs().values())
    pictures = [s["svg"] for s in made]
    assert all(a != b for a, b in zip(pictures, pictures[1:]))


def test_each_mistake_has_its_caption_and_its_place_in_the_page():
    captions = chapter("broken", source("text/13-broken.md")).captions
    assert len(captions) == len(broken.MISTAKES) == len(pairs())
    html, _ = story.page(Drawn(worlds(1)[0]["world"], None, []), list(pairs().values()))
    assert [p["title"] for p in pairs().values()] == [
        "A missing release",
        "Counting before writing",
        "Taking claimed for written",
        "A second dispatch before combine",
        "An early reset",
    ]
    assert all(caption in html for caption in captions)
