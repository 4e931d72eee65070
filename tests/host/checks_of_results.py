"""Results' memory is lent again when nobody looks at it, also where the host waits. counted_rounds.py runs this."""

import ctypes

import numpy as np
from counted_driver import counted_machine, int64
from counted_rounds import a_round, fails, since
from host_cost import OneRankHere, at_hand, tensors

from epmoe import fused_a2a
from epmoe.fused_a2a.launches import at
from epmoe.kernels.rows import mailbox
from epmoe_ref.errors import EPError


def check_results_go_where_nobody_looks():
    with at_hand(rounds=3) as (ep, driver, (x, ids, weights)):
        held = [a_round(ep, x, ids, weights) for _ in range(5)]
        assert len({a.address for a in held}) == 5
        d = ep.dispatch(x, ids)
        addresses = d.output_tokens.address, d.src_info.address
        ep.combine(d.output_tokens, d, weights)
        again = ep.dispatch(x, ids)
        assert (again.output_tokens.address, again.src_info.address) != addresses, "d is still looked at"
        assert again.topk_ids.shape == (4, 8) and d.row_offsets is d.row_offsets and d.output_scales is None
        ep.combine(again.output_tokens, again, weights)


def check_memory_comes_back_when_nobody_looks_at_it():
    with at_hand(rounds=2) as (ep, driver, (x, ids, weights)):
        out = a_round(ep, x, ids, weights)
        some, address = out.first(2), out.address
        del out
        assert address not in [a_round(ep, x, ids, weights).address for _ in range(4)]
        del some
        assert address in [a_round(ep, x, ids, weights).address for _ in range(2)]
        n_allocated = []
        for n in (4, 3, 2, 1) * 3:
            a_round(ep, *tensors(n=n))
            n_allocated.append(len(driver.allocated()))
        assert n_allocated[4] == n_allocated[-1], n_allocated


def exact_dispatch():
    """(function that makes a fused_dispatch of 2 ranks, 4 rows from each to each; driver; its stream; the words told).

    The words are what the kernel would have told: has room, padded rows, tokens of each rank, rows [R, R], by expert.
    """
    machine, driver = counted_machine(2, 0)
    world, launch = OneRankHere(machine, 2), driver.cuLaunchKernelEx
    at_info, at_experts = at("info"), at("tokens_per_expert")
    told, by_expert = np.array([1, 0, 4, 4, 2, 2, 2, 2], np.int32), np.arange(8, dtype=np.int64)

    def run(config, function, *how):
        result = launch(config, function, *how)
        if function == "rows_dispatch":
            words = driver.launches[-1][4]
            ctypes.memmove(words[at_info], told.ctypes.data, told.nbytes)
            ctypes.memmove(words[at_experts], by_expert.ctypes.data, by_expert.nbytes)
            has_failed = words[at("words")] + mailbox.STATUS  # then kernels end, and tell nothing
            if ctypes.c_int32.from_address(has_failed).value:
                return result
            to_host = bytes(64) + by_expert.tobytes() + told.tobytes()  # no status word is set
            told[0] = 1  # room is made
            ctypes.memmove(words[at("told")] + 64, to_host, len(to_host))
            ctypes.c_uint64.from_address(words[at("told")]).value = words[at("told_number")]
        return result

    driver.cuLaunchKernelEx = run
    given = tensors(ids_dtype=int64)

    def dispatch():
        return fused_a2a.fused_dispatch(*given, 16, world)

    dispatch()
    return dispatch, driver, machine.streams[0], told


def check_a_dispatch_that_the_host_waits_for_polls_its_own_memory():
    dispatch, driver, stream, told = exact_dispatch()
    for _ in range(4):
        dispatch()
    launched, calls = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch"]
    assert not calls, calls


def check_rows_that_somebody_holds_are_not_received_into():
    dispatch, driver, _, told = exact_dispatch()
    for _ in range(4):
        dispatch()
    x, ids, probs, by_expert, handle = dispatch()
    assert x.shape == (4, 64) and ids.shape == probs.shape == (4, 8) and by_expert.tolist() == list(range(8))
    assert handle.num_rows == [4]
    at, info = x.address, handle.loans[0].address("info")
    del ids, probs, by_expert, handle
    told[4:] = 1, 3, 1, 3
    other = dispatch()
    assert other[0].address != at and other[0].shape == (2, 64) and other[-1].num_rows == [2]
    handle = other[-1]
    del x, other
    held = handle.loans[0].address("info")
    assert all(dispatch()[-1].loans[0].address("info") != held for _ in range(4))
    del handle
    assert dispatch()[-1].loans[0].address("info") in (held, info)
    told[0], told[2] = 0, 5  # no room for 5 tokens, on any rank
    launched, _ = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch", "rows_dispatch"], launched
    told[0] = 0  # there is room for 5 now, so this must not begin again
    fails(EPError, "5 tokens have no room; there is room for 5", dispatch)


def check_rows_without_room_in_the_heap_are_moved():
    dispatch, driver, stream, told = exact_dispatch()
    held = [dispatch() for _ in range(2)]  # all that the heap has room for
    for n in (1, 3, 2):
        told[4:] = n, 4 - n, n, 4 - n
        launched, _ = since(driver, lambda: held.append(dispatch()))
        assert [name for name, *_ in launched] == ["rows_dispatch", "rows_move"]
    assert not driver.waited_for
