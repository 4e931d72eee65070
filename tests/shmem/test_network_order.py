"""The simulated network keeps exactly the order of puts and signals that NVSHMEM promises: programs of two ranks."""

import numpy as np
import pytest

from epmoe import device
from epmoe.device import (
    kernel,
    lane_id,
    ld_acquire_gpu_i32,
    ld_acquire_sys_u64,
    load_u32,
    red_add_release_gpu_i32,
    store_u32,
    syncwarp,
    warp_id,
)
from epmoe.device.shmem import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set
from epmoe_ref.errors import EPError, OutOfBoundsError, RaceError

WORD, SOURCE, TARGET, OUT, COUNT, READ, ELSEWHERE = 0, 512, 1024, 1536, 64, 128, 2048
BYTES = 512  # a vector for each lane
SEEDS = range(12)
REGIONS = [
    ("word", WORD, (1,), "u8", ()),
    ("source", SOURCE, (128,), "u4", ("i",)),
    ("target", TARGET, (128,), "u4", ("i",)),
    ("out", OUT, (128,), "u4", ("i",)),
]


def fill(base, value):
    """One warp fills the source."""
    i = lane_id()
    while i < 128:
        store_u32(base + SOURCE + 4 * i, value)
        i += 32
    syncwarp()


def receive(base):
    """Rank 1 copies the target when the word has arrived."""
    while ld_acquire_sys_u64(base + WORD) == 0:
        pass
    i = lane_id()
    while i < 128:
        store_u32(base + OUT + 4 * i, load_u32(base + TARGET + 4 * i))
        i += 32
    syncwarp()
    if lane_id() == 0:
        shmem_signal_set(base + READ, 1, 0)


def program(send, threads=32):
    """Rank 0 sends, rank 1 receives; params holds the rank's own address."""

    @kernel
    def two_ranks(params, num_tokens, my_rank):
        if my_rank == 0:
            send(params)
        elif warp_id() == 0:
            receive(params)

    two_ranks.threads = threads
    return two_ranks


def run(prog, seed, racecheck, **options):
    """The 128 words that rank 1 found."""
    machine = device.machine(2, seed=seed, racecheck=racecheck, **options)
    buffers = [machine.alloc(4096, "heap", rank=r, regions=REGIONS) for r in range(2)]
    machine.network.connect([b.address for b in buffers], 2560)
    try:
        for b in buffers:
            b.fill(0)
        for r, b in enumerate(buffers):
            machine.launch(prog, 1, prog.threads, (b.address, 0, r), stream=machine.stream(r))
        machine.synchronize()
        return buffers[1].read(np.uint32, 128, OUT)
    finally:
        for b in buffers:
            b.free()


def values(send, threads=32):
    """The results over several seeds, without the race detector."""
    prog = program(send, threads)
    return {int(v) for seed in SEEDS for v in run(prog, seed, False)}


def races(send, threads=32):
    """The race reports over several seeds."""
    prog, found = program(send, threads), []
    for seed in SEEDS:
        try:
            run(prog, seed, True)
        except RaceError as race:
            found.append(str(race))
    return found


def steps(*of):
    """What rank 0 does, one after another: each a function of its address."""

    def send(base):
        for step in of:
            step(base)

    return send


def by_lane_0(*of):
    """Steps that one lane takes, after all lanes have come so far."""

    def step(base):
        syncwarp()
        if lane_id() == 0:
            steps(*of)(base)

    return step


def fill_7(base):
    fill(base, 7)


def fill_8(base):
    fill(base, 8)


def put(base):
    shmem_put_nbi_warp(base + TARGET, base + SOURCE, BYTES, 1)


def quiet(base):
    shmem_quiet()


def fence(base):
    shmem_fence()


def signal(base):
    shmem_signal_set(base + WORD, 1, 1)


def together(base):
    syncwarp()


def until_read(base):
    while ld_acquire_sys_u64(base + READ) == 0:
        pass


