"""Checks of the calls' fast way on a GPU, each a process of its own: `python host_cost_checks.py check_...`.

test_host_cost.py runs them all.
"""

import ctypes
import sys
import threading

from counted_driver import FakeTensor, bfloat16, counted_machine, float32, int32, int64
from host_cost import STREAM, OneRankHere, at_hand, python_calls, tensors

import numpy as np
from epmoe import EPConfig, EPStateError, EPValueError, ExpertParallel, LocalWorld, device, fused_a2a

MOST_PYTHON_CALLS = {"dispatch": 18, "combine": 19}     # of Python functions, the tensors' own among them


def fails(error, said, function, *args, **options):
    try:
        function(*args, **options)
    except error as e:
        assert said in str(e), e
        return
    raise AssertionError(f"no {error.__name__} that says {said}")


def a_round(ep, x, ids, weights, **options):
    """A round whose experts are the identity: the combined output."""
    d = ep.dispatch(x, ids)
    return ep.combine(d.output_tokens, d, weights, **options)


def since(driver, function):
    """(what was launched by a function, names of the other driver calls)."""
    driver.launches.clear()
    driver.calls.clear()
    driver.waited_for.clear()
    driver.copied_on.clear()
    function()
    return list(driver.launches), list(driver.calls)


def check_a_steady_round_is_short():
    for layers in (1, 4):       # of which each looks up what the one has at hand
        with at_hand(does_nothing=True) as (ep, driver, _):
            given = [tensors(0x10000 * (1 + i)) for i in range(layers)]
            for x, ids, weights in 6 * given:
                a_round(ep, x, ids, weights)
            for x, ids, weights in 3 * given:
                n_dispatch, _, d = python_calls(ep.dispatch, x, ids)
                y = d.output_tokens
                n_combine, _, out = python_calls(ep.combine, y, d, weights)
                assert n_dispatch <= MOST_PYTHON_CALLS["dispatch"] + (layers > 1), n_dispatch
                assert n_combine <= MOST_PYTHON_CALLS["combine"] + (layers > 1), n_combine
                del d, y, out


def check_a_steady_round_launches_only():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(4):
            a_round(ep, x, ids, weights)
        driver.native_calls.clear()
        launched, calls = since(driver, lambda: a_round(ep, x, ids, weights))
        assert [name for name, *_ in launched] == ["dispatch", "combine"] and calls == [], (launched, calls)
        assert driver.native_calls == 2 * ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuLaunchKernel"]


def check_launches_with_attributes_start_again():
    machine, driver = counted_machine(1, 0)
    kernel = device.kernel(max_threads=64)(lambda params, num_tokens, my_rank: None)
    with machine.recording() as launches:
        machine.launch(kernel, 1, 64, (1, 2, 3), stream=machine.stream(), cooperative=True)
        machine.launch(kernel, 2, 32, (4, 5, 6), stream=machine.stream(handle=STREAM))
    driver.launches.clear()
    assert machine.again(launches)() == 0
    assert driver.native_calls[-2:] == ["cuLaunchKernelEx", "cuLaunchKernel"]
    assert [launch[1:] for launch in driver.launches] == [(2, 32, STREAM, 4, 5, 6)]


def check_the_fast_way_launches_what_the_general_way_launches():
    for ids_dtype, names in ((int32, ["dispatch", "combine"]), (int64, ["narrow_ids", "dispatch", "combine"])):
        seen = []
        for fast in (True, False):
            with at_hand() as (ep, driver, _):
                x, ids, weights = tensors(ids_dtype=ids_dtype)
                ep._steady.applies = fast
                rounds = [since(driver, lambda: a_round(ep, x, ids, weights)) for _ in range(4)]
                relative = [[(name, grid, block, stream, n, rank, words_at(ep, driver, params))
                             for name, grid, block, stream, params, n, rank in launched] for launched, _ in rounds]
                assert [name for name, *_ in relative[-1]] == names
                assert all(stream == STREAM for _, _, _, stream, *_ in relative[-1])
                assert not rounds[-1][1], rounds[-1][1]
                seen.append(relative)
        assert seen[0] == seen[1]


