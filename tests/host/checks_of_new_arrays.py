"""Launches for arrays that lie elsewhere than any before, made of earlier ones.

`python checks_of_new_arrays.py check_...`; test_host_cost.py runs all of them.
"""

import sys
import threading

import numpy as np
from counted_driver import FakeTensor, bfloat16, counted_machine, float32, int32, int64
from counted_rounds import a_round, fails, since, words_at
from host_cost import STREAM, OneRankHere, at_hand, tensors

from epmoe import EPValueError, device, fused_a2a
from epmoe.fused_a2a import fused_dispatch_on_device


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
        assert [name for name, *_ in launched] == 4 * ["dispatch", "combine"] and calls == [], (
            launched,
            calls,
        )
        assert driver.native_calls == 8 * [
            "cuStreamIsCapturing",
            "cuCtxGetCurrent",
            "cuLaunchKernel",
        ]


def check_arrays_that_are_new_cost_one_copy_on_the_calls_own_stream():
    with at_hand() as (ep, driver, _):
        for i in range(8):
            a_round(ep, *tensors(0x10000 * (1 + i)))
        driver.native_calls.clear()
        allocated = len(driver.allocated())
        launched, calls = since(
            driver, lambda: any(a_round(ep, *tensors(0x10000 * (9 + i))) is None for i in range(3))
        )
        assert calls == 6 * ["cuMemcpyHtoDAsync"] and len(launched) == 6, calls
        assert driver.native_calls == 6 * [
            "cuStreamIsCapturing",
            "cuCtxGetCurrent",
            "cuMemcpyHtoDAsync",
            "cuLaunchKernel",
        ]
        assert driver.copied_on == {STREAM} and len(driver.allocated()) == allocated
        fails(
            EPValueError,
            "no multiple of 16",
            ep.dispatch,
            FakeTensor(0x200002, (4, 64), bfloat16),
            tensors()[1],
        )


def check_launches_for_new_arrays_are_those_of_the_general_way():
    seen = []
    for fast in (True, False):
        with at_hand() as (ep, driver, _):
            ep._steady.applies = fast
            launched = []
            for i, (x, ids, weights, options) in enumerate(_many_calls(120)):
                d = ep.dispatch(x, ids)
                y = (
                    FakeTensor(0x900000 + 0x10000 * (i % 7), (ep.capacity, 64), bfloat16)
                    if i % 3
                    else d.output_tokens
                )
                ep.combine(y, d, weights, **options)
                for *launch, params, n, rank in driver.launches:
                    launched.append((*launch, n, rank, words_at(ep, driver, params, 40)))
                driver.launches.clear()
                del d, y
            seen.append(launched)
            if fast:
                assert sum(len(starts) for starts in ep._steady._dispatches.values()) > 16
                assert driver.native_calls.count("cuMemcpyHtoDAsync") > 120, (
                    "all took the general way"
                )
    assert len(seen[0]) == len(seen[1])
    for (*one, words), (*other, theirs) in zip(*seen):
        assert one == other and words[: len(theirs)] == theirs, (one, words, other, theirs)


def _many_calls(n):
    """(x, ids, weights, options) of calls on arrays that lie anywhere."""
    rng = np.random.default_rng(1)
    into = FakeTensor(0xB00000, (4, 64), bfloat16)
    for i in range(n):
        at = [0x1000000 + 16 * int(rng.integers(1 << 20)) for _ in range(3)]
        x, ids, weights = (
            FakeTensor(at[0], (4, 64), bfloat16),
            FakeTensor(at[1], (4, 8), int32),
            FakeTensor(at[2], (4, 8), float32),
        )
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
        driver.capture = 5  # nothing is copied into memory that calls take in turn
        a_round_at(0x300000)
        assert (
            "cuMemcpyHtoDAsync" not in driver.native_calls
            and "cuLaunchKernel" not in driver.native_calls
        )
        driver.capture = 0
        for i in range(4):  # results lie elsewhere since, which is to be learned first
            driver.native_calls.clear()
            a_round_at(0x400000 + 0x10000 * i)
        assert driver.native_calls.count("cuMemcpyHtoDAsync") == 2


def check_launches_on_another_stream_are_not_made_of_earlier_ones():
    machine, driver = counted_machine(1, 0)
    kernel = device.kernel(max_threads=64)(lambda params, num_tokens, my_rank: None)
    streams, block = (
        [machine.stream(handle=handle) for handle in (STREAM, STREAM + 1)],
        np.zeros(3, np.uint64),
    )

    def flat(*on):
        with machine.recording() as launches:
            for stream in on:
                machine.launch(kernel, 1, 64, (1, 2, 3), stream=stream)
        return machine.flat(launches, len(on) * [block])

    slots = machine.slots(2, flat(streams[0]))
    assert (
        slots.serve(flat(streams[0], streams[0]))
        and not slots.serve(flat(streams[1]))
        and flat(*streams) is None
    )


