"""What nobody holds any more is freed: an ExpertParallel without close(), and calls with functions of earlier rounds."""

import gc
import weakref

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, combine, config, parallel

from epmoe import ExpertParallel, LocalWorld, PeerTimeout, fused_a2a
from epmoe.device.sim.memory import MEMORY
from epmoe.host import dispatch_phase, plans, user_functions


def test_an_expert_parallel_without_close_gives_its_memory_back_and_results_keep_theirs():
    cfg, world = config(max_tokens_per_rank=1), LocalWorld(2)
    x, ids, weights = batch(cfg)
    gc.collect()
    before = len(MEMORY.spans)
    for _ in range(2):
        ep = ExpertParallel(cfg, world)
        d = ep.dispatch(x, ids)
        out = combine(ep, d, weights)
    want, n_rows = [a.copy() for a in out], [one.n_rows for one in d]
    gone = weakref.ref(ep)
    del ep
    gc.collect()
    assert gone() is None
    assert all(np.array_equal(a, b) for a, b in zip(out, want)) and [one.trimmed().n_rows for one in d] == n_rows
    del d, out
    gc.collect()
    assert len(MEMORY.spans) == before


@pytest.mark.parametrize("end", [ExpertParallel.close, lambda ep: None], ids=["closed", "gone"])
def test_an_open_round_of_an_object_that_has_ended_still_has_its_rows(end, x, ids):
    ep = parallel(config())
    d = ep.dispatch(x, ids)
    end(ep)
    del ep
    gc.collect()
    assert sum(one.n_rows for one in d) == sum(int((a >= 0).sum()) for a in ids)
    assert all(len(one.trimmed().numpy().src_info) == one.n_rows for one in d)


def test_what_kernels_had_recorded_is_raised_by_the_results(x, ids):
    ep = parallel(config())
    d = ep.dispatch(x, ids)
    ep._engine.check = lambda: (_ for _ in ()).throw(PeerTimeout("a rank stayed away"))
    of_engine = ep._engine
    del ep
    gc.collect()
    del of_engine.check
    with pytest.raises(PeerTimeout, match="a rank stayed away"):
        d[0].numpy()


def make(factor, offset):
    def epilogue(token, col, value):
        return value * factor + offset

    return epilogue


def test_functions_of_earlier_rounds_are_let_go(monkeypatch):
    monkeypatch.setattr(dispatch_phase, "MOST_CALLS", 3)
    cfg = config(n_ranks=1, max_tokens_per_rank=1)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        for i in range(8):
            combine(ep, ep.dispatch(x, ids), weights, make(1.0, i))
        assert len(ep._engine.calls) <= 3 + 2


def test_a_function_made_anew_is_the_earlier_one_if_it_does_the_same(monkeypatch):
    monkeypatch.setattr(user_functions.device, "SIM", False)
    earlier, one = user_functions.earlier, make(2.0, 1.0)
    assert earlier(one) is one and earlier(make(2.0, 1.0)) is one
    other = make(2.0, 3.0)
    assert earlier(other) is other and earlier(None) is None and earlier("array") == "array"
    array = np.ones(3)
    held = make(array, 1.0)  # what it refers to cannot be compared
    assert earlier(held) is held and earlier(make(array, 1.0)) is not held


def test_a_function_that_has_changed_since_is_not_taken_for_another(monkeypatch):
    monkeypatch.setattr(user_functions.device, "SIM", False)
    one = make(5.0, 1.0)
    assert user_functions.earlier(one) is one
    one.__closure__[0].cell_contents = 7.0
    another = make(5.0, 1.0)
    assert user_functions.earlier(another) is another


def test_plans_of_many_shapes_are_let_go(monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 4)
    world = LocalWorld(1)
    with ExpertParallel(config(n_ranks=1, max_tokens_per_rank=6), world) as ep:
        for n in range(1, 7):
            x, ids = np.ones((n, ep.cfg.hidden), BF16), np.zeros((n, ep.cfg.top_k), np.int32) - 1
            ids[:, 0] = 0
            (d,) = ep.dispatch([x], [ids])
            (y,) = ep.combine([d.output_tokens], [d], [np.ones(ids.shape, np.float32)])
            assert np.array_equal(y, x) and len(ep._engine.plans) <= 4
    for n in range(1, 7):
        x, ids = np.ones((n, 16), BF16), np.zeros((n, 1), np.int64)
        rows, *_, handle = fused_a2a.fused_dispatch([x], [ids], [np.ones((n, 1), np.float32)], 2, world)
        assert np.array_equal(fused_a2a.fused_combine(rows, world, handle)[0][0], x)
    assert len(fused_a2a.get_buffer(world, 32)._plans) <= 4
