"""What calls launch and cost, and how they fail: ExpertParallel, and the rows functions. counted_rounds.py runs this."""

import contextlib
import threading
import weakref

import numpy as np
from counted_driver import FakeDtype, FakeTensor, bfloat16, counted_machine, float32, int32, int64
from counted_rounds import a_round, fails, since
from host_cost import OneRankHere, at_hand, python_calls, tensors, without_python

from epmoe import EPConfig, EPError, EPStateError, EPValueError, ExpertParallel, LocalWorld, device, fused_a2a
from epmoe.fused_a2a import buffers

BUFFERS = buffers.buffer_of, buffers.hybrid_ep_buffer
MOST_PYTHON_CALLS = {"dispatch": 16, "combine": 15}  # looks at tensors among them
MOST_OF_ROWS = {"dispatch": 29, "combine": 17, "cached": 16, "by expert": 23, "sums": 17}


def check_a_round_is_short_and_launches_only():
    """Whatever arrays it is given: the first two rounds make the plans."""
    with at_hand(does_nothing=True) as (ep, driver, _):
        for i in range(2):
            a_round(ep, *tensors(0x10000 * (1 + i)))
        for i in range(3):
            x, ids, weights = tensors(0x100000 * (1 + i))
            n_dispatch, _, d = python_calls(ep.dispatch, x, ids)
            y = d.output_tokens
            n_combine, _, _ = python_calls(ep.combine, y, d, weights)
            for name, n in ("dispatch", n_dispatch), ("combine", n_combine):
                assert n <= MOST_PYTHON_CALLS[name], (name, n)
            del d, y, _  # whose memory is lent again
    with at_hand(rounds=2) as (ep, driver, _):
        launched, calls = since(driver, lambda: a_round(ep, *tensors(0x900000)))
        assert [name for name, *_ in launched] == ["dispatch", "combine"] and calls == [], calls
        assert 0x900000 in launched[0][4] and 0x902000 in launched[1][4], "passed by value"


def check_wrong_arguments_are_refused_also_where_there_is_a_plan():
    with at_hand(rounds=3) as (ep, driver, (x, ids, weights)):
        here = x.data_ptr()
        for wrong, said in [
            (FakeTensor(here, (4, 64), float32), "float32"),
            (FakeTensor(here, (4, 32), bfloat16), "hidden=64"),
            (FakeTensor(here, (5, 64), bfloat16), "5 tokens"),
            (FakeTensor(here, (3, 64), bfloat16), "num_tokens=3"),
            (FakeTensor(here, (4, 64), bfloat16, stride=(128, 1)), "C-contiguous"),
            (FakeTensor(here, (4, 64), bfloat16, device_index=1), "GPU 1"),
            (FakeTensor(here + 2, (4, 64), bfloat16), "no multiple of 16"),
        ]:
            fails(EPValueError, said, ep.dispatch, wrong, ids)
        for scale in (True, 0.0, "1.0", float("nan")):
            fails(EPValueError, "input_scale", ep.dispatch, x, ids, scale)
        d = ep.dispatch(x, ids)
        y = d.output_tokens
        fails(EPStateError, "combine it first", ep.dispatch, x, ids)
        wrong = FakeTensor(weights.data_ptr(), (4, 8), int32)
        fails(EPValueError, "float32", ep.combine, y, d, wrong)
        fails(EPValueError, "no function", ep.combine, y, d, weights, router_weights_args=(1,))
        fails(EPValueError, "epilogue", ep.combine, y, d, None, lambda token, col, value: value)
        fails(EPValueError, "a NoneType", ep.combine, y, None, weights)
        ep.combine(y, d, weights)
        fails(EPStateError, "no dispatch is open", ep.combine, y, d, weights)
        new = ep.dispatch(x, ids)
        fails(EPValueError, "another round", ep.combine, y, d, weights)
        ep.combine(new.output_tokens, new, weights)


