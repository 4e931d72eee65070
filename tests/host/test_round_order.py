"""dispatch, combine, dispatch, combine: other orders are refused with reasons; after a timeout only reset() helps."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from worlds_at_hand import batch, combine, config, equal_combine, equal_dispatch, equal_round, parallel, regions

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


def test_after_a_round_all_regions_are_as_before(ep, x, ids, weights):
    free = "dispatch_recv_buf", "combine_recv_buf", "dispatch_send_buf", "clean_topk_ids", "B", "C"
    before = regions(ep)
    combine(ep, ep.dispatch(x, ids), weights)
    after = regions(ep)
    assert all(np.array_equal(after[key], before[key]) for key in before if key[0] not in free)


def test_a_refused_launch_changes_nothing():
    cfg = config(max_tokens_per_rank=12)  # fewer get as many blocks as they have use for
    with parallel(cfg, launch=LaunchConfig(n_sms=1000)) as ep:
        for _ in range(2):
            with pytest.raises(EPValueError, match="grid=1000.*resident"):
                ep.dispatch(*batch(cfg)[:2])


class WithoutDispatchOf:
    """The kernels, but one rank never sends: its dispatch_async is not launched."""

    def __init__(self, silent_rank, kernels=KERNELS["fast"]):
        self.silent_rank, self.silent, self.kernels = silent_rank, True, kernels

    def __getattr__(self, name):
        made = getattr(self.kernels, name)
        if name != "dispatch_async_kernel":
            return made

        def factory(*args, **options):
            call = made(*args, **options)
            prepared = call.prepared

            def of_rank(wanted):
                launch = prepared(wanted)

                def start(*words):
                    if not (self.silent and wanted.my_rank == self.silent_rank):
                        launch.start(*words)

                return SimpleNamespace(start=start)

            call.prepared = of_rank
            return call

        return factory


@pytest.mark.parametrize("name", KERNELS)
def test_a_silent_rank_is_named_and_reset_helps(name):
    cfg = config(n_ranks=3, n_experts=6)
    kernels = WithoutDispatchOf(1, KERNELS[name])
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
        kernels.silent = False
        equal_round(ep, x, ids, weights)


def test_a_deadlock_that_the_simulator_proves_is_reported_at_once(x, ids):
    with parallel(config(), _factories=WithoutDispatchOf(1), fused=False) as ep:
        ep.dispatch_async(x, ids)
        with pytest.raises(DeadlockError, match="recv_count"):
            ep.dispatch_wait()
        with pytest.raises(EPStateError, match=r"DeadlockError.*reset\(\)"):
            ep.dispatch(x, ids)