put_quiet_signal = steps(fill_7, put, quiet, by_lane_0(fence, signal))
put_signal = steps(fill_7, put, by_lane_0(signal), until_read, quiet)
ended_without_quiet = steps(fill_7, put, fence, by_lane_0(signal))
one_lane_quiets = steps(fill_7, put, by_lane_0(quiet), by_lane_0(fence, signal))
no_fence = steps(fill_7, put, quiet, by_lane_0(signal))
reuse_before_quiet = steps(fill_7, put, fill_8, quiet, by_lane_0(fence, signal))
reuse_after_quiet = steps(fill_7, put, quiet, together, fill_8, by_lane_0(fence, signal))


def put_fence_signal_in_one_thread(base):
    """A vector a lane; lane 0 signals its own."""
    fill(base, 7)
    shmem_put_nbi_warp(base + TARGET, base + SOURCE, 16, 1)  # all of it is lane 0's
    if lane_id() == 0:
        steps(fence, signal, quiet)(base)


def another_warp_signals(base):
    """As in the kernels: lanes complete, then count; the thread that acquires the count signals."""
    if warp_id() == 1:
        steps(fill_7, put, quiet, together)(base)
        if lane_id() == 0:
            red_add_release_gpu_i32(base + COUNT, 1)
    elif lane_id() == 0:
        while ld_acquire_gpu_i32(base + COUNT) == 0:
            pass
        steps(fence, signal)(base)


def test_what_was_completed_is_seen_behind_the_signal():
    for send, threads in (put_quiet_signal, 32), (reuse_after_quiet, 32), (another_warp_signals, 64):
        assert values(send, threads) == {7}
        assert not races(send, threads)


def test_a_signal_may_overtake_puts_that_were_not_completed():
    assert values(put_signal) == {0, 7}
    found = races(put_signal)
    assert found and all("target[" in text for text in found)


def test_a_lane_completes_its_part_of_the_put_only():
    assert values(one_lane_quiets) == {0, 7}
    assert any("shmem_quiet in every lane" in text for text in races(one_lane_quiets))


def test_a_put_that_nobody_completes_is_reported():
    assert "may still be on its way" in "".join(races(ended_without_quiet))


def test_a_signal_orders_nothing_without_a_fence():
    assert "the write is relaxed" in races(no_fence)[0]


def test_a_fence_orders_what_one_thread_sends_to_one_rank():
    prog = program(put_fence_signal_in_one_thread)
    assert {int(run(prog, seed, False)[0]) for seed in SEEDS} == {7}
    found = races(put_fence_signal_in_one_thread)
    assert not found, found[0]


def test_the_source_is_read_when_the_put_arrives():
    assert values(reuse_before_quiet) == {7, 8}
    found = races(reuse_before_quiet)
    assert len(found) == len(SEEDS) and all("source[" in text for text in found)


def test_a_seed_replays_exactly():
    for seed in SEEDS:
        one, other = (run(program(put_signal), seed, False) for _ in range(2))
        assert (one == other).all()


OUTSIDE = "not in the symmetric memory of rank 0"


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((ELSEWHERE + 512, SOURCE, BYTES, 1), OutOfBoundsError, f"target .*{OUTSIDE}"),
        ((TARGET, ELSEWHERE + 512, BYTES, 1), OutOfBoundsError, f"source .*{OUTSIDE}"),
        ((TARGET, SOURCE, BYTES, 2), EPError, "no rank 2 of 2"),
        ((TARGET, SOURCE, 24, 1), EPError, "multiples of 16"),
        ((TARGET + 8, SOURCE, 16, 1), EPError, "multiples of 16"),
    ],
)
def test_puts_outside_symmetric_memory_are_refused(arguments, error, words):
    def send(base):
        dst, src, nbytes, pe = arguments
        shmem_put_nbi_warp(base + dst, base + src, nbytes, pe)

    with pytest.raises(error, match=words):
        run(program(send), 0, False)


def test_lanes_must_agree():
    def send(base):
        shmem_put_nbi_warp(base + TARGET + 16 * lane_id(), base + SOURCE, 16, 1)

    with pytest.raises(EPError, match="different arguments"):
        run(program(send), 0, False)