def check_arguments_of_functions_are_read_where_they_lie():
    def epilogue(token, col, value, factors):
        return value * factors[token]

    with at_hand() as (ep, driver, (x, ids, weights)):
        d = ep.dispatch(x, ids)
        y = d.output_tokens
        for wrong, said in [
            (FakeTensor(0x90000, (4,), float32, stride=(2,)), "C-contiguous"),
            (FakeTensor(0x90000, (4,), float32, device_index=1), "GPU 1"),
        ]:
            fails(EPValueError, said, ep.combine, y, d, weights, epilogue, (wrong,))
        of_any_address = FakeTensor(0x90004, (4,), float32)
        launched, _ = since(driver, lambda: ep.combine(y, d, weights, epilogue, (of_any_address,)))
        assert launched[0][4][-2:] == (0x90004, 4)


def check_changed_options_give_other_results():
    def epilogue(token, col, value):
        return value

    with at_hand() as (ep, driver, (x, ids, weights)):
        into = FakeTensor(0x90000, (4, 64), bfloat16)
        for _ in range(3):
            assert a_round(ep, x, ids, weights, out=into) is into
            assert a_round(ep, x, ids, None).shape == (4, 8, 64)
            assert a_round(ep, x, ids, lambda token, k: 0.5).shape == (4, 64)
            assert a_round(ep, x, ids, weights).shape == (4, 64)
            assert a_round(ep, x, ids, weights, epilogue=epilogue).shape == (4, 64)
        short = FakeTensor(0x90000, (3, 64), bfloat16)
        fails(EPValueError, "out: output_tokens", a_round, ep, x, ids, weights, out=short)


def check_places_that_somebody_has_changed_are_refused():
    """src_info of a round, replaced behind the dispatch: its combine says so, and takes the right one."""
    with at_hand() as (ep, driver, (x, ids, weights)):
        y = FakeTensor(0x90000, (ep.capacity, 64), bfloat16)
        for _ in range(3):
            ep.combine(y, ep.dispatch(x, ids), weights)
        d = ep.dispatch(x, ids)
        right, d.src_info = d.src_info, FakeTensor(0xA0000, (ep.capacity, 2), int32)
        driver.launches.clear()
        said = "src_info of the Dispatched of rank 0 is another array"
        fails(EPValueError, said, ep.combine, y, d, weights)
        assert not driver.launches
        d.src_info = right
        ep.combine(y, d, weights)


def check_split_kernels_launch_only():
    with at_hand(rounds=3, fused=False) as (ep, driver, (x, ids, weights)):
        launched, calls = since(driver, lambda: a_round(ep, x, ids, weights))
        names = ["dispatch_async", "dispatch_wait", "combine_async", "combine_wait"]
        assert [name for name, *_ in launched] == names and not calls


def check_a_failed_launch_needs_reset():
    with at_hand(rounds=3) as (ep, driver, (x, ids, weights)):
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

    def backward():  # of torch's autograd, say: on the default stream, in a thread of its own
        try:
            per_rank = [tensors(at) for at in (0x10000, 0x20000)]
            x, ids, weights = (list(of_ranks) for of_ranks in zip(*per_rank))
            dispatched = ep.dispatch(x, ids)
            ep.combine([d.output_tokens for d in dispatched], dispatched, weights)
        except Exception as e:
            failed.append(e)

    with ExpertParallel(EPConfig(2, 16, 8, 64, 4), LocalWorld(2)) as ep:
        for _ in range(3):
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            # another thread may get the number of one that has ended
            driver.threads = {threading.get_ident()}
    assert not failed, failed


def _rows(world):
    """{name: a call}; each dispatch lets go of the results before it."""
    held, dense = {}, (4, 16)
    x, ids, probs = tensors(ids_dtype=int64)
    y = FakeTensor(0x50000, (8, 64), bfloat16)
    chosen = FakeTensor(0x60000, dense, FakeDtype("bool"))
    of_all = FakeTensor(0x70000, dense, float32)
    z = FakeTensor(0x80000, (64, 64), bfloat16)

    def dispatch():
        held["rows"] = fused_a2a.fused_dispatch_on_device(x, ids, probs, 16, world)[-1]

    def combine():
        held["ctx"] = fused_a2a.Context()
        fused_a2a.FusedCombine.forward(held["ctx"], y, world, held["rows"])

    def by_expert():
        held["experts"] = fused_a2a.hybrid_ep_dispatch(x, chosen, of_all, world, 8, num_permuted_tokens=64)[-1]

    return {
        "dispatch": dispatch,
        "combine": combine,
        "cached": lambda: fused_a2a.FusedCombine.backward(held["ctx"], x),
        "by expert": by_expert,
        "sums": lambda: fused_a2a.hybrid_ep_combine(z, held["experts"]),
    }


