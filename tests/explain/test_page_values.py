"""Every value on the page is in the arrays, and the arrays are what the reference computes for the same seed."""

import ctypes
import json

import epmoe_ref
import numpy as np
import pytest
from epmoe.check.dequantised import dequantised
from epmoe.check.places import places
from epmoe.explain.arrays import ANNOUNCED, NOT_ARRIVED, is_signal, word
from epmoe.verify.experts import Experts
from epmoe_ref.config import READY
from recorded_round import history, place, taken_apart

ROUNDS = [dict(), dict(fused=True, seed=1), dict(token_format="fp8_blockwise", ranks=2),
          dict(token_format="nvfp4", ranks=2, fused=True)]
COUNTED = ("reserved", "finished", "A", "B", "C", "D", "E", "F", "G", "rank_completion", "combine_ready",
           "dispatch_recv_count", "combine_recv_count")


def expected(**options):
    """What the reference says of the same round: canonical Dispatched, and combined."""
    r = history(**options).recording
    d = epmoe_ref.dispatch(r.cfg, r.routed.x, r.routed.topk_ids)
    experts = Experts(r.cfg, r.seed, 16)
    y = [experts(rank, of_rank) for rank, of_rank in enumerate(d)]
    return d, epmoe_ref.combine(r.cfg, y, d, router_weights=r.routed.topk_weights)


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_the_kernels_were_right(options):
    assert not history(**options).recording.differences


@pytest.mark.parametrize("options", ROUNDS[:2], ids=str)
def test_the_events_tell_the_whole_story(options):
    h = history(**options)
    names = {name for name, _ in h.arrays.all}
    assert {"dispatch_recv_buf", "combine_recv_buf", "output_tokens", "src_info", "combined", *COUNTED} <= names
    for name in ("dispatch_recv_count", "reserved", "finished", "A", "B", "C", "D", "E", "combine_recv_count"):
        for rank in range(h.recording.cfg.n_ranks):
            for index, changes in h.of(name, rank).items():
                where = f"{name} of rank {rank} at {index}"
                steps = [c.step for c in changes]
                assert steps == sorted(steps), where
    # what was written, put over what was there before, is what the kernels returned
    for rank, d in enumerate(h.recording.dispatched):
        rows = len(d.src_info)
        array = h.arrays.get("output_tokens", rank)
        raw = h.bytes_at_end("output_tokens", rank).reshape(array.shape[0], -1)[:rows]
        assert raw.tobytes() == np.ascontiguousarray(d.output_tokens).tobytes()


def test_replayed_writes_are_the_memory_while_it_is_there():
    """In the middle of a round, before anything is freed, all arrays equal their replay."""
    from epmoe import ExpertParallel, LocalWorld
    from epmoe.device.sim.recorder import Recorder
    from epmoe.explain.arrays import Arrays
    from epmoe.explain.history import History
    from epmoe.explain.inputs import routed_for
    from epmoe.explain.recording import Recording
    from epmoe_ref.config import EPConfig

    cfg = EPConfig(2, 4, 2, 64, 3)
    recorder, routed = Recorder(), routed_for(cfg, 0)
    with ExpertParallel(cfg, LocalWorld(2, seed=0, recorder=recorder), fused=True) as ep:
        d = ep.dispatch(routed.x, routed.topk_ids)
        r = Recording(cfg, True, 0, routed, recorder, [], [], [], [])
        h, checked = History(r), 0
        for name, rank in Arrays(r).all:
            if h.before(name, rank) is not None and name not in ("input_tokens", "topk_ids"):
                array = h.arrays.get(name, rank)
                in_memory = ctypes.string_at(array.address, array.nbytes)
                assert h.bytes_at_end(name, rank).tobytes() == in_memory, (name, rank)
                checked += 1
        assert checked > 30 and len(d) == 2


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_the_arrays_of_the_page_are_the_reference_s(options):
    arrays = taken_apart(**options)[1].json["arrays"]
    r = history(**options).recording
    cfg = r.cfg
    want, combined = expected(**options)
    for rank in range(cfg.n_ranks):
        w = want[rank]
        assert arrays["topk_ids"][rank] == w.topk_ids.tolist()
        assert arrays["row_offsets"][rank] == w.row_offsets.tolist()
        assert arrays["expert_ids"][rank] == w.expert_ids.tolist()
        assert arrays["recv_count"][rank] == w.recv_count.tolist()
        assert arrays["combined"][rank] == combined[rank][:, :3].astype(np.float32).tolist()
        assert arrays["router_weights"][rank] == r.routed.topk_weights[rank].tolist()
        seen, w = epmoe_ref.canonical(r.dispatched[rank]), epmoe_ref.canonical(w)
        assert sorted(map(tuple, arrays["src_info"][rank])) == sorted(map(tuple, w.src_info.tolist()))
        assert np.array_equal(seen.src_info, w.src_info)
        # rows, whose order inside a segment is free
        where = places(cfg, w.row_offsets, w.recv_count)
        keys = [(int(where.group[row]), int(where.src_rank[row])) for row in range(where.n_rows)]
        of_rank = arrays["src_info"][rank], arrays["output_tokens"][rank]
        values = {(*key, *info): x for key, info, x in zip(keys, *of_rank)}
        for key, info, x in zip(keys, w.src_info.tolist(), dequantised(cfg, w)[:, :3]):
            if key[1] >= 0:
                assert np.array_equal(values[(*key, *info)], x)


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_the_counters_say_what_the_reference_counts(options):
    arrays = taken_apart(**options)[1].json["arrays"]
    cfg = history(**options).recording.cfg
    want, _ = expected(**options)
    for rank in range(cfg.n_ranks):
        of = {name: arrays["histories"][name][rank] for name in COUNTED}
        for local in range(cfg.n_local_experts):
            start = int(want[rank].row_offsets[local])
            for other in range(cfg.n_ranks):
                key, came = f"{local},{other}", int(want[rank].recv_count[local, other])
                sent = int(want[other].recv_count[local, rank])
                start += came
                told = [v for _, v in of["dispatch_recv_count"][key]]
                assert [v for v in told if v is None or is_signal(v)] == [None, came, None]
                assert [v for v in told if v is not None and not is_signal(v)] in ([], [ANNOUNCED + came])
                assert [v for _, v in of["combine_recv_count"][key]] == [None, sent, None]
                assert [v for _, v in of["reserved"][key]] == ([0, *range(1, sent + 1), 0] if sent else [0])
                ends = [v for _, v in of["A"][key + ",0"]]
                assert ends == [0, READY + start, 0]
                assert [v for _, v in of["A"][key + ",1"]] == ([0, came, 0] if came else [0])
        for name in ("reserved", "finished", "A", "D", "E", "F", "G", "rank_completion", "combine_ready"):
            assert {changes[-1][1] for changes in of[name].values()} == {0}, name


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_every_value_on_the_page_is_in_its_arrays(options):
    _, elements = taken_apart(**options)
    arrays, looked_at = elements.json["arrays"], {}
    for a in elements.with_attribute("data-at"):
        if a.get("data-value") is None:
            continue
        name, rank, index = place(a["data-at"])
        looked_at[name] = looked_at.get(name, 0) + 1
        given = a["data-value"]
        value = int(given) if given.lstrip("-").isdecimal() else float(given)
        if name == "messages":
            assert arrays["messages"][rank][",".join(map(str, index))] == value
        elif name in arrays["histories"]:
            changes = arrays["histories"][name][rank][",".join(map(str, index or (0,)))]
            assert (None if value == NOT_ARRIVED else value) in [v for _, v in changes], a
        else:
            found = arrays[name][rank]
            for i in index:
                found = found[i]
            assert found == pytest.approx(value, rel=1e-6), a
    assert {"topk_ids", "messages", "dispatch_recv_count", "src_info", "row_offsets", "output_tokens", "reserved", "A",
            "router_weights", "combine_recv_buf", "combined"} <= set(looked_at)
    assert sum(looked_at.values()) > 200


