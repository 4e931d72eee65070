"""Steady calls of the fused_a2a functions: how many Python functions each runs, what it calls of the driver.

`python checks_of_known_rows.py check_...`; test_host_cost.py runs all of them.
"""

import sys
import weakref
from functools import partial

from counted_driver import FakeDtype, FakeTensor, bfloat16, counted_machine, float32, int64
from counted_rounds import fails, since
from host_cost import OneRankHere, python_calls, tensors, without_python

from epmoe import EPError, EPStateError, EPValueError, PeerTimeout, fused_a2a
from epmoe.fused_a2a import buffers

N_TOKENS, EXPERTS, HIDDEN = 4, 16, 64
# of Python functions, looks at tensors among them: 3, or 5 with a pair, of a dispatch, 1 of the others
MOST_PYTHON_CALLS = {
    "dispatch": 9,
    "fp8": 11,
    "combine": 7,
    "cached": 7,
    "by expert": 9,
    "combine by expert": 8,
}


def rows_rounds(world, pair=False):
    """{name: a function that makes the call}, on arrays that stay; a dispatch lets go of the results before it."""
    (x, ids, probs), held = tensors(ids_dtype=int64), {}
    if pair:
        x = (
            FakeTensor(0x30000, (N_TOKENS, 128), FakeDtype("float8_e4m3fn")),
            FakeTensor(0x40000, (N_TOKENS, 1), float32),
        )
    y = FakeTensor(0x50000, (2 * N_TOKENS, HIDDEN), bfloat16)

    def dispatch():
        held.clear()
        held["made"] = made = fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, world)
        return made

    def combine():
        held["ctx"] = fused_a2a.Context()
        return fused_a2a.FusedCombine.forward(held["ctx"], y, world, held["made"][-1])

    return (
        {"fp8": dispatch}
        if pair
        else {
            "dispatch": dispatch,
            "combine": combine,
            "cached": lambda: fused_a2a.FusedCombine.backward(held["ctx"], x),
        }
    )