def words_at(ep, driver, params, n=None):
    """n words of the parameter block at an address, those of an allocation made comparable between processes."""
    raw = driver.memory_at(params).view(np.uint64)[:n]
    bases = sorted(driver.allocated())
    places = []
    for word in raw.tolist():
        inside = [i for i, (start, nbytes) in enumerate(bases) if start <= word < start + nbytes]
        places.append((bases[inside[0]][1], word - bases[inside[0]][0]) if inside else word)
    return places


def check_layers_in_turn_launch_only():
    with at_hand() as (ep, driver, _):
        layers = [tensors(0x10000 * (1 + i)) for i in range(4)]

        def step():
            for x, ids, weights in layers:
                a_round(ep, x, ids, weights)

        for _ in range(3):
            step()
        driver.native_calls.clear()
        launched, calls = since(driver, step)
        assert [name for name, *_ in launched] == 4 * ["dispatch", "combine"] and calls == [], (launched, calls)
        assert driver.native_calls == 8 * ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuLaunchKernel"]


def check_arrays_that_are_new_cost_one_copy_on_the_calls_own_stream():
    with at_hand() as (ep, driver, _):
        for i in range(8):
            a_round(ep, *tensors(0x10000 * (1 + i)))
        driver.native_calls.clear()
        allocated = len(driver.allocated())
        launched, calls = since(driver, lambda: any(a_round(ep, *tensors(0x10000 * (9 + i))) is None for i in range(3)))
        assert calls == 6 * ["cuMemcpyHtoDAsync"] and len(launched) == 6, calls
        assert driver.native_calls == 6 * ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuMemcpyHtoDAsync",
                                           "cuLaunchKernel"]
        assert driver.copied_on == {STREAM} and len(driver.allocated()) == allocated
        fails(EPValueError, "no multiple of 16", ep.dispatch, FakeTensor(0x200002, (4, 64), bfloat16), tensors()[1])


def check_launches_for_new_arrays_are_those_of_the_general_way():
    seen = []
    for fast in (True, False):
        with at_hand() as (ep, driver, _):
            ep._steady.applies = fast
            launched = []
            for i, (x, ids, weights, options) in enumerate(_many_calls(120)):
                d = ep.dispatch(x, ids)
                y = FakeTensor(0x900000 + 0x10000 * (i % 7), (ep.capacity, 64), bfloat16) if i % 3 else d.output_tokens
                ep.combine(y, d, weights, **options)
                for *launch, params, n, rank in driver.launches:
                    launched.append((*launch, n, rank, words_at(ep, driver, params, 40)))
                driver.launches.clear()
                del d, y
            seen.append(launched)
            if fast:
                assert sum(len(starts) for starts in ep._steady._dispatches.values()) > 16
                assert driver.native_calls.count("cuMemcpyHtoDAsync") > 120, "all took the general way"
    assert len(seen[0]) == len(seen[1])
    for (*one, words), (*other, theirs) in zip(*seen):
        assert one == other and words[:len(theirs)] == theirs, (one, words, other, theirs)


def _many_calls(n):
    """(x, ids, weights, options) of calls on arrays that lie anywhere."""
    rng = np.random.default_rng(1)
    into = FakeTensor(0xB00000, (4, 64), bfloat16)
    for i in range(n):
        at = [0x1000000 + 16 * int(rng.integers(1 << 20)) for _ in range(3)]
        x, ids, weights = FakeTensor(at[0], (4, 64), bfloat16), FakeTensor(at[1], (4, 8), int32), FakeTensor(
            at[2], (4, 8), float32)
        yield x, ids, None if i % 5 == 4 else weights, {"out": into} if i % 5 == 2 else {}


def check_new_arrays_in_a_thread_without_a_context_and_before_a_capture():
    with at_hand() as (ep, driver, _):
        def a_round_at(address):
            x, ids, weights = tensors(address)
            d = ep.dispatch(x, ids)
            ep.combine(FakeTensor(address + 0x8000, (ep.capacity, 64), bfloat16), d, weights)

        for i in range(8):
            a_round_at(0x10000 * (1 + i))
        failed = []

        def backward():
            try:
                a_round_at(0x200000)
            except Exception as e:
                failed.append(e)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not failed, failed
        driver.native_calls.clear()
        driver.capture = 5                  # nothing is copied into memory that calls take in turn
        a_round_at(0x300000)
        assert "cuMemcpyHtoDAsync" not in driver.native_calls and "cuLaunchKernel" not in driver.native_calls
        driver.capture = 0
        for i in range(4):                  # results lie elsewhere since, which is to be learned first
            driver.native_calls.clear()
            a_round_at(0x400000 + 0x10000 * i)
        assert driver.native_calls.count("cuMemcpyHtoDAsync") == 2