@pytest.mark.parametrize("options", ROUNDS[:2], ids=str)
def test_every_value_over_time_is_in_the_histories(options):
    _, elements = taken_apart(**options)
    histories, shown = elements.json["arrays"]["histories"], 0
    pending = None
    for _, a in elements.found:
        if "data-at" in a:
            pending = a["data-at"]
        if "data-h" not in a:
            continue
        name, rank, index = place(a.get("data-at") or pending)
        steps = json.loads(a["data-h"])
        if name in histories:
            recorded = {(s, word(name, NOT_ARRIVED if v is None else v))
                        for s, v in histories[name][rank][",".join(map(str, index or (0,)))]}
            recorded_steps = {s for s, _ in recorded}
            assert all((s[0], s[1]) in recorded or len(s) == 3 and s[0] in recorded_steps for s in steps)
            shown += 1
    assert shown > 100


@pytest.mark.parametrize("options", [*ROUNDS, dict(fused=True, ranks=2, experts=3, top_k=4),
                                     dict(fused=True, ranks=1, experts=4)], ids=str)
def test_a_payload_comes_to_a_rank_once_or_in_every_message(options):
    """Fused: in the message to the lowest of a token's experts there, where its other messages say that it lies."""
    h, page = history(**options), taken_apart(**options)
    shares = options.get("fused", False) and options.get("ranks") != 1
    arrays, hollow = page[1].json["arrays"], 0
    for rank in range(h.recording.cfg.n_ranks):
        carriers = {}
        for key, token in arrays["messages"][rank].items():
            src = int(key.split(",")[1])
            carriers.setdefault((src, token), []).append((int(key.split(",")[0]), key))
        elsewhere = {key: min(of_token)[1] for of_token in carriers.values() for _, key in of_token
                     if key != min(of_token)[1]}
        assert arrays["payload_in"][rank] == (elsewhere if shares else {})
        hollow += len(arrays["payload_in"][rank])
    assert (hollow > 0) == shares
    assert page[0].count('class="hollow k') == hollow
    written = sum(len(e.wrote) for rank in range(h.recording.cfg.n_ranks) for e in h.writes("dispatch_recv_buf", rank))
    assert f"{written:,} bytes" in page[0]


def test_the_page_needs_nothing_from_elsewhere():
    text, elements = taken_apart()
    assert text.count("http") == 0
    assert not [a for tag, a in elements.found if tag in ("script", "img", "link", "iframe") and (
        a.get("src") or (a.get("href") or "data:,") != "data:,")]
    assert "@import" not in text and "url(" not in text


def test_it_is_small_enough_to_send():
    assert len(taken_apart()[0]) < 1_000_000