@contextlib.contextmanager
def _rows_world(rounds=2, does_nothing=False):
    """(world, driver, calls of _rows that have been made so often); its Buffers are closed behind it."""
    machine, driver = counted_machine(2, 0)
    world = OneRankHere(machine, 2)
    if does_nothing:
        without_python(driver)
    for of in BUFFERS:
        of(world).want_tokens(4)  # as an earlier batch would have told
    calls = _rows(world)
    for call in rounds * list(calls.values()):  # in the first calls memory grows
        call()
    yield world, driver, calls
    calls.clear()
    for of in BUFFERS:
        of(world).close()


def check_calls_of_rows_launch_only():
    with _rows_world() as (world, driver, calls):
        for name, call in calls.items():
            launched, made = since(driver, call)
            assert len(launched) == 1 and made == [], (name, launched, made)


def check_calls_of_rows_are_short():
    with _rows_world(does_nothing=True) as (world, driver, calls):
        for name, call in calls.items():
            n, _, _ = python_calls(call)
            assert n <= MOST_OF_ROWS[name], (name, n)


def check_misaligned_arrays_of_rows_are_refused_also_where_there_is_a_plan():
    with _rows_world() as (world, driver, calls):
        x, ids, probs = tensors(ids_dtype=int64)
        apart = FakeTensor(x.data_ptr() + 8, (4, 64), bfloat16)
        handle = fused_a2a.fused_dispatch_on_device(x, ids, probs, 16, world)[-1]
        said = "no multiple of 16"
        dispatch = fused_a2a.fused_dispatch_on_device
        for _ in range(2):
            fails(EPValueError, said, dispatch, apart, ids, probs, 16, world)
            fails(EPValueError, said, fused_a2a.fused_combine, apart, world, handle)
            calls["dispatch"]()


def check_a_failed_launch_of_rows_needs_reset():
    with _rows_world() as (world, driver, calls):
        for name, of in zip(("dispatch", "by expert"), BUFFERS):
            driver.launch_result = driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
            fails(EPError, "CUDA", calls[name])
            driver.launch_result = driver.CUresult.CUDA_SUCCESS
            for _ in range(2):
                fails(EPStateError, f"call {of(world).remedy} on all ranks first", calls[name])
            of(world).reset()
            calls[name]()


def check_arrays_in_host_memory_are_staged():
    """Also ids that need no conversion: a copy on the GPU is what kernels are told of."""
    machine, driver = counted_machine(2, None)
    device.machine = lambda n_ranks, **_: machine
    world = LocalWorld(2)
    x = [np.ones((n, 16), np.float32) for n in (4, 3)]
    probs = [np.ones((n, 1), np.float32) for n in (4, 3)]
    for ids_type in (np.int64, np.int32):
        ids = [np.full((n, 1), 3, ids_type) for n in (4, 3)]
        for _ in range(2):
            given = x, ids, probs, 4, world
            launched, _ = since(driver, lambda: fused_a2a.fused_dispatch_on_device(*given))
            assert [name for name, *_ in launched] == ["rows_dispatch"] * 2, launched
            for _, _, _, _, words, n, _ in launched:
                staged = [w for w in words if any(a == w for a, _ in driver.allocated())]
                copies = [driver.memory_at(w)[: 4 * n].view(np.int32) for w in staged]
                assert any((one == 3).any() for one in copies), "ids are on the GPU"
    buffers.buffer_of(world).close(collective=False)


def check_a_closed_buffer_keeps_nothing_of_the_caller():
    """Else its memory is freed when somebody finds the Buffer to be garbage, in the middle of something."""
    with _rows_world(rounds=1) as (world, driver, calls):
        given = [
            weakref.ref(cell.cell_contents)
            for cell in calls["dispatch"].__closure__
            if isinstance(cell.cell_contents, FakeTensor)
        ]
        calls.clear()
        for of in BUFFERS:
            of(world).close()
        assert given and not any(ref() is not None for ref in given)