def check_launches_on_another_stream_are_not_made_of_earlier_ones():
    machine, driver = counted_machine(1, 0)
    kernel = device.kernel(max_threads=64)(lambda params, num_tokens, my_rank: None)
    streams, block = [machine.stream(handle=handle) for handle in (STREAM, STREAM + 1)], np.zeros(3, np.uint64)

    def flat(*on):
        with machine.recording() as launches:
            for stream in on:
                machine.launch(kernel, 1, 64, (1, 2, 3), stream=stream)
        return machine.flat(launches, len(on) * [block])

    slots = machine.slots(2, flat(streams[0]))
    assert slots.serve(flat(streams[0], streams[0])) and not slots.serve(flat(streams[1])) and flat(*streams) is None


def check_memory_for_parameters_is_used_again_and_its_calls_forgotten():
    from epmoe.host import elsewhere

    elsewhere.N_SLOTS = 4
    with at_hand() as (ep, driver, _):
        layers = [tensors(0x10000 * (1 + i)) for i in range(9)]
        for _ in range(4):
            for x, ids, weights in layers:
                driver.launches.clear()
                d = ep.dispatch(x, ids)
                (_, _, _, _, params, *_), = driver.launches
                assert x.data_ptr() in driver.memory_at(params).view(np.uint64)[:24], "parameters of another call"
                ep.combine(d.output_tokens, d, weights)
                del d
        slots = [slot for starts in ep._steady._dispatches.values() for _, slot in starts.values() if slot is not None]
        assert 0 < len(slots) <= 4


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
        assert (again.output_tokens.address, again.src_info.address) != addresses, "d is still looked at"
        assert again.topk_ids.shape == (4, 8) and d.row_offsets is d.row_offsets and d.output_scales is None
        ep.combine(again.output_tokens, again, weights)


def check_a_result_comes_again_when_nobody_looks_at_it():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(6):
            a_round(ep, x, ids, weights)
        out = a_round(ep, x, ids, weights)
        out.marked = True
        del out
        assert any(hasattr(a_round(ep, x, ids, weights), "marked") for _ in range(2)), "it was made anew"
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
            assert address not in [looked_at(name).address for _ in range(4)], "its first rows are still looked at"
            del held, some
        for _ in range(3):
            d = ep.dispatch(x, ids)
            assert d.offsets is None, "what an earlier round counted"
            d.src_info, d.marked, mine = mine_of(ep, d), True, d.output_tokens
            ep.combine(mine, d, weights)
            del d
            d = ep.dispatch(x, ids)
            assert not hasattr(d, "marked") and d.output_tokens is not mine and d.src_info.address != 0xA0000
            ep.combine(d.output_tokens, d, weights)


def exact_dispatch():
    """(function that makes a fused_dispatch of 2 ranks, 4 rows from each to each; driver; its stream; the words told).

    The words are what the kernel would have told: has room, padded rows, tokens of each rank, rows [R, R], by expert.
    """
    machine, driver = counted_machine(2, 0)
    world, copy = OneRankHere(machine, 2), driver.cuMemcpyDtoHAsync
    told, by_expert = np.array([0, 0, 4, 4, 2, 2, 2, 2], np.int32), np.arange(8, dtype=np.int64)

    def told_by_the_kernel(to, source, nbytes, stream):
        if nbytes == 64:                # status words
            ctypes.memset(source, 0, nbytes)
        else:
            ctypes.memmove(source, told.ctypes.data, told.nbytes)
            ctypes.memmove(source + 256, by_expert.ctypes.data, by_expert.nbytes)
        return copy(to, source, nbytes, stream)

    driver.cuMemcpyDtoHAsync = told_by_the_kernel
    given = tensors(ids_dtype=int64)

    def dispatch():
        return fused_a2a.fused_dispatch(*given, 16, world)

    dispatch()                          # there was no room before
    told[0] = 1
    return dispatch, driver, machine.streams[0], told


