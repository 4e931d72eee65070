"""The host polls its own memory for what a kernel tells it, and other threads run. counted_rounds.py runs this."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
from checks_of_results import exact_dispatch
from counted_driver import counted_machine
from counted_rounds import a_round, error_of, fails, since
from host_cost import at_hand

from epmoe import EPError, EPStateError, PeerTimeout, layout
from epmoe.device import telling
from epmoe.fused_a2a import buffers
from epmoe.kernels import status
from epmoe.kernels.rows import mailbox, wait


def nobody(words):
    """A kernel that does not tell."""


def patience(seconds):
    """The bound of all waits inside."""
    return patch.multiple(telling, PATIENCE=seconds, MOST_WAITS=0)


def one_array():
    """(tell: function that has an array told and gives it back, its values, driver)."""
    machine, driver = counted_machine(1, 0)
    buffer, values = machine.alloc(4 * 100, "values"), np.arange(100, dtype=np.int32)
    buffer.write(values)
    one = telling.Telling(machine, 0, machine.stream(0))

    def tell(n=100):
        (told,) = one.tell([(buffer.address, 4 * n)], 1.0)
        return told.view(np.int32)

    not_ready = (driver.CUresult.CUDA_ERROR_NOT_READY,)
    driver.cuStreamQuery = lambda stream: not_ready
    return tell, values, driver


def check_trimmed_polls_the_hosts_memory():
    with at_hand() as (ep, driver, (x, ids, weights)):
        a_round(ep, x, ids, weights)
        for n_calls in (1, 0):  # the first one loads the kernel
            d = ep.dispatch(x, ids)
            offsets = d.row_offsets
            values = np.arange(len(offsets), dtype=np.uint32) * 2
            driver.memory_at(offsets.address)[: values.nbytes] = values.view(np.uint8)
            cut = []
            launched, calls = since(driver, lambda: cut.append(d.trimmed()))
            assert [name for name, *_ in launched] == ["tell_host"]
            assert len(cut[0].output_tokens) == values[-1] == d.n_rows
            assert n_calls or not calls, calls
            ep.combine(d.output_tokens, d, weights)


def check_a_word_that_never_comes_is_a_timeout():
    tell, values, driver = one_array()
    tell_, driver.tell, begin = driver.tell, nobody, time.monotonic()
    with patience(0.2):
        fails(PeerTimeout, "rank 0: the GPU has sent the host nothing for 0.2 s", tell)
    assert 0.2 <= time.monotonic() - begin < 2.0
    driver.tell = tell_
    assert np.array_equal(tell(), values)


def check_after_a_timeout_of_trimmed_calls_are_refused_until_reset():
    with patience(0.0), at_hand() as (ep, driver, (x, ids, weights)):
        driver.cuStreamQuery = lambda stream: (driver.CUresult.CUDA_ERROR_NOT_READY,)
        d, tell, driver.tell = ep.dispatch(x, ids), driver.tell, nobody
        fails(PeerTimeout, "sent the host nothing", d.trimmed)
        fails(EPStateError, "call reset()", ep.combine, d.output_tokens, d, weights)
        driver.tell = tell
        ep.reset()
        a_round(ep, x, ids, weights)


def check_a_peer_that_stays_away_is_named_as_by_check():
    words = np.zeros(layout.STATUS_WORDS, np.int32)
    words[[status.FAILED, status.WAITED_FOR]] = status.DISPATCH_WAIT, status.FOR_RECV_COUNT
    with at_hand() as (ep, driver, (x, ids, weights)):
        d, (r,) = ep.dispatch(x, ids), ep._engine.ranks
        driver.memory_at(r.address("status"))[: words.nbytes] = words.view(np.uint8)
        said = [error_of(PeerTimeout, call) for call in (d.trimmed, ep.check)]
        assert said[0] == said[1] and said[0].startswith("rank 0, dispatch_wait: "), said
        fails(EPStateError, "call reset()", ep.combine, d.output_tokens, d, weights)
        ep.reset()


def check_a_peer_that_stays_away_from_fused_dispatch_is_named_as_by_check():
    dispatch, driver, _, _ = exact_dispatch()
    buffer = list(buffers._buffer.values())[-1]
    words = np.zeros(layout.STATUS_WORDS, np.int32)
    words[[status.FAILED, status.WAITED_FOR]] = wait.ROWS_DISPATCH, wait.FOR_ARRIVAL
    words[status.INDEX] = 1
    at_status = driver.memory_at(buffer.ranks[0].words.address + mailbox.STATUS)
    at_status[: words.nbytes] = words.view(np.uint8)
    said = [error_of(PeerTimeout, call) for call in (dispatch, buffer.check)]
    assert said[0] == said[1] and "src_rank 1 did not send all its rows" in said[0], said
    fails(EPStateError, "call get_buffer(group, 0).reset()", dispatch)
    buffer.reset()
    dispatch()


def check_an_error_of_the_device_is_raised_as_it_is():
    tell, values, driver = one_array()
    driver.tell, driver.cuStreamQuery = nobody, lambda stream: (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    begin = time.monotonic()
    fails(EPError, "CUDA_ERROR_ILLEGAL_ADDRESS", tell)
    assert time.monotonic() - begin < 1.0


def check_a_stream_that_ended_without_a_word_is_an_error():
    tell, values, driver = one_array()
    driver.tell, driver.cuStreamQuery = nobody, lambda stream: (driver.CUresult.CUDA_SUCCESS,)
    fails(EPError, "the stream has ended", tell)


def check_a_late_word_is_seen_and_another_thread_runs_meanwhile():
    tell, values, driver = one_array()
    tell()
    at_once = driver.tell

    def tells_in_its_fourth_turn(words):
        for _ in range(3):
            time.sleep(0)
        at_once(words)

    for seconds in (0.0005, 0.03):
        driver.tell = lambda words: threading.Timer(seconds, tells_in_its_fourth_turn, (words,)).start()
        assert np.array_equal(tell(), values)


def check_several_threads_are_told_their_own_arrays():
    tell, values, driver = one_array()

    def many(n):
        return all(np.array_equal(tell(n), values[:n]) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(many, (100, 50, 1)))


def check_an_interruption_ends_the_wait_at_once():
    tell, values, driver = one_array()
    words, tell_ = [], driver.tell
    driver.tell = words.append

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    begin = time.monotonic()
    try:
        tell()
    except KeyboardInterrupt:
        assert time.monotonic() - begin < 2.0
    else:
        raise AssertionError("it ended without a word")

    def late(of_next):  # the launch that nobody waits for any more comes first
        tell_(words[0])
        threading.Timer(0.01, tell_, (of_next,)).start()

    driver.tell = late
    assert np.array_equal(tell(50), values[:50])


def check_memory_grows_with_what_is_told():
    machine, driver = counted_machine(1, 0)
    buffer, values = machine.alloc(1 << 16, "values"), np.arange(1 << 14, dtype=np.int32)
    buffer.write(values)
    one, before = telling.Telling(machine, 0, machine.stream(0)), len(driver.allocated())
    for n in (4, 1 << 10, 1 << 14, 8):
        arrays = [(buffer.address, 4 * n), *((buffer.address + 4 * i, 8) for i in range(6))]
        told = one.tell(arrays, 1.0)
        pairs = [[i, i + 1] for i in range(6)]
        assert [a.view(np.int32).tolist() for a in told] == [values[:n].tolist(), *pairs]
        assert len(driver.allocated()) == before + 1
    one.free()
    assert len(driver.allocated()) == before
