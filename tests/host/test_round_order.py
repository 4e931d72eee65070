"""dispatch, combine, dispatch, combine: other orders are refused with reasons; after a timeout only reset() helps."""

from itertools import product

import pytest
from worlds_at_hand import OtherStart, batch, combine, config, equal_combine, equal_dispatch, equal_round, parallel

from epmoe import EPError, EPValueError, LaunchConfig, PeerTimeout
from epmoe.host.engine import KERNELS
from epmoe_ref.errors import DeadlockError, EPStateError


def test_two_dispatches_in_a_row_are_refused_with_the_reason(ep, x, ids, weights):
    d = ep.dispatch(x, ids)
    with pytest.raises(EPStateError, match="combine it first.*overwrite messages"):
        ep.dispatch(x, ids)
    with pytest.raises(EPStateError, match="combine it first"):
        ep.dispatch_async(x, ids)
    combine(ep, d, weights)  # the open round is unharmed
    ep.dispatch(x, ids)


def test_waits_need_their_async(ep, x, ids, weights):
    with pytest.raises(EPStateError, match="no dispatch is open"):
        ep.dispatch_wait()
    with pytest.raises(EPStateError, match="no dispatch is open"):
        ep.combine_wait(weights)
    ep.dispatch_async(x, ids)
    with pytest.raises(EPStateError, match="call dispatch_wait next"):
        ep.dispatch_async(x, ids)
    d = ep.dispatch_wait()
    for wait, given in ((ep.dispatch_wait, ()), (ep.combine_wait, (weights,))):
        with pytest.raises(EPStateError, match=r"combine_async was not called: call combine_async \(or combine\) next"):
            wait(*given)
    ep.combine_async([a.output_tokens for a in d], d)
    with pytest.raises(EPStateError, match="call combine_wait next"):
        combine(ep, d, weights)
    ep.combine_wait(weights)
    with pytest.raises(EPStateError, match="no dispatch is open"):
        combine(ep, d, weights)


def test_a_dispatched_of_an_earlier_round_is_refused(ep, x, ids, weights):
    old = ep.dispatch(x, ids)
    combine(ep, old, weights)
    y = [a.output_tokens for a in ep.dispatch(x, ids)]
    for given, name in ((old, "Dispatched of another round or rank"), ([None, None], "NoneType")):
        with pytest.raises(EPError, match=f"rank 0 was given a {name}; it needs"):
            ep.combine(y, given, weights)


def test_split_and_fused_calls_mix(ep, x, ids, weights):
    for dispatch_split, combine_split in product((False, True), repeat=2):
        if dispatch_split:
            ep.dispatch_async(x, ids)
        d = ep.dispatch_wait() if dispatch_split else ep.dispatch(x, ids)
        if combine_split:
            ep.combine_async([a.output_tokens for a in d], d)
        out = ep.combine_wait(weights) if combine_split else combine(ep, d, weights)
        equal_combine(ep.cfg, out, equal_dispatch(ep.cfg, d, x, ids), weights)


def test_a_refused_launch_changes_nothing():
    cfg = config(max_tokens_per_rank=12)  # fewer get as many blocks as they have use for
    with parallel(cfg, launch=LaunchConfig(n_sms=1000)) as ep:
        for _ in range(2):
            with pytest.raises(EPValueError, match="grid=1000.*resident"):
                ep.dispatch(*batch(cfg)[:2])


def without_dispatch_of(silent, kernels=KERNELS["fast"]):
    """The kernels, but the dispatch_async of these ranks is not launched."""

    def start(launch, cfg, wanted, words):
        if wanted.my_rank not in silent:
            launch.start(*words)

    return OtherStart(kernels, "dispatch_async_kernel", start)


@pytest.mark.parametrize("name", KERNELS)
def test_a_silent_rank_is_named_and_reset_helps(name):
    cfg, silent = config(n_ranks=3, n_experts=6), [1]
    kernels = without_dispatch_of(silent, KERNELS[name])
    x, ids, weights = batch(cfg)
    with parallel(cfg, _factories=kernels, fused=False, timeout=0.5, expire_waits=True) as ep:
        ep.dispatch_async(x, ids)
        with pytest.raises(PeerTimeout) as error:
            ep.dispatch_wait()
        said = str(error.value)
        for part in "rank 0", "rank 2", "dispatch_wait", "src_rank 1", "experts: 0, 1":
            assert part in said, said
        assert "timeout=0.5 s" in said and "src_rank 0" not in said, said
        for call, given in ((ep.dispatch, (x, ids)), (ep.dispatch_wait, ()), (ep.dispatch_async, (x, ids))):
            with pytest.raises(EPStateError, match=r"PeerTimeout.*reset\(\)"):
                call(*given)
        ep.reset()
        silent.clear()
        equal_round(ep, x, ids, weights)


def test_a_deadlock_that_the_simulator_proves_is_reported_at_once(x, ids):
    with parallel(config(), _factories=without_dispatch_of([1]), fused=False) as ep:
        ep.dispatch_async(x, ids)
        with pytest.raises(DeadlockError, match="recv_count"):
            ep.dispatch_wait()
        with pytest.raises(EPStateError, match=r"DeadlockError.*reset\(\)"):
            ep.dispatch(x, ids)
