"""Each step that orders puts and signals is needed: without it a round races and may give wrong bytes."""

import pytest

from epmoe import EPConfig, LocalWorld, routing
from epmoe.device import lane_id, shmem, store_u32, syncwarp
from epmoe.kernels.pairs import combine, dispatch, peers
from epmoe.verify.checked_rounds import Case, rounds_of
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
    case, world = Case(CFG, fused=fused, kernels="fast"), LocalWorld(2, seed=seed, racecheck=racecheck)
    routed = [routing.make(CFG, [1, number]) for number in range(2)]
    try:
        return "different" if any(r.differences for r in rounds_of(case, world, routed)) else "equal"
    except RaceError:
        return "race"


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
