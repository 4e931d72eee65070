"""Schedules: a seed replays exactly, different seeds differ, and blocks and ranks really run at the same time."""

import numpy as np
import pytest
from litmus import FLAG, OUT, execute, wait_for

from epmoe import device
from epmoe.device import atomic_add_relaxed_gpu_i32, block_idx, kernel, store_i32, thread_idx, u64
from epmoe_ref.errors import EPValueError


@kernel()
def takes_tickets(params, num_tokens, my_rank):
    """Every thread records its place in the order."""
    ticket = atomic_add_relaxed_gpu_i32(params, 1)
    device.syncwarp()
    ticket = device.i32(ticket * 1000 + atomic_add_relaxed_gpu_i32(params, 1))
    store_i32(params + u64(OUT + 4 * (thread_idx() + block_idx() * device.block_dim())), ticket)


@pytest.mark.parametrize("racecheck", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_seed_replays_exactly(seed, racecheck):
    first = execute(takes_tickets, grid=3, block=64, seed=seed, racecheck=racecheck)
    again = execute(takes_tickets, grid=3, block=64, seed=seed, racecheck=racecheck)
    assert (first == again).all()


def test_the_detector_does_not_change_the_schedule():
    for seed in range(5):
        without = execute(takes_tickets, grid=2, seed=seed, racecheck=False)
        assert (without == execute(takes_tickets, grid=2, seed=seed)).all()


def test_seeds_differ():
    runs = [execute(takes_tickets, grid=3, block=64, seed=seed, racecheck=False)[OUT // 4 :] for seed in range(8)]
    assert len({run.tobytes() for run in runs}) == 8


def test_some_seeds_let_a_block_run_far_ahead_of_another():
    @kernel()
    def progress(params, num_tokens, my_rank):
        if thread_idx() == 0:
            for _ in range(50):
                atomic_add_relaxed_gpu_i32(params + u64(4 * block_idx()), 1)
            other = atomic_add_relaxed_gpu_i32(params + u64(4 * (1 - block_idx())), 0)
            store_i32(params + u64(OUT + 4 * block_idx()), other)

    others = [execute(progress, grid=2, seed=seed, racecheck=False)[OUT // 4 : OUT // 4 + 2] for seed in range(30)]
    first_to_end = [int(min(o)) for o in others]
    assert min(first_to_end) < 5 and max(first_to_end) > 25


def test_who_acquires_what_it_has_seen_does_not_wait_for_others():
    @kernel()
    def looks_twice(params, num_tokens, my_rank):
        if block_idx() == 1:
            while atomic_add_relaxed_gpu_i32(params + u64(32), 1) < 5000:
                pass
        elif device.ld_relaxed_gpu_i32(params) == device.ld_acquire_gpu_i32(params):
            store_i32(params + u64(OUT), atomic_add_relaxed_gpu_i32(params + u64(32), 0))

    assert execute(looks_twice, grid=2, block=1, seed=None, racecheck=False)[OUT // 4] < 1000


def test_slow_ranks_are_slow():
    @kernel()
    def progress(params, num_tokens, my_rank):
        for _ in range(200):
            device.atomic_add_relaxed_sys_i32(params + u64(4 * my_rank), 1)
        other = device.atomic_add_relaxed_sys_i32(params + u64(4 * (1 - my_rank)), 0)
        store_i32(params + u64(OUT + 4 * my_rank), other)

    def when_the_second_ended(seed):  # how far the first one was
        return execute(progress, ranks=2, block=1, seed=seed, slow_ranks=(0,), racecheck=False)[OUT // 4 + 1]

    assert sum(when_the_second_ended(seed) < 60 for seed in range(20)) > 15


def test_the_environment_gives_the_defaults(monkeypatch):
    monkeypatch.setenv("EPMOE_SEED", "17")
    monkeypatch.setenv("EPMOE_RACECHECK", "1")
    machine = device.machine(2)
    assert machine.seed == 17 and machine.racecheck and machine.describe() == "simulator, seed 17, race detector"
    monkeypatch.setenv("EPMOE_SEED", "none")
    monkeypatch.setenv("EPMOE_RACECHECK", "0")
    machine = device.machine(2)
    assert machine.seed is None and not machine.racecheck and machine.describe() == "simulator, round-robin schedule"
    monkeypatch.delenv("EPMOE_SEED")
    assert device.machine(2).seed == 0 and device.machine(2, seed=3).seed == 3


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_ranks_run_at_the_same_time(seed):
    @kernel()
    def ping_pong(params, num_tokens, my_rank):
        if thread_idx() == 0:
            for n in range(5):
                wait_for(device.ld_acquire_sys_i32, params + u64(FLAG), 2 * n + my_rank)
                device.st_release_sys_i32(params + u64(FLAG), 2 * n + my_rank + 1)

    assert execute(ping_pong, ranks=2, seed=seed)[0] == 10


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_launches_of_a_stream_follow_one_another_and_hold_lets_streams_meet(seed):
    @kernel()
    def appends(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store_i32(params + u64(OUT + 4 * device.atomic_add_relaxed_sys_i32(params, 1)), num_tokens)

    machine = device.machine(1, seed=seed)
    buffer, stream = machine.alloc(4096, "words"), machine.stream()
    buffer.fill(0)
    with machine.hold():
        with machine.hold():
            for n in range(4):
                machine.launch(appends, 1, 32, (buffer.address, n, 0), stream=stream)
        assert machine.in_flight()
    assert not machine.in_flight()
    assert buffer.read(np.int32, 4, OUT).tolist() == [0, 1, 2, 3]
    buffer.free()


def test_an_exception_drops_what_hold_holds_back():
    @kernel()
    def never(params, num_tokens, my_rank):
        raise AssertionError("this ran")

    machine = device.machine(1)
    stream = machine.stream()
    with pytest.raises(KeyError), machine.hold():
        machine.launch(never, 1, 1, (0, 0, 0), stream=stream)
        raise KeyError
    assert not machine.in_flight()
    machine.synchronize()


def test_time_is_counted_in_operations():
    @kernel()
    def clocks(params, num_tokens, my_rank):
        start = device.globaltimer()
        for _ in range(100):
            store_i32(params, 1)
        device.store_u64(params + u64(OUT), device.globaltimer() - start)

    ns = execute(clocks, block=1, seed=None).view(np.uint64)[OUT // 8]
    assert 100 * 100 <= ns <= 110 * 100


def test_partial_warps():
    @kernel()
    def counts(params, num_tokens, my_rank):
        store_i32(params + u64(OUT + 4 * thread_idx()), device.warp_sum_i32(1) * 100 + device.popc(device.ballot(1)))
        if device.lane_id() == 0:
            store_i32(params + u64(FLAG + 4 * device.warp_id()), device.n_warps())

    got = execute(counts, block=70)
    assert got[:3].tolist() == [3, 3, 3]
    assert got[OUT // 4 : OUT // 4 + 70].tolist() == [3232] * 64 + [606] * 6


@kernel(max_threads=128)
def small(params, num_tokens, my_rank):
    """Does nothing."""


def test_launches_that_could_not_run_are_refused():
    machine = device.machine(1, n_sms=2)
    stream = machine.stream()

    def launch(grid, block, shared_bytes=0):
        machine.launch(small, grid, block, (0, 0, 0), stream=stream, shared_bytes=shared_bytes)

    fits = "cannot be resident at once: 2 multiprocessors hold "
    for arguments, why in (
        ((33, 128), "grid=33 blocks of 128 threads of small " + fits + "32"),
        ((3, 128, 200 * 1024), fits + "2"),
        ((1, 129), "takes 1 to 128"),
        ((1, 0), "takes 1 to 128"),
        ((0, 32), "at least 1"),
        ((1, 32, 240 * 1024), "a block has at most"),
    ):
        with pytest.raises(EPValueError, match=why):
            launch(*arguments)
    with pytest.raises(EPValueError, match="decorate it with @kernel"):
        machine.launch(lambda params, num_tokens, my_rank: None, 1, 32, (0, 0, 0), stream=stream)
    with pytest.raises(TypeError, match="integer"):
        launch(1.5, 32)
    for arguments, of, why in (
        ((0, 0, 0), device.machine(1).stream(), r"stream=.* is no stream of this machine: machine.stream\(rank\)"),
        ((0, 0, 0), 0, r"stream=0 is no stream of this machine"),
        ((0,), stream, r"1 arguments for small: give \(params, num_tokens, my_rank\)"),
        (
            (machine.alloc(4, "b"), 0, 0),
            stream,
            "params of small is of type Buffer: give an address, such as buffer.address",
        ),
    ):
        with pytest.raises(EPValueError, match=why):
            machine.launch(small, 1, 32, arguments, stream=of)
    with pytest.raises(EPValueError, match="a stream of rank 1: ranks are 0 to 0"):
        machine.stream(1)
    with pytest.raises(EPValueError, match=r"small is a kernel: start it with machine.launch\(small, grid"):
        small(0, 0, 0)
    launch(32, 128)
    machine.synchronize()
    assert machine.max_resident_blocks(small, 128) == 32 and machine.max_resident_blocks(small, 128, 100 * 1024) == 4
    assert small.name == "small" and "nothing" in small.__doc__
