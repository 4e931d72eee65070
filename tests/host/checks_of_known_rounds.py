"""Rounds that were made before: what they launch and cost, what makes them new, and how they fail.

`python checks_of_known_rounds.py check_...`; test_host_cost.py runs all of them.
"""

import sys
import threading

from counted_driver import FakeDtype, FakeTensor, bfloat16, counted_machine, float32, int32, int64
from counted_rounds import a_round, fails, since, words_at
from host_cost import STREAM, at_hand, python_calls, tensors

from epmoe import (
    DeviceArray,
    Dispatched,
    EPConfig,
    EPStateError,
    EPValueError,
    ExpertParallel,
    LocalWorld,
    device,
)
from epmoe.host.dispatched import ARRAYS

uint32 = FakeDtype("uint32")
# Of Python functions, looks at tensors among them; and of those that look up what one layer has at hand
MOST_PYTHON_CALLS, OF_LAYERS = {"dispatch": 4, "combine": 3}, {"dispatch": 5, "combine": 7}


def check_a_steady_round_is_short():
    for layers in (1, 4):  # of which each looks up what the one has at hand
        with at_hand(does_nothing=True) as (ep, driver, _):
            given = [tensors(0x10000 * (1 + i)) for i in range(layers)]
            for x, ids, weights in 6 * given:
                a_round(ep, x, ids, weights)
            for x, ids, weights in 3 * given:
                n_dispatch, _, d = python_calls(ep.dispatch, x, ids)
                y = d.output_tokens
                n_combine, _, out = python_calls(ep.combine, y, d, weights)
                for name, n in ("dispatch", n_dispatch), ("combine", n_combine):
                    assert n <= MOST_PYTHON_CALLS[name] + OF_LAYERS[name] * (layers > 1), (
                        name,
                        layers,
                        n,
                    )
                del d, y, out


def check_a_steady_round_launches_only():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(4):
            a_round(ep, x, ids, weights)
        driver.native_calls.clear()
        launched, calls = since(driver, lambda: a_round(ep, x, ids, weights))
        assert [name for name, *_ in launched] == ["dispatch", "combine"] and calls == [], (
            launched,
            calls,
        )
        assert driver.native_calls == 2 * [
            "cuStreamIsCapturing",
            "cuCtxGetCurrent",
            "cuLaunchKernel",
        ]


def check_launches_with_attributes_start_again():
    machine, driver = counted_machine(1, 0)
    kernel = device.kernel(max_threads=64)(lambda params, num_tokens, my_rank: None)
    with machine.recording() as launches:
        stream = machine.stream()
        machine.launch(kernel, 1, 64, (1, 2, 3), stream=stream, cooperative=True)
        machine.launch(kernel, 2, 32, (4, 5, 6), stream=machine.stream(handle=STREAM))
    driver.launches.clear()
    own = int(stream.handle)
    assert machine.again(launches)(0) == 0
    assert driver.native_calls[-2:] == ["cuLaunchKernelEx", "cuLaunchKernel"]
    assert [launch[1:] for launch in driver.launches] == [
        (1, 64, own, 1, 2, 3),
        (2, 32, STREAM, 4, 5, 6),
    ]


def check_the_fast_way_launches_what_the_general_way_launches():
    for ids_dtype, names in (
        (int32, ["dispatch", "combine"]),
        (int64, ["narrow_ids", "dispatch", "combine"]),
    ):
        seen = []
        for fast in (True, False):
            with at_hand() as (ep, driver, _):
                x, ids, weights = tensors(ids_dtype=ids_dtype)
                ep._steady.applies = fast
                rounds = [since(driver, lambda: a_round(ep, x, ids, weights)) for _ in range(4)]
                relative = [
                    [
                        (name, grid, block, stream, n, rank, words_at(ep, driver, params))
                        for name, grid, block, stream, params, n, rank in launched
                    ]
                    for launched, _ in rounds
                ]
                assert [name for name, *_ in relative[-1]] == names
                assert all(stream == STREAM for _, _, _, stream, *_ in relative[-1])
                assert not rounds[-1][1], rounds[-1][1]
                seen.append(relative)
        assert seen[0] == seen[1]


