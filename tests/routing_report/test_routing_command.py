"""`epmoe routing FILE`: text, JSON and a page from one report; times come from the measured table."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from epmoe.__main__ import main
from epmoe.routing_report import interfaces, measured

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path):
    """512 tokens, top-4 of 32 experts; expert 3 in every one."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((512, 32)) + (np.arange(32) != 3), axis=1)[:, :4]
    np.savez(tmp_path / "<dump>.npz", topk_ids=ids, n_experts=32)
    return tmp_path / "<dump>.npz"


def test_text_names_the_busiest_and_what_to_take(file, capsys):
    assert main(["routing", str(file), "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(words in out for words in ("expert 3: 512", "rank 0: ", "Use fused_dispatch", "8.00"))


def test_json_holds_everything(file, capsys):
    assert main(["routing", str(file), "--ranks", "4", "--hidden", "64", "--link-gbps", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    cost = found["interfaces"]["rows"]["combine"]
    assert cost["floor_us"]["max"] == pytest.approx(cost["busiest_bytes"]["max"] / 100e3)
    assert [line["n_ranks"] for line in found["sweep"]] == [2, 4, 8, 16, 32]
    assert found["sweep"][1]["interfaces"]["rows"]["round_us"] == found["interfaces"]["rows"]["round_us"]


@pytest.mark.parametrize(
    "options, expected, says",
    [
        (["--ranks", "1"], [], "no token leaves its rank"),
        (["--ranks", "16"], [], "more than 8 ranks need a network, which we did not measure"),
        (["--ranks", "16", "--link-gbps", "50"], ["pairs"], "is not possible"),
        (["--ranks", "4", "--format", "fp8_blockwise"], ["pairs", "rows", "expert_major"], "take about"),
    ],
)
def test_times_are_expected_where_they_were_measured(file, capsys, options, expected, says):
    assert main(["routing", str(file), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    for phase in ("dispatch", "combine"):
        ways = {name: way[phase] for name, way in found["interfaces"].items() if way[phase]}
        assert [name for name, cost in ways.items() if cost["expected_us"]] == expected
        assert all((cost["floor_us"] is None) == (options == ["--ranks", "16"]) for cost in ways.values())
    why = " ".join(found["take"]["why"])
    assert says in why and ("take about" in why) == (len(expected) > 1)


class Seen(HTMLParser):
    """Opened and closed tags, and the network requests of a page."""

    def __init__(self):
        super().__init__()
        self.open, self.asked, self.titles = [], [], []

    def handle_starttag(self, tag, attrs):
        self.asked += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["title"]:
            self.titles.append(data)


def test_the_page_needs_nothing_else_and_shows_every_cell(file, tmp_path, capsys):
    assert main(["routing", str(file), "--ranks", "4", "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    seen = Seen()
    seen.feed(text)
    assert seen.open == [] and seen.asked == [] and "<dump>" not in text and "&lt;dump&gt;" in text
    cells = [title for title in seen.titles if title.startswith("src_rank")]
    pairs = [int(c.split(": ")[1].replace(",", "")) for c in cells]
    assert len(pairs) == 16 and sum(pairs) == 4 * 512 and f"the darkest cell {max(pairs):,} pairs" in text
    assert all(f"<td>{n}</td>" in text for n in (2, 4, 8, 16, 32))
    assert "ExpertParallel, fast, us" in text and "ExpertParallel, plain, us" not in text  # all -


def test_a_file_whose_name_is_no_text_has_a_page_too(tmp_path, capsys):
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.npy")
    with open(name, "wb") as file:
        np.save(file, np.zeros((1, 1), int))
    assert main(["routing", name, "--html", str(tmp_path / "p.html")]) == 0


def test_many_ranks_and_steps_fit_on_the_page(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", np.argsort(rng.random((3, 200, 256)), axis=2)[:, :, :2])
    file, page = str(tmp_path / "a.npy"), str(tmp_path / "p.html")
    assert main(["routing", file, "--experts", "256", "--ranks", "128", "--html", page]) == 0
    assert "Each cell stands for 2 x 2 ranks" in (tmp_path / "p.html").read_text()
    assert "in 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("link, floors", [([], 3), (["--link-gbps", "50"], 5)])
def test_beyond_8_ranks_rows_are_not_possible_and_floors_need_a_speed(file, tmp_path, capsys, link, floors):
    page = tmp_path / "page.html"
    assert main(["routing", str(file), "--ranks", "16", "--html", str(page), *link]) == 0
    text = page.read_text()
    assert capsys.readouterr().out.count("not possible") == 2 + 2 and text.count("<td>not possible</td>") == 2
    assert len(re.findall(r"ExpertParallel, fast, \d+ ranks: floor", text)) == floors
    assert len(re.findall(r"fused_dispatch, \d+ ranks: floor", text)) == 3


@pytest.mark.parametrize("steps", [1, 3])
def test_a_median_is_named_if_there_are_several_steps(tmp_path, capsys, steps):
    np.save(tmp_path / "a.npy", np.argsort(np.random.default_rng(0).random((steps, 64, 16)), axis=2)[:, :, :2])
    assert main(["routing", str(tmp_path / "a.npy"), "--ranks", "4"]) == 0
    assert ("in the median step" in " ".join(capsys.readouterr().out.split())) == (steps > 1)


def test_the_page_is_never_written_over_the_dump(capsys, tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(8).reshape(4, 2))
    before = file.read_bytes()
    assert main(["routing", str(file), "--html", str(file)]) == 2
    assert "would be overwritten" in capsys.readouterr().err and file.read_bytes() == before


@pytest.mark.parametrize(
    "argv, said",
    [
        (["none.npz"], "none.npz cannot be read"),
        (["x", "--link-gbps", "0"], "positive number of GB/s"),
        (["x", "--ranks", "0"], "at least 1"),
        (["a.npy", "--experts", "9" * 20], "must be at most 65535"),
        (["a.npy", "--html", "b.csv"], "--html b.csv exists and does not end in .html"),
        (
            ["b.csv"],
            "b.csv is CSV, which is not read: numpy.save('ids.npy', numpy.loadtxt('b.csv', int, delimiter=','))",
        ),
    ],
)
def test_what_does_not_fit_ends_with_2(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.zeros((1, 1), int))
    Path("b.csv").write_text("1,2\n")
    try:
        status = main(["routing", *argv])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and said in capsys.readouterr().err


def test_the_shipped_table_is_that_of_its_file():
    table = measured.table()
    record = json.loads((ROOT / "benchmarks" / "results" / table["from"]).read_text())
    assert measured.FILE.read_text() == measured.as_text(measured.table_of(record, table["from"]))


def test_at_a_measured_size_the_measured_time_is_expected():
    table = measured.table()
    for key, rows in table["bytes_us_floor_us"].items():
        interface, phase, short = key.split()
        for nbytes, us, floor_us in rows:
            token_format = {"bf16": "bf16", "fp8": "fp8_blockwise"}[short]
            assert measured.expected_us(interface, phase, token_format, nbytes, floor_us) == pytest.approx(us)
    assert measured.expected_us("rows", "dispatch", "nvfp4", 1, 1.0) is None
    slower = measured.expected_us("rows", "dispatch", "bf16", 10**9, 2000.0)
    assert 2000 < slower < 2000 * 1.2


@pytest.mark.nightly
def test_memory_is_what_the_interfaces_allocate():
    """Of ExpertParallel to the byte; of the others to a quarter, and their control memory and flags."""
    import ml_dtypes

    from epmoe import EPConfig, LocalWorld, fused_a2a
    from epmoe.fused_a2a import buffers
    from epmoe.host import rank_memory
    from epmoe.routing_report import counts

    n_ranks, tokens, hidden, top_k = 2, 140, 256, 2
    rng = np.random.default_rng(0)
    ids = [np.argsort(rng.random((tokens, 8)), axis=1)[:, :top_k] for _ in range(n_ranks)]
    cfg = EPConfig(n_ranks, 8, top_k, hidden, tokens)
    step, sizes = counts.count(ids, 8), interfaces.Sizes(cfg, 100.0)
    unreduced = next(use for use in rank_memory.plan(cfg) if use.buffer.startswith("unreduced"))
    assert (
        interfaces.memory_bytes("pairs", [step], sizes) == rank_memory.plan(cfg).planned_bytes - unreduced.planned_bytes
    )

    world = LocalWorld(n_ranks)
    x = [np.ones((tokens, hidden), ml_dtypes.bfloat16) for _ in ids]
    rows, _, _, _, handle = fused_a2a.fused_dispatch(x, ids, [np.ones(i.shape, np.float32) for i in ids], 8, world)
    fused_a2a.fused_combine(rows, world, handle)
    taken = buffers.buffer_of(world).allocated_bytes
    assert 0.75 < interfaces.memory_bytes("rows", [step], sizes) / taken < 1.25
    routing_map = [(i[:, :, None] == np.arange(8)).any(axis=1) for i in ids]
    probs = [m.astype(np.float32) for m in routing_map]
    fused_a2a.init_hybrid_ep_buffer(world, hidden, tokens, 8 // n_ranks, None, None, False)
    hidden_rows, _, _, _, handle = fused_a2a.hybrid_ep_dispatch(x, routing_map, probs, world, 8 // n_ranks)
    fused_a2a.hybrid_ep_combine(hidden_rows, handle)
    taken = buffers.hybrid_ep_buffer(world).allocated_bytes
    assert 0.75 < interfaces.memory_bytes("expert_major", [step], sizes) / taken < 1.25
