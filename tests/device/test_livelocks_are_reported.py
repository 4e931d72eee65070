"""Waiting loops with a barrier, a warp operation or a write end too. Slow and long runs are no livelocks."""

import re
import time

import pytest
from litmus import DATA, FLAG, OUT, execute, hang, line_of, wait_for

from epmoe import device
from epmoe.device import block_idx, kernel, ld_acquire_gpu_i32, ld_relaxed_gpu_i32, syncthreads, thread_idx, u64
from epmoe.device.sim import livelock
from epmoe_ref.errors import DeadlockError

OTHER = FLAG + 32


def loop_with(step):
    """A loop that waits for a flag that nobody writes, and does something in each round."""

    @kernel()
    def waits(params, num_tokens, my_rank):
        while ld_acquire_gpu_i32(params) == 0:
            step(params)

    return waits


STEPS = {
    "a barrier": lambda at: syncthreads(),
    "syncwarp": lambda at: device.syncwarp(),
    "a shuffle": lambda at: device.shfl_xor(1, 1),
    "a vote": lambda at: device.any_lane(0),
    "a plain store": lambda at: device.store_i32(at + u64(OUT + 4 * (thread_idx() + 32 * block_idx())), 1),
    "a strong store": lambda at: device.st_relaxed_gpu_i32(at + u64(OTHER), 0),
    "a heartbeat": lambda at: device.atomic_add_relaxed_gpu_i32(at + u64(OTHER), 1),
    "a lock": lambda at: device.atomic_cas_relaxed_gpu_i32(at + u64(OTHER), 5, 6),
    "a load": lambda at: device.load_i32(at + u64(DATA)),
    "a barrier and a pause": lambda at: (syncthreads(), device.nanosleep(100)),
}


@pytest.fixture
def soon(monkeypatch):
    """Start watching after fewer operations, to save time."""
    monkeypatch.setattr(livelock, "QUIET", 10_000)
    monkeypatch.setattr(livelock, "LENGTH", 4_000)


@pytest.mark.by_day
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_that_holds_more_than_its_look_is_reported(name, seed, soon):
    program = loop_with(STEPS[name])
    text = hang(program, grid=2, block=32, seed=seed)
    assert "no word that a waiting thread looks at has changed in" in text
    line = line_of(program, "while ld")
    assert "looks again and again at flag[slot 0] of rank 0, which holds 0, at %s" % line in text


def test_with_the_race_detector_too(soon):
    with pytest.raises(DeadlockError, match="looks again and again at flag"):
        execute(loop_with(STEPS["a barrier"]), block=64, racecheck=True)


def test_one_thread_looks_and_the_others_follow_it(soon):
    @kernel()
    def waits(params, num_tokens, my_rank):
        done = device.shared_array(1, device.int32)
        if thread_idx() == 0:
            done[0] = 0
        syncthreads()
        while True:
            if thread_idx() == 0:
                done[0] = ld_acquire_gpu_i32(params)
            syncthreads()
            if done[0]:
                break
            syncthreads()

    with pytest.raises(DeadlockError, match="thread 0 .*looks again and again at flag"):
        execute(waits, block=64)


def test_two_that_keep_writing_what_the_other_waits_for(soon):
    @kernel()
    def each_waits_for_the_other(params, num_tokens, my_rank):
        mine, others = u64(FLAG + 32 * block_idx()), u64(FLAG + 32 - 32 * block_idx())
        while ld_relaxed_gpu_i32(params + others) == 0:
            device.st_relaxed_gpu_i32(params + mine, 0)

    with pytest.raises(DeadlockError, match="which holds 0"):
        execute(each_waits_for_the_other, grid=2, block=1)


def test_one_loops_and_the_others_wait_for_it_at_a_barrier_or_for_a_word(soon):
    @kernel()
    def waits(params, num_tokens, my_rank):
        for _ in range(200):  # so long that they still wait when watching starts
            device.atomic_add_relaxed_gpu_i32(params + u64(OUT), 1)
        if block_idx() == 0 and thread_idx() == 0:
            while ld_acquire_gpu_i32(params) == 0:
                device.atomic_add_relaxed_gpu_i32(params + u64(OTHER), 1)
        elif block_idx() == 1:
            wait_for(ld_acquire_gpu_i32, params, 1)
        syncthreads()

    for seed in (None, 0, 1):
        text = hang(waits, grid=2, block=32, seed=seed)
        assert "block 0 thread 0 " in text and "looks again and again at flag[slot 0]" in text
        assert "threads 1-31 at" in text and "block 1 threads 0-31 at" in text and "spins on flag[slot 0]" in text