def check_rounds_written_into_the_callers_arrays_are_known_too():
    """out= of both calls: known launches only, with the words of the general way, also for arrays that are new."""

    def round_at(ep, at, x, ids, weights):
        written = [
            ("output_tokens", (ep.capacity, 64), bfloat16),
            ("row_offsets", (9,), uint32),
            ("expert_ids", (8,), int32),
            ("src_info", (ep.capacity, 2), int32),
            ("recv_count", (8, 2), int32),
        ]
        arrays = {
            name: FakeTensor(at + 0x10000 * i, shape, dtype)
            for i, (name, shape, dtype) in enumerate(written)
        }
        combined = FakeTensor(at + 0x80000, (4, 64), bfloat16)
        d = ep.dispatch(x, ids, out=Dispatched(**dict.fromkeys(ARRAYS) | arrays, num_tokens=0))
        assert d.src_info is arrays["src_info"] and d.output_tokens is arrays["output_tokens"]
        assert type(d.topk_ids) is DeviceArray and d.output_scales is None
        assert ep.combine(d.output_tokens, d, weights, out=combined) is combined

    places, seen = [0x4000000 + 0x100000 * i for i in (0, 0, 1, 3, 0, 6, 10, 15, 6)], []
    for fast in (True, False):
        with at_hand() as (ep, driver, given):
            ep._steady.applies = fast
            rounds = []
            for at in places:
                driver.native_calls.clear()
                launched, calls = since(driver, lambda: round_at(ep, at, *given))
                rounds += [
                    (*launch, n, rank, words_at(ep, driver, params, 40))
                    for *launch, params, n, rank in launched
                ]
            if fast:
                assert not calls and driver.native_calls.count("cuLaunchKernel") == 2, (
                    calls,
                    driver.native_calls,
                )
                x, ids, weights = given
                src_info = FakeTensor(places[0] + 0x30000, (3, 2), int32)
                wrong = Dispatched(**dict.fromkeys(ARRAYS) | {"src_info": src_info}, num_tokens=0)
                fails(EPValueError, "src_info of rank 0", ep.dispatch, x, ids, out=wrong)
            seen.append(rounds)
    for (*one, words), (*other, theirs) in zip(*seen, strict=True):
        assert one == other and words[: len(theirs)] == theirs, (one, words, other, theirs)


def check_new_and_changed_arguments_are_checked():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for _ in range(3):
            a_round(ep, x, ids, weights)
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
        fails(
            EPValueError, "float32", ep.combine, y, d, FakeTensor(weights.data_ptr(), (4, 8), int32)
        )
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


def check_weights_that_are_a_function_are_not_taken_for_none():
    with at_hand() as (ep, driver, (x, ids, weights)):
        for given, shape in (
            (None, (4, 8, 64)),
            (lambda token, k: 0.5, (4, 64)),
            (None, (4, 8, 64)),
            (weights, (4, 64)),
        ):
            for _ in range(4):
                assert a_round(ep, x, ids, given).shape == shape


def check_places_that_somebody_has_changed_are_refused():
    """src_info of a known round, replaced behind the dispatch: its combine says so, and takes the right one."""
    with at_hand() as (ep, driver, (x, ids, weights)):
        y = FakeTensor(0x90000, (ep.capacity, 64), bfloat16)
        for _ in range(6):
            ep.combine(y, ep.dispatch(x, ids), weights)
        d = ep.dispatch(x, ids)
        right, d.src_info = d.src_info, FakeTensor(0xA0000, (ep.capacity, 2), int32)
        driver.launches.clear()
        fails(
            EPValueError,
            "src_info of the Dispatched of rank 0 is another array",
            ep.combine,
            y,
            d,
            weights,
        )
        assert not driver.launches
        d.src_info = right
        ep.combine(y, d, weights)


def check_split_kernels_are_remembered_too():
    with at_hand(fused=False) as (ep, driver, (x, ids, weights)):
        for _ in range(4):
            a_round(ep, x, ids, weights)
        driver.native_calls.clear()
        launched, calls = since(driver, lambda: a_round(ep, x, ids, weights))
        names = ["dispatch_async", "dispatch_wait", "combine_async", "combine_wait"]
        assert [name for name, *_ in launched] == names and not calls
        # the kernel that waits for messages begins before the one that sends them has ended
        starts = ["cuStreamIsCapturing", "cuCtxGetCurrent", "cuLaunchKernel"]
        assert driver.native_calls == [*starts, "cuLaunchKernelEx", *starts, "cuLaunchKernel"]


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

    def backward():  # of torch's autograd, say: on the default stream, in a thread of its own
        try:
            per_rank = [tensors(at) for at in (0x10000, 0x20000)]
            x, ids, weights = (list(of_ranks) for of_ranks in zip(*per_rank))
            dispatched = ep.dispatch(x, ids)
            ep.combine([d.output_tokens for d in dispatched], dispatched, weights)
        except Exception as e:
            failed.append(e)

    with ExpertParallel(EPConfig(2, 16, 8, 64, 4), LocalWorld(2)) as ep:
        for _ in range(3):  # the first, general ones, and then steady ones
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            driver.threads = {
                threading.get_ident()
            }  # another thread may get the number of one that has ended
    assert not failed, failed


if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, flush=True)
        globals()[check]()
