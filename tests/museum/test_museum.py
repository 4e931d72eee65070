"""Each exhibit breaks as its story says, its repair is silent, and "spot it" knows the line."""

import os
import re
import subprocess
import sys

import pytest

from epmoe.__main__ import main
from epmoe.lessons.telling import plain_simulator
from epmoe.museum import FILES
from epmoe.museum import exhibit as exhibits
from epmoe.museum.exhibit import Exhibit

# kind of report, words of it, whether results alone show the fault
FOUND = {
    1: ("race", "atomic_add_relaxed_gpu_i32 -> m1_relaxed_counter.py", False),
    2: ("hang", "spins on prefix sums[word 1] of rank 0", True),
    3: ("error", "is outside every buffer", True),
    4: ("race", "load16_nc may return what was there when the launch began", False),
    5: ("race", "fence_proxy_async is missing between the two", False),
    6: ("race", "is not ordered after the read at m6_stage_refilled.py", True),
    7: ("race", "data race on message", True),
    8: ("hang", "spins on flag[word 0]", True),
    9: ("race", "st_relaxed_sys_i32 -> m9_cheap_fence.py", False),
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch, tonight):
    if not tonight:
        monkeypatch.setattr(exhibits, "SCHEDULES", 3)
    with plain_simulator():
        yield


def run(capsys, *argv):
    status = main(["museum", *argv])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_every_exhibit_is_tested():
    assert list(FILES) == list(FOUND) == list(range(1, len(FILES) + 1))


@pytest.mark.parametrize("number", FILES)
def test_an_exhibit_breaks_and_its_repair_is_silent(number):
    exhibit, (how, says, by_results) = Exhibit(FILES[number]), FOUND[number]
    failure = exhibit.first_failure
    assert failure.how == how and says in failure.says
    assert set(exhibit.counts(repaired=True)) == {"right"}
    assert (exhibit.counts(racecheck=False) != {"right": exhibits.SCHEDULES}) == by_results
    again = exhibit.run(failure.seed)  # a seed replays its schedule
    assert again.events == failure.events and again.how == failure.how


def test_without_its_fault_an_exhibit_has_no_failure_to_show(tmp_path):
    copy = tmp_path / FILES[4].name
    copy.write_text(Exhibit(FILES[4]).repaired_source)
    with pytest.raises(LookupError):
        _ = Exhibit(copy).first_failure


@pytest.mark.parametrize("number", FILES)
def test_a_story_has_five_sentences_and_threads(number):
    exhibit = Exhibit(FILES[number])
    story = exhibit.story.replace("fence.proxy.async", "fence").replace("ld.global.nc", "load")
    assert len(re.findall(r"[.!?](?= |$)", story)) == 5
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(pull|issues)/\d+", link) for link in exhibit.links)
    assert bool(exhibit.links) == (number > 4)  # the first four have no known thread


@pytest.mark.parametrize("number", FILES)
def test_the_line_is_spotted(number):
    exhibit = Exhibit(FILES[number])
    lines = [n for part in exhibit.code for n, _ in part]
    assert exhibit.guilty and set(exhibit.guilty) <= set(lines)
    assert [n for n in lines if exhibit.spot(n)[0]] == sorted(exhibit.guilty)
    assert all(exhibit.spot(n)[1].endswith(f"\n{why}") and why[-1] == "." for n, why in exhibit.guilty.items())
    assert "has lines" in exhibit.spot(1)[1] and "has lines" in exhibit.spot(999)[1]


@pytest.mark.parametrize(
    "number, line, instead",
    [
        (2, "        return", "        if block_idx() == 0: store_i32(own + u64(PREFIX + 4), 0)"),
        (3, "FLAGS = 2 * EXPERTS", "FLAGS = ROWS"),
        (5, "        st_release_sys_i32(peer + u64(FLAG), 1)", "        fence_proxy_async()"),
        (6, "        if lane == 0:", "        fence_proxy_async(); syncwarp()"),
        (9, "            fence_acq_rel_cta()", "            fence_acq_rel_sys()"),
        (9, "        syncthreads()", "        syncthreads(); fence_acq_rel_sys()"),
    ],
)
def test_the_line_of_another_repair_is_right_too(number, line, instead):
    """Where `instead` is one more line, it goes before the line."""
    exhibit = Exhibit(FILES[number])
    at = max(n for part in exhibit.code for n, text in part if text == line)
    kept = [line] if number in (2, 5, 6) else []
    source = exhibit.source.splitlines()
    source[at - 1 : at] = [instead, *kept]
    exhibit.repaired_source = "\n".join(source)
    assert set(exhibit.counts(repaired=True)) == {"right"} and exhibit.spot(at)[0]


def test_a_line_that_the_report_names_is_not_the_guilty_one():
    exhibit = Exhibit(FILES[1])
    line = next(n for part in exhibit.code for n, text in part if "row = load_i32" in text)
    assert exhibit.spot(line) == (
        False,
        f"the report names line {line}, so the harm shows there. But the line does what it should; something else "
        "does not.",
    )


@pytest.mark.parametrize("number", FILES)
def test_an_exhibit_is_shown_within_the_terminal(capsys, number):
    status, text = run(capsys, str(number))
    assert status == 0 and max(map(len, (line for line in text.splitlines() if "https" not in line))) <= 80
    for part in ("The kernel", "The repair", "A schedule .*: seed", "report\n|The error\n"):
        assert re.search(part, text), part
    assert ("results may be right" in text) == (
        FOUND[number][0] == "race"
    ) and "broken, judged by results only:" in text
    assert ("load16_nc: load16 through" in text) == (number == 4)
    assert f"word 2 of the region {exhibits.Exhibit(FILES[number]).first_region} of" in text
    assert f"repaired, with the race detector: {exhibits.SCHEDULES} right" in text
    assert FOUND[number][1][:20] in " ".join(text.split())


def test_the_list_names_every_exhibit_and_thread(capsys):
    status, text = run(capsys)
    assert status == 0 and max(map(len, text.splitlines())) <= 80
    assert all(Exhibit(file).title in text for file in FILES.values())
    for thread in ("DeepEP#642", "DeepEP#700", "nccl#2303", "mscclpp#875", "Primus-Turbo#482"):
        assert thread in text


def test_spot_it_shows_code_alone_and_judges(capsys):
    status, text = run(capsys, "8", "--spot")
    assert status == 0 and "│    epoch = " in text and "REPAIR" not in text and "late" not in text
    assert "The lines above the kernel count too." in text
    line = min(Exhibit(FILES[8]).guilty)
    status, text = run(capsys, "8", "--spot", str(line))
    assert status == 0 and text.startswith("RIGHT    it is line")
    status, text = run(capsys, "8", "--spot", str(line + 3))
    assert status == 1 and text.startswith("NOT YET")
    status, text = run(capsys, "--spot")
    assert status == 2 and "--spot needs a number" in text


def test_exhibits_run_in_the_simulator_whatever_the_device_is():
    done = subprocess.run(
        [sys.executable, "-m", "epmoe", "museum", "4", "--spot", str(max(Exhibit(FILES[4]).guilty) + 1)],
        env=os.environ | {"EPMOE_DEVICE": "gpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout.startswith("NOT YET"), done.stderr