def test_a_word_in_shared_memory(soon):
    @kernel()
    def waits(params, num_tokens, my_rank):
        flags = device.shared_array(4, device.int32)
        if thread_idx() == 0:
            flags[2] = 0
        syncthreads()
        while device.shared_add_i32(flags, 2, 0) != 1:
            device.syncwarp()

    with pytest.raises(DeadlockError, match="looks again and again at shared array of"):
        execute(waits)


def test_a_loop_with_a_time_limit_ends_by_it_where_waits_may_expire(soon):
    @kernel()
    def waits(params, num_tokens, my_rank):
        start = device.globaltimer()
        while ld_acquire_gpu_i32(params) == 0:
            syncthreads()
            if device.any_lane(device.globaltimer() - start > 30_000_000_000):
                break
        device.store_i32(params + u64(OUT + 4 * thread_idx()), 1)

    assert execute(waits, expire_waits=True)[OUT // 4] == 1


def test_it_takes_seconds_as_the_simulator_comes():
    before = time.process_time()
    hang(loop_with(STEPS["a barrier"]), grid=2, block=64)
    assert time.process_time() - before < 20


@pytest.mark.by_day
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("work", ["stores", "loads", "barriers", "counts", "looks", "heartbeat"])
def test_a_long_wait_for_one_that_works_is_none(work, seed, soon):
    """Block 0 works for a long time, with every operation of a waiting loop; block 1 waits for it in a loop with a barrier."""

    @kernel()
    def one_works(params, num_tokens, my_rank):
        if block_idx() == 1:
            while ld_acquire_gpu_i32(params) == 0:
                syncthreads()
            return
        for i in range(800):
            if work == "stores":
                device.store_i32(params + u64(OUT + 4 * (i % 500)), i)
                ld_relaxed_gpu_i32(params + u64(OTHER))
            elif work == "loads":
                device.load_i32(params + u64(OUT + 4 * (i % 500)))
            elif work == "barriers":
                device.syncwarp()
            elif work == "counts":
                device.atomic_add_relaxed_gpu_i32(params + u64(OTHER), 1)
            elif work == "heartbeat":
                if thread_idx() == 0:
                    device.st_relaxed_gpu_i32(params + u64(OTHER), i)
                ld_relaxed_gpu_i32(params + u64(OTHER))
                syncthreads()
            else:
                device.atomic_add_relaxed_gpu_i32(params + u64(OTHER), 1)
                ld_relaxed_gpu_i32(params + u64(OTHER))
        if thread_idx() == 0:
            device.st_release_gpu_i32(params, 1)

    assert execute(one_works, grid=2, block=32, seed=seed, racecheck=False)[0] == 1


def test_threads_with_a_short_record_are_watched_on(soon):
    """256 threads share the first recording: none has gone round its loop often enough, and none is at work."""
    text = hang(loop_with(STEPS["a barrier"]), grid=4, block=64)
    assert int(re.search(r"has changed in ([\d,]+) operations", text)[1].replace(",", "")) < 3 * livelock.QUIET


def test_a_word_that_changes_while_threads_are_watched_is_work(soon):
    """Both threads do nothing new, but one changes the word for which the other waits, parked, to and fro."""

    @kernel()
    def one_changes_it_late(params, num_tokens, my_rank):
        if block_idx() == 1:
            wait_for(ld_acquire_gpu_i32, params, 2)
            return
        for i in range(10_000):
            ld_relaxed_gpu_i32(params + u64(OTHER))
            device.st_release_gpu_i32(params, i & 1 if i > 4200 else 0)  # soon after watching began
        device.st_release_gpu_i32(params, 2)

    assert execute(one_changes_it_late, grid=2, block=1, racecheck=False)[0] == 2


def test_a_thread_without_a_record_may_be_at_work(soon):
    """Warp 0 accesses no memory for a long time, and warp 1 waits for it."""

    @kernel()
    def one_computes(params, num_tokens, my_rank):
        if thread_idx() >= 32:
            while ld_acquire_gpu_i32(params) == 0:
                device.syncwarp()
            return
        for _ in range(1000):
            device.shfl_xor(1, 1)
        device.st_release_gpu_i32(params, 1)

    assert execute(one_computes, block=64, racecheck=False)[0] == 1


def test_a_slow_rank_is_waited_for(soon, tonight):
    @kernel()
    def one_is_slow(params, num_tokens, my_rank):
        if my_rank == 1:
            while ld_acquire_gpu_i32(params) == 0:
                device.syncwarp()
            return
        for i in range(60):
            device.store_i32(params + u64(OUT + 4 * i), ld_relaxed_gpu_i32(params + u64(OTHER)))
        if thread_idx() == 0:
            device.st_release_gpu_i32(params, 1)

    for seed in range(4 if tonight else 1):
        execute(one_is_slow, ranks=2, seed=seed, slow_ranks=(0,), racecheck=False)