def check_a_dispatch_that_the_host_waits_for_waits_once():
    dispatch, driver, stream, told = exact_dispatch()
    for _ in range(4):
        dispatch()
    gap = dispatch()[-1].loans[0].address("info") + told.nbytes
    n = 256 - told.nbytes
    assert ctypes.string_at(gap, n) == bytes(n), "copied, and never written"
    assert {s for nbytes, s in driver.fills if nbytes == n} == {int(stream.handle)}, "what is queued may still read it"
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
    assert x.shape == (4, 64) and ids.shape == probs.shape == (4, 8) and by_expert.tolist() == list(range(8))
    assert handle.counts.tolist() == [[2, 2], [2, 2]] and handle.num_rows == [4]
    at, info = x.address, handle.loans[0].address("info")
    del ids, probs, by_expert, handle
    told[4:] = 1, 3, 1, 3
    other = dispatch()
    assert other[0].address != at and other[0].shape == (2, 64) and other[-1].counts.tolist() == [[1, 3], [1, 3]]
    handle = other[-1]
    del x, other
    held = handle.loans[0].address("info")
    assert all(dispatch()[-1].loans[0].address("info") != held for _ in range(4))
    del handle
    assert dispatch()[-1].loans[0].address("info") in (held, info)
    told[0] = 0                         # no room, on any rank
    launched, _ = since(driver, dispatch)
    assert [name for name, *_ in launched] == ["rows_dispatch", "rows_resend"], launched


def mine_of(ep, d):
    """An array like src_info that is the caller's."""
    return FakeTensor(0xA0000, d.src_info.shape, int32)


def check_new_and_changed_arguments_are_checked():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        here = x.data_ptr()
        for wrong, said in [(FakeTensor(here, (4, 64), float32), "float32"),
                            (FakeTensor(here, (4, 32), bfloat16), "hidden=64"),
                            (FakeTensor(here, (5, 64), bfloat16), "5 tokens"),
                            (FakeTensor(here, (3, 64), bfloat16), "num_tokens=3"),
                            (FakeTensor(here, (4, 64), bfloat16, stride=(128, 1)), "C-contiguous"),
                            (FakeTensor(here, (4, 64), bfloat16, device_index=1), "GPU 1"),
                            (FakeTensor(here + 2, (4, 64), bfloat16), "no multiple of 16")]:
            fails(EPValueError, said, ep.dispatch, wrong, ids)
        for scale in (True, 0.0, "1.0", float("nan")):
            fails(EPValueError, "input_scale", ep.dispatch, x, ids, scale)
        d = ep.dispatch(x, ids)
        y = d.output_tokens
        fails(EPStateError, "combine it first", ep.dispatch, x, ids)
        fails(EPValueError, "float32", ep.combine, y, d, FakeTensor(weights.data_ptr(), (4, 8), int32))
        fails(EPValueError, "no function", ep.combine, y, d, weights, router_weights_args=(1,))
        fails(EPValueError, "epilogue", ep.combine, y, d, None, lambda token, col, value: value)
        fails(EPValueError, "a NoneType", ep.combine, y, None, weights)
        ep.combine(y, d, weights)
        fails(EPStateError, "no dispatch is open", ep.combine, y, d, weights)
        new = ep.dispatch(x, ids)
        fails(EPValueError, "another round", ep.combine, y, d, weights)
        ep.combine(new.output_tokens, new, weights)


def check_changed_options_launch_anew():
    def epilogue(token, col, value):
        return value

    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        into = FakeTensor(0x90000, (4, 64), bfloat16)
        for _ in range(3):
            assert a_round(ep, x, ids, weights, out=into) is into
            assert a_round(ep, x, ids, None).shape == (4, 8, 64)
            assert a_round(ep, x, ids, weights).shape == (4, 64)
            assert a_round(ep, x, ids, weights, epilogue=epilogue).shape == (4, 64)
        short = FakeTensor(0x90000, (3, 64), bfloat16)
        fails(EPValueError, "out: output_tokens", a_round, ep, x, ids, weights, out=short)


