"""The phases of each block on the timeline, and the moments of the tape."""

import pytest
from recorded_round import history

from epmoe.explain import tape
from epmoe.explain.arrays import NOT_ARRIVED
from epmoe.explain.moments import moments
from epmoe.explain.phases import PHASES, Timeline

FP8 = dict(fused=True, seed=1, ranks=2, token_format="fp8_blockwise")


@pytest.mark.parametrize("fused", [False, True])
def test_slices_of_a_block_follow_each_other(fused):
    timeline = Timeline(history(fused=fused))
    launches = history(fused=fused).recording.recorder.launches
    assert len(launches) == (6 if fused else 12) and len(timeline.lanes) == sum(n.grid for n in launches)
    for lane in timeline.lanes:
        assert all(a.end <= b.begin for a, b in zip(lane.slices, lane.slices[1:])), lane
        assert all(lane.begin <= s.begin <= s.end <= lane.end + 1 for s in lane.slices), lane
    phases = {s.phase for lane in timeline.lanes for s in lane.slices}
    assert {"read", "send", "copy", "return", "reduce"} <= phases <= {*PHASES, "wait"}
    assert all(s.word for lane in timeline.lanes for s in lane.slices if s.phase == "wait")


@pytest.mark.parametrize("options", [dict(), dict(fused=True), FP8], ids=str)
def test_an_arrow_leads_from_every_signal_to_the_rank_that_it_is_for(options):
    h = history(**options)
    arrows = Timeline(h).arrows
    reached = {a.source.number: a.target.rank for a in arrows}
    for name in ("dispatch_recv_count", "combine_recv_count"):
        for rank in range(h.recording.cfg.n_ranks):
            for index, changes in h.of(name, rank).items():
                came = next(c for c in changes if c.value != NOT_ARRIVED)
                assert (came.event.order, came.event.scope) == ("release", "sys")
                if came.event.rank != rank:
                    assert reached.get(came.event.number) == rank, (name, rank, index)
    assert all(a.source.step < a.target.step for a in arrows)


def test_moments_follow_each_other():
    h = history()
    every = moments(h)
    assert [m.step for m in every] == sorted(m.step for m in every)
    assert every[0].step == 0 and every[-1].step > h.recording.dispatch_end and 40 < len(every) < 600


@pytest.mark.parametrize("options", [dict(), FP8], ids=str)
def test_every_step_of_the_tape_changes_a_word_and_every_word_changes(options):
    made = tape.data(history(**options))
    steps = [step for step, _ in made["moments"]]
    changes = {
        c[0] for region in made["regions"] for cells in region["ranks"] for cell in cells for c in cell["changes"]
    }
    for before, step in zip(steps, steps[1:]):
        assert any(before < c <= step for c in changes), step
    for region in made["regions"]:
        for cell in (cell for cells in region["ranks"] for cell in cells):
            values = [text for _, text in cell["changes"]]
            assert all(a != b for a, b in zip(values, values[1:])) and max(c[0] for c in cell["changes"]) > 0, cell


def test_the_tape_ends_with_what_the_reference_says():
    h = history()
    made = {
        (region["name"], rank, cell["index"]): [t for _, t in cell["changes"]]
        for region in tape.data(h)["regions"]
        for rank, cells in enumerate(region["ranks"])
        for cell in cells
    }
    for rank, d in enumerate(h.recording.dispatched):
        for row, (token, _) in enumerate(d.src_info.tolist()):
            assert made["output_tokens", rank, str(row)] == [f"t{token}"]
        for group, offset in enumerate(d.row_offsets.tolist()):
            assert made["row_offsets", rank, str(group)][-1] == str(offset)
        for (le, src), count in zip(((a, b) for a in range(2) for b in range(3)), d.recv_count.reshape(-1).tolist()):
            assert str(count) in made["dispatch_recv_count", rank, f"{le}, {src}"]