def check_memory_for_parameters_is_used_again_and_its_calls_forgotten():
    from epmoe.host import elsewhere

    elsewhere.N_SLOTS = 4
    with at_hand() as (ep, driver, _):
        layers = [tensors(0x10000 * (1 + i)) for i in range(9)]
        for _ in range(4):
            for x, ids, weights in layers:
                driver.launches.clear()
                d = ep.dispatch(x, ids)
                ((_, _, _, _, params, *_),) = driver.launches
                assert x.data_ptr() in driver.memory_at(params).view(np.uint64)[:24], (
                    "parameters of another call"
                )
                ep.combine(d.output_tokens, d, weights)
                del d
        slots = [
            start.slot
            for starts in ep._steady._dispatches.values()
            for start in starts.values()
            if start.slot
        ]
        assert 0 < len(slots) <= 4


def check_a_call_whose_parameters_made_room_for_others_has_its_own_again():
    """Also where its results, that were held meanwhile, are the first to be looked at."""
    from epmoe.host import elsewhere

    elsewhere.N_SLOTS = 4
    with at_hand() as (ep, driver, _):
        layers = [tensors(0x10000 * (1 + i)) for i in range(12)]
        for x, ids, weights in layers[:6] + 8 * layers[6:7]:  # in two memories by turns
            d = ep.dispatch(x, ids)
            held, mine = (
                d.output_tokens,
                [one for one in ep._steady._last_dispatches if one.sent is ep._sent],
            )
            ep.combine(held, d, weights)
        for others in layers[7:]:
            a_round(ep, *others)
        assert mine[0] in ep._steady._last_dispatches and mine[0].key[0][0] == x.data_ptr()
        del d, held, mine
        driver.launches.clear()
        d = ep.dispatch(x, ids)
        has = parameters(driver)
        assert x.data_ptr() in has and d.output_tokens.address in has, "parameters of another call"
        ep.combine(d.output_tokens, d, weights)
        del d


def check_the_same_of_rows():
    from epmoe.host import elsewhere

    elsewhere.N_SLOTS = 4
    machine, driver = counted_machine(2, 0)
    world, layers = (
        OneRankHere(machine, 2),
        [(*tensors(0x10000 * (1 + i), ids_dtype=int64), 16) for i in range(12)],
    )
    held = []
    for layer in layers[:6] + 8 * layers[6:7]:  # in two memories by turns
        held = [fused_dispatch_on_device(*layer, world), *held[:1]]
        del held[1:]
    for others in layers[7:]:
        fused_dispatch_on_device(*others, world)
    x, last = layers[6][0], fused_a2a.get_buffer(world, 0).steady._last["dispatch"]
    assert x.data_ptr() in [one.known.seen[0][0] for one in last if one.known.seen]
    held.clear()
    driver.launches.clear()
    made = fused_dispatch_on_device(*layers[6], world)
    has = parameters(driver)
    assert x.data_ptr() in has and made[-1].loans[0].address("row_of") in has, (
        "parameters of another call"
    )


def check_launches_are_not_made_of_earlier_ones_if_something_changes_just_then():
    """Memory that waits in a cycle may be freed at any moment, also behind the look at whether any was."""
    machine, _ = counted_machine(2, 0)
    world, layers = (
        OneRankHere(machine, 2),
        [(*tensors(0x10000 * (1 + i), ids_dtype=int64), 16) for i in range(8)],
    )
    for layer in layers[:7]:
        fused_dispatch_on_device(*layer, world)
    steady = fused_a2a.get_buffer(world, 0).steady
    made_of = steady._elsewhere.slot
    asked = []

    def change_first(*what):
        asked.append(what)
        machine.changed()
        return made_of(*what)

    steady._elsewhere.slot = change_first
    fused_dispatch_on_device(*layers[7], world)
    steady._elsewhere.slot = made_of
    assert asked and not steady._last["dispatch"], "started, though they may name what is gone"
    fused_dispatch_on_device(*layers[7], world)
    assert steady._n_changes == machine.n_changes, "the change is never seen"


def parameters(driver):
    """Words of the parameter block of the only launch."""
    ((_, _, _, _, params, *_),) = driver.launches
    return driver.memory_at(params).view(np.uint64)[:40]


if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, flush=True)
        globals()[check]()