def check_split_kernels_are_remembered_too():
    with at_hand(fused=False) as (ep, driver, (x, ids, weights)):
        for _ in range(4):
            a_round(ep, x, ids, weights)
        driver.native_calls.clear()
        launched, calls = since(driver, lambda: a_round(ep, x, ids, weights))
        names = ["dispatch_async", "dispatch_wait", "combine_async", "combine_wait"]
        assert [name for name, *_ in launched] == names and not calls
        assert driver.native_calls == 2 * ["cuStreamIsCapturing", "cuCtxGetCurrent", *2 * ["cuLaunchKernel"]]


def check_memory_that_was_freed_is_forgotten():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        for call in ep._engine._calls.values():
            call.close()
        launched, _ = since(driver, lambda: a_round(ep, x, ids, weights))
        assert all(driver.memory_at(params) is not None for _, _, _, _, params, _, _ in launched)


def check_a_failed_launch_needs_reset():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        driver.launch_result = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        fails(Exception, "CUDA", ep.dispatch, x, ids)
        driver.launch_result = driver.CUresult.CUDA_SUCCESS
        fails(EPStateError, "reset()", ep.dispatch, x, ids)
        ep.reset()
        a_round(ep, x, ids, weights)


def check_a_thread_without_a_context_may_call():
    machine, driver = counted_machine(2, None)
    device.machine = lambda n_ranks, **_: machine
    failed = []

    def backward():                     # of torch's autograd, say: on the default stream, in a thread of its own
        try:
            per_rank = [tensors(at) for at in (0x10000, 0x20000)]
            x, ids, weights = (list(of_ranks) for of_ranks in zip(*per_rank))
            dispatched = ep.dispatch(x, ids)
            ep.combine([d.output_tokens for d in dispatched], dispatched, weights)
        except Exception as e:
            failed.append(e)

    with ExpertParallel(EPConfig(2, 16, 8, 64, 4), LocalWorld(2)) as ep:
        for _ in range(3):              # the first, general ones, and then steady ones
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            driver.threads = {threading.get_ident()}        # another thread may get the number of one that has ended
    assert not failed, failed


def check_captured_results_stay_lent():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
        driver.capture = 5
        d = ep.dispatch(x, ids)
        out = ep.combine(d.output_tokens, d, weights)
        captured = {d.output_tokens.address, out.address}
        del d, out
        driver.capture = 0
        for _ in range(4):
            d = ep.dispatch(x, ids)
            out = ep.combine(d.output_tokens, d, weights)
            assert not captured & {d.output_tokens.address, out.address}


def check_a_capture_needs_no_earlier_round_and_never_waits():
    with at_hand() as (ep, driver, (x, ids, weights)):
        driver.capture = 5
        _, calls = since(driver, lambda: a_round(ep, *tensors(ids_dtype=int64)))
        # only the copies of parameters, on a stream of their own
        assert driver.waited_for == {int(ep.world.machine.copies)}, driver.waited_for
        driver.capture = 0


def check_rounds_are_captured_whole():
    with at_hand() as (ep, driver, (x, ids, weights)):
        d = ep.dispatch(x, ids)
        driver.capture = 5
        fails(EPStateError, "was launched and not captured", ep.combine, d.output_tokens, d, weights)
        fails(EPStateError, "before the capture begins", ep.dispatch, x, ids)
        driver.capture = 0
        ep.combine(d.output_tokens, d, weights)
        driver.capture = 6
        d = ep.dispatch(x, ids)
        fails(EPStateError, "nothing has run yet", lambda: d.n_rows)
        fails(EPValueError, "host memory", ep.combine, d.output_tokens, d, np.zeros((4, 8), np.float32))
        driver.capture = 0
        fails(EPStateError, "capture its combine too", ep.combine, d.output_tokens, d, weights)
        driver.capture = 7                                  # a graph for dispatch, another for combine
        ep.combine(d.output_tokens, d, weights)
        ep.dispatch(x, ids)
        driver.capture = 0                                  # that capture was given up
        a_round(ep, x, ids, weights)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
