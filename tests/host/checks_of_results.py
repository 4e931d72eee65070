"""Whose memory results are in: given again when nobody looks at it, and also where the host waits for their number.

`python checks_of_results.py check_...`; test_host_cost.py runs all of them.
"""

import ctypes
import sys

import numpy as np
from counted_driver import counted_machine, int64
from counted_rounds import a_round, since
from host_cost import OneRankHere, at_hand, tensors

from epmoe import fused_a2a


def check_results_go_where_nobody_looks():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        held = [a_round(ep, x, ids, weights) for _ in range(5)]
        assert len({a.address for a in held}) == 5
        d = ep.dispatch(x, ids)
        addresses = d.output_tokens.address, d.src_info.address
        ep.combine(d.output_tokens, d, weights)
        again = ep.dispatch(x, ids)
        assert (again.output_tokens.address, again.src_info.address) != addresses, (
            "d is still looked at"
        )
        assert (
            again.topk_ids.shape == (4, 8)
            and d.row_offsets is d.row_offsets
            and d.output_scales is None
        )
        ep.combine(again.output_tokens, again, weights)


def check_a_result_comes_again_when_nobody_looks_at_it():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(6):
            a_round(ep, x, ids, weights)
        out = a_round(ep, x, ids, weights)
        out.marked = True
        del out
        assert any(hasattr(a_round(ep, x, ids, weights), "marked") for _ in range(2)), (
            "it was made anew"
        )
        out = a_round(ep, x, ids, weights)
        some, address = out.first(2), out.address
        del out
        others = [a_round(ep, x, ids, weights).address for _ in range(4)]
        assert address not in others, "its first tokens are still looked at"
        del some
        pool = ep._engine.ranks[0].reduced_pool
        n_made = len(pool._made)
        for n in (4, 3, 2, 1) * 3:
            a_round(ep, *tensors(n=n))
        assert len(pool._made) == n_made, "what is kept for a call is given back for others"


def check_arrays_of_a_dispatch_come_again_when_nobody_looks_at_them():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(6):
            a_round(ep, x, ids, weights)

        def looked_at(name):
            """The array of that name of a Dispatched that is forgotten."""
            d = ep.dispatch(x, ids)
            array = getattr(d, name)
            assert d.output_scales is None and d.n_rows >= 0
            ep.combine(d.output_tokens, d, weights)
            return array

        for name in ("output_tokens", "src_info"):
            looked_at(name).marked = True
            held = looked_at(name)
            assert held.marked, "it was made anew"
            others = [looked_at(name) for _ in range(4)]
            assert held.address not in [one.address for one in others], "it is still looked at"
            some = others.pop().first(2)
            address = some.address
            del others
            assert address not in [looked_at(name).address for _ in range(4)], (
                "its first rows are still looked at"
            )
            del held, some
        for _ in range(3):
            d = ep.dispatch(x, ids)
            assert d.offsets is None, "what an earlier round counted"
            d.marked, mine = True, d.output_tokens
            ep.combine(mine, d, weights)
            del d
            d = ep.dispatch(x, ids)
            assert not hasattr(d, "marked") and d.output_tokens is not mine
            ep.combine(d.output_tokens, d, weights)


def exact_dispatch():
    """(function that makes a fused_dispatch of 2 ranks, 4 rows from each to each; driver; its stream; the words told).

    The words are what the kernel would have told: has room, padded rows, tokens of each rank, rows [R, R], by expert.
    """
    machine, driver = counted_machine(2, 0)
    world, copy = OneRankHere(machine, 2), driver.cuMemcpyDtoHAsync
    told, by_expert = np.array([0, 0, 4, 4, 2, 2, 2, 2], np.int32), np.arange(8, dtype=np.int64)

    def told_by_the_kernel(to, source, nbytes, stream):
        if nbytes == 64:  # status words
            ctypes.memset(source, 0, nbytes)
        else:
            ctypes.memmove(source, told.ctypes.data, told.nbytes)
            ctypes.memmove(source + 256, by_expert.ctypes.data, by_expert.nbytes)
        return copy(to, source, nbytes, stream)

    driver.cuMemcpyDtoHAsync = told_by_the_kernel
    given = tensors(ids_dtype=int64)

    def dispatch():
        return fused_a2a.fused_dispatch(*given, 16, world)

    dispatch()  # there was no room before
    told[0] = 1
    return dispatch, driver, machine.streams[0], told


def check_a_dispatch_that_the_host_waits_for_waits_once():
    dispatch, driver, stream, told = exact_dispatch()
    for _ in range(4):
        dispatch()
    gap = dispatch()[-1].loans[0].address("info") + told.nbytes
    n = 256 - told.nbytes
    assert ctypes.string_at(gap, n) == bytes(n), "copied, and never written"
    assert {s for nbytes, s in driver.fills if nbytes == n} == {int(stream.handle)}, (
        "what is queued may still read it"
    )
    driver.native_calls.clear()
    launched, calls = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch"]
    assert driver.native_calls == ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuLaunchKernel"]
    assert calls == 2 * ["cuMemcpyDtoHAsync"] + ["cuStreamSynchronize"], calls
    assert driver.waited_for == {int(stream.handle)}


def check_rows_that_somebody_holds_are_not_received_into():
    dispatch, driver, _, told = exact_dispatch()
    for _ in range(4):
        dispatch()
    x, ids, probs, by_expert, handle = dispatch()
    assert (
        x.shape == (4, 64)
        and ids.shape == probs.shape == (4, 8)
        and by_expert.tolist() == list(range(8))
    )
    assert handle.counts.tolist() == [[2, 2], [2, 2]] and handle.num_rows == [4]
    at, info = x.address, handle.loans[0].address("info")
    del ids, probs, by_expert, handle
    told[4:] = 1, 3, 1, 3
    other = dispatch()
    assert (
        other[0].address != at
        and other[0].shape == (2, 64)
        and other[-1].counts.tolist() == [[1, 3], [1, 3]]
    )
    handle = other[-1]
    del x, other
    held = handle.loans[0].address("info")
    assert all(dispatch()[-1].loans[0].address("info") != held for _ in range(4))
    del handle
    assert dispatch()[-1].loans[0].address("info") in (held, info)
    told[0] = 0  # no room, on any rank
    launched, _ = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch", "rows_resend"], launched


def check_rows_without_room_in_the_heap_are_moved_by_a_known_launch():
    """The dispatch before the wait and the move behind it start again, whatever number of rows there is."""
    dispatch, driver, stream, told = exact_dispatch()
    held = [dispatch() for _ in range(2)]  # all that the heap has room for
    for n in (1, 3, 2, 1, 3, 2):
        told[4:] = n, 4 - n, n, 4 - n
        held.append(dispatch())
    del held[-2:]
    driver.native_calls.clear()
    launched, calls = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch", "rows_move"]
    starts = ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuLaunchKernel"]
    assert [name for name in driver.native_calls if name != "cuMemcpyHtoDAsync"] == 2 * starts
    assert calls == 2 * ["cuMemcpyDtoHAsync"] + ["cuStreamSynchronize"], calls
    assert driver.waited_for == {int(stream.handle)}


if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, flush=True)
        globals()[check]()
