"""Each step that orders puts and signals is needed: without it a round races and may give wrong bytes."""

import pytest

import epmoe_ref
from epmoe import EPConfig, ExpertParallel, LocalWorld, routing
from epmoe.check import compare_combined, compare_dispatched
from epmoe.device import lane_id, shmem, store_u32, syncwarp
from epmoe.kernels.pairs import combine, dispatch, peers
from epmoe_ref.errors import RaceError

CFG = EPConfig(2, 4, 2, 64, 3, p2p_world_size=1, use_shmem=True)
CACHES = (dispatch._compile_async, dispatch._compile_fused, combine._compile_async, combine._compile_fused, peers.make)


@pytest.fixture
def without(monkeypatch):
    """without(name, word): kernels use `word` instead of a SHMEM intrinsic."""

    def put(name, word):
        monkeypatch.setattr(shmem, name, word)
        for cache in CACHES:
            cache.cache_clear()

    yield put
    for cache in CACHES:
        cache.cache_clear()


def outcome(seed, racecheck, fused):
    """ "race", "different" or "equal"."""
    try:
        with ExpertParallel(CFG, LocalWorld(2, seed=seed, racecheck=racecheck), fused=fused, kernels="fast") as ep:
            for number in range(2):
                if round_differs(ep, routing.make(CFG, [1, number])):
                    return "different"
    except RaceError:
        return "race"
    return "equal"


def round_differs(ep, routed):
    """One round in which the two split kernels of a call are launched together, so that the host orders nothing."""
    want = epmoe_ref.dispatch(CFG, routed.x, routed.topk_ids)
    got = ep.dispatch(routed.x, routed.topk_ids)
    exact = [d.trimmed().numpy() for d in got]
    if any(compare_dispatched(CFG, rank, exact[rank], want[rank]) for rank in range(2)):
        return True
    expected = epmoe_ref.combine(CFG, [d.output_tokens for d in want], want, router_weights=routed.topk_weights)
    out = ep.combine([d.output_tokens for d in exact], got, routed.topk_weights)
    return any(compare_combined(CFG, rank, out[rank], expected[rank]) for rank in range(2))


def nothing(*args):
    pass


def reused_at_once(put):
    """The source of a put is overwritten right after it has begun, as by the next row in the same place."""

    def word(dst, src, nbytes, pe):
        put(dst, src, nbytes, pe)
        if lane_id() == 0:
            store_u32(src, 0xDEAD)
        syncwarp()

    return word


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
class TestOrder:
    @pytest.mark.by_day(1)
    def test_unchanged_kernels_pass(self, fused):
        assert {outcome(seed, True, fused) for seed in range(2)} == {"equal"}

    def test_quiet(self, without, fused):
        # Bytes are hardly ever wrong: on the way from the put to the signal the simulated network is fast enough.
        without("shmem_quiet", nothing)
        assert outcome(0, True, fused) == "race"

    def test_quiet_by_one_lane(self, without, fused):
        quiet = shmem.shmem_quiet
        without("shmem_quiet", lambda: quiet() if lane_id() == 0 else None)
        assert outcome(0, True, fused) == "race"

    @pytest.mark.by_day(1)
    def test_fence_of_the_signalling_thread(self, without, fused):
        without("shmem_fence", nothing)
        assert outcome(0, True, fused) == "race"

    @pytest.mark.by_day(1)
    def test_source_is_kept_until_quiet(self, without, fused):
        without("shmem_put_nbi_warp", reused_at_once(shmem.shmem_put_nbi_warp))
        assert outcome(0, True, fused) == "race"
        assert "different" in {outcome(seed, False, fused) for seed in range(4)}