def hybrid_rounds(world):
    """The same by expert, where results take turns, as where the last ones are still held."""
    dense, held = (N_TOKENS, EXPERTS), {}
    x, chosen, probs = (
        FakeTensor(0x10000, (N_TOKENS, HIDDEN), bfloat16),
        FakeTensor(0x20000, dense, FakeDtype("bool")),
        FakeTensor(0x30000, dense, float32),
    )
    y = FakeTensor(0x50000, (64, HIDDEN), bfloat16)

    def dispatch():
        held["made"] = fused_a2a.hybrid_ep_dispatch(
            x, chosen, probs, world, EXPERTS // 2, 24, 24, 64
        )
        return held["made"]

    fused_a2a.init_hybrid_ep_buffer(world, HIDDEN, N_TOKENS, EXPERTS // 2, 24, 24, False)
    return {
        "by expert": dispatch,
        "combine by expert": lambda: fused_a2a.hybrid_ep_combine(y, held["made"][-1]),
    }


def steady(rounds, does_nothing=False):
    """(driver, calls that were all made before)."""
    machine, driver = counted_machine(2, 0)
    if does_nothing:
        without_python(driver)
    calls = rounds(OneRankHere(machine, 2))
    for _ in range(10):
        for call in calls.values():
            call()
    return driver, calls


KINDS = rows_rounds, partial(rows_rounds, pair=True), hybrid_rounds


def check_a_steady_call_launches_only():
    for rounds in KINDS:
        driver, calls = steady(rounds)
        for name, call in calls.items():
            driver.native_calls.clear()
            launched, asked = since(driver, call)
            assert len(launched) == 1 and not asked, (name, launched, asked)
            assert driver.native_calls == [
                "cuStreamIsCapturing",
                "cuCtxGetCurrent",
                "cuLaunchKernel",
            ], name


def check_a_steady_call_is_short():
    for rounds in KINDS:
        for name, call in steady(rounds, does_nothing=True)[1].items():
            n, _, made = python_calls(call)
            assert n - 1 <= MOST_PYTHON_CALLS[name], (
                name,
                n - 1,
            )  # less the function here that makes it
            del made


def check_what_is_held_of_a_result_is_not_written_again():
    """Any one thing that a dispatch handed out keeps its memory: an array, the pair of FP8, the handle."""
    for pair in (False, True):
        dispatch = steady(partial(rows_rounds, pair=pair))[1]["fp8" if pair else "dispatch"]
        for which in (0, 1, 2, 3, 4, slice(5)):  # all of a tuple is that tuple
            held, handle = dispatch()[which], dispatch()[-1]
            del handle
            at = addresses_of(held)
            for _ in range(4):
                other = dispatch()[which]
                assert not at & addresses_of(other), (pair, which)
                del other
            del held


def addresses_of(one):
    """Where an array lies, or a pair's, or what a handle keeps."""
    if isinstance(one, fused_a2a.handles.RowsHandle):
        return {one.loans[0].address("info")}
    return set().union(*map(addresses_of, one)) if isinstance(one, tuple) else {one.address}


def check_numbers_that_are_no_ints_are_looked_at_every_time():
    """True and 1.0 equal 1, and are refused also where 1 is known."""
    world = OneRankHere(counted_machine(2, 0)[0], 2)
    dense = N_TOKENS, 2
    given = (
        FakeTensor(0x10000, (N_TOKENS, HIDDEN), bfloat16),
        FakeTensor(0x20000, dense, FakeDtype("bool")),
        FakeTensor(0x30000, dense, float32),
        world,
    )
    numbers = {
        "num_local_experts": 1,
        "num_sms_dispatch_api": 1,
        "num_sms_combine_api": 1,
        "num_permuted_tokens": 1,
    }
    fused_a2a.init_hybrid_ep_buffer(world, HIDDEN, N_TOKENS, 1, 1, 1, False)
    for _ in range(6):
        fused_a2a.hybrid_ep_dispatch(*given, **numbers)
    for name in numbers:
        for wrong in (1.0, True, -1):
            fails(
                EPValueError, name, fused_a2a.hybrid_ep_dispatch, *given, **numbers | {name: wrong}
            )
    rows = tensors(ids_dtype=int64)
    for _ in range(6):
        fused_a2a.fused_dispatch_on_device(*rows, EXPERTS, world)
    for wrong in (16.0, -16):
        fails(EPValueError, "num_experts", fused_a2a.fused_dispatch_on_device, *rows, wrong, world)


def check_known_calls_are_refused_after_a_failure_and_not_known_after_close():
    world = OneRankHere(counted_machine(2, 0)[0], 2)
    given = *tensors(ids_dtype=int64), EXPERTS, world
    for _ in range(6):
        fused_a2a.fused_dispatch_on_device(*given)
    buffer = fused_a2a.get_buffer(world, 0)
    buffer.failure = PeerTimeout("a rank stayed away")
    fails(EPStateError, "reset()", fused_a2a.fused_dispatch_on_device, *given)
    buffer.reset()
    for _ in range(6):
        made = fused_a2a.fused_dispatch_on_device(*given)
    buffer.close()
    assert fused_a2a.get_buffer(world, 0) is not buffer
    assert fused_a2a.fused_dispatch_on_device(*given)[-1] is not made[-1]


def check_a_start_that_the_driver_refuses_is_told_and_reset_helps():
    """Also where its results would lie in memory that no call has given yet, since others are held."""
    for rounds, name, buffer_of in (
        (rows_rounds, "dispatch", buffers.buffer_of),
        (hybrid_rounds, "by expert", buffers.hybrid_ep_buffer),
    ):
        for n_held in (0, 1, 2, 3):
            worlds = []
            driver, calls = steady(lambda world: worlds.append(world) or rounds(world))
            held = [calls[name]() for _ in range(n_held)]
            driver.launch_result = driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
            fails(EPError, "CUDA", calls[name])
            driver.launch_result = driver.CUresult.CUDA_SUCCESS
            for _ in range(2):
                fails(EPStateError, "reset()", calls[name])
            buffer_of(*worlds).reset()
            for _ in range(4):
                calls[name]()
            del held


def check_a_closed_buffer_keeps_nothing_of_the_caller():
    """Else its memory is freed when somebody finds the Buffer to be garbage, in the middle of something."""
    for rounds, name, buffer_of in (
        (rows_rounds, "dispatch", buffers.buffer_of),
        (hybrid_rounds, "by expert", buffers.hybrid_ep_buffer),
    ):
        worlds = []
        _, calls = steady(lambda world: worlds.append(world) or rounds(world))
        buffer = buffer_of(*worlds)
        given = [
            weakref.ref(cell.cell_contents)
            for cell in calls[name].__closure__
            if isinstance(cell.cell_contents, FakeTensor)
        ]
        calls.clear()
        assert any(ref() is not None for ref in given)
        buffer.close()
        assert given and not any(ref() is not None for ref in given), name


if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(check, flush=True)
        globals()[check]()
