"""Hangs are proved and reported, with each thread's place and the word it waits for."""

import gc
import re
import weakref

import numpy as np
import pytest
from litmus import OUT, blocks, execute, hang, line_of, wait_for

from epmoe import device
from epmoe.device import ballot, kernel, ld_acquire_gpu_i32, load_i32, store_i32, syncthreads, thread_idx, u64
from epmoe.device.sim import livelock
from epmoe.device.sim.threads import SimThread
from epmoe_ref.errors import DeadlockError, EPError, RaceError


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_word_that_nobody_writes(seed):
    @kernel()
    def waits(params, num_tokens, my_rank):
        if thread_idx() == 3:
            while device.ld_acquire_sys_u64(params + u64(64 + 16 * 2)) == 0:
                pass
        syncthreads()

    text = hang(waits, seed=seed, grid=2, block=64)
    assert text.startswith("every thread waits or has ended, and nothing can change that:")
    line = re.escape(line_of(waits, "ld_acquire"))
    assert re.search(r"rank 0 blocks 0-1 thread 3 at %s: spins on data\[thread 2, word 0\] of rank 0" % line, text)
    assert "which holds 0" in text
    at = line_of(waits, "syncthreads")
    assert "threads 0-2,4-63 at %s: waits at syncthreads, 1 of 64 threads has not come" % at in text


def test_a_flag_in_shared_memory():
    @kernel()
    def waits(params, num_tokens, my_rank):
        flags = device.shared_array(4, device.int32)
        while device.shared_add_i32(flags, 2, 0) != 1:
            pass

    said = r"blocks 0-1 thread 0 at .*: spins on shared array of test_hangs_are_reported.py:\d+\[2\] of rank 0"
    assert re.search(said, hang(waits, seed=0, grid=2, block=1))


def test_several_words_in_one_loop_and_a_clock():
    @kernel()
    def waits(params, num_tokens, my_rank):
        start = device.globaltimer()
        while ld_acquire_gpu_i32(params) == 0 and ld_acquire_gpu_i32(params + u64(4)) == 0:
            device.nanosleep(20)
            if device.globaltimer() - start > 30_000_000_000:
                store_i32(params + u64(OUT), 1)
                break

    text = hang(waits, block=1)
    assert "flag[slot 0]" in text and "flag[slot 1]" in text
    # time passes instead, and the kernel's timeout fires
    assert execute(waits, block=1, expire_waits=True)[OUT // 4] == 1


def test_expired_waits_that_do_not_end_are_still_a_deadlock():
    waits = blocks(lambda flag, data: wait_for(ld_acquire_gpu_i32, flag, 1))
    assert "flag[slot 0]" in hang(waits, block=1, expire_waits=True)


def test_a_lane_that_does_not_come_to_a_warp_operation():
    @kernel()
    def diverges(params, num_tokens, my_rank):
        if thread_idx() == 7:
            syncthreads()
        else:
            device.syncwarp()

    text = hang(diverges)
    assert "waits at syncwarp, 1 of 32 lanes of its warp has not come" in text
    assert "waits at syncthreads, 31 of 32 threads have not come" in text


def test_lanes_at_different_warp_operations():
    @kernel()
    def mixes(params, num_tokens, my_rank):
        if thread_idx() < 16:
            ballot(1)
        else:
            device.shfl_xor(1, 1)

    with pytest.raises(EPError, match="warp operations do not match: .* is at (shfl_xor|ballot)"):
        execute(mixes)


def test_lanes_of_a_warp_at_different_calls_of_a_barrier():
    def calls(limit):
        @kernel()
        def branches(params, num_tokens, my_rank):
            if thread_idx() < limit:
                syncthreads()  # here
            else:
                device.syncthreads_or(1)  # there

        return branches

    with pytest.raises(EPError) as caught:
        execute(calls(16), block=64)
    assert re.search(
        "barriers do not match: rank 0 block 0 warp 0 lane .* and lane .* of its warp at", str(caught.value)
    )
    assert line_of(calls(16), "here") in str(caught.value) and line_of(calls(16), "there") in str(caught.value)
    execute(calls(32), block=64)  # in PTX, warps may meet at different calls


@pytest.mark.parametrize("use", [lambda v: v + 1, device.f32, lambda v: store_i32(v, 0), lambda v: 1 if v else 0])
@pytest.mark.parametrize("read", ["shfl_idx", "shfl_xor", "shfl_up", "warp_broadcast_i32", "warp_broadcast_u64"])
def test_the_value_of_a_lane_that_has_ended_must_not_be_used(read, use):
    def reads(use, lane):
        @kernel()
        def leaves(params, num_tokens, my_rank):
            if thread_idx() != lane:
                v = getattr(device, read)(7, 33 if "idx" in read or "broadcast" in read else 1)
                if thread_idx() == lane ^ 1:
                    use(v)

        return leaves

    execute(reads(lambda v: None, 0))
    with pytest.raises(EPError, match=r"at %s < .* reads lane \d+, which has ended .* the result is undefined" % read):
        execute(reads(use, 1 if "idx" in read or "broadcast" in read else 0))


def test_the_last_writer_and_the_ranks_that_have_ended_are_named():
    @kernel()
    def counts(params, num_tokens, my_rank):
        if my_rank < 2:
            device.red_add_release_sys_i32(params, 1)
        if my_rank == 0:
            wait_for(device.ld_acquire_sys_i32, params, 3)
            wait_for(device.ld_acquire_sys_i32, params, 3)

    def text(**options):
        with pytest.raises(DeadlockError) as caught:
            execute(counts, ranks=3, block=1, **options)
        return str(caught.value)

    assert text(racecheck=False).endswith("of rank 0, which holds 2\n  ranks 1-2: every launch has ended")
    at = re.escape(line_of(counts, "red_add"))
    assert re.search(r"which holds 2 \(last written at %s by rank [01]\)\n" % at, text())
    waits = blocks(lambda flag, data: wait_for(ld_acquire_gpu_i32, flag, 1))
    with pytest.raises(DeadlockError, match=r"which holds 0 \(not written by these launches\)$"):
        execute(waits, block=1)


@pytest.mark.parametrize(
    "announced, arrivals, lacks",
    [
        (64, 2, "1 of 2 arrivals"),
        (48, 1, "an mbar_expect_tx of 16 bytes that were copied"),
        (80, 1, "16 bytes that mbar_expect_tx announced"),
    ],
)
def test_what_the_phase_of_an_mbarrier_lacks(announced, arrivals, lacks):
    @kernel()
    def waits(params, num_tokens, my_rank):
        bar = device.shared_addr(device.shared_array(1, device.uint64))
        stage = device.shared_addr(device.shared_array(16, device.int32))
        device.mbar_init(bar, arrivals)
        device.mbar_expect_tx(bar, announced)
        device.bulk_load(stage, params, 64, bar)
        while not device.mbar_try_wait(bar, 0):
            pass

    said = "spins on the mbarrier shared array of %s[0] of rank 0: its phase 0 (parity 0) lacks %s"
    assert hang(waits, block=1).endswith(said % (line_of(waits, "uint64"), lacks))


def test_a_plain_spin_and_a_lock_that_is_never_free(monkeypatch):
    monkeypatch.setattr(livelock, "QUIET", 50_000)
    monkeypatch.setattr(livelock, "LONG", 100_000)

    spins = blocks(lambda flag, data: wait_for(load_i32, flag, 1))

    @kernel()
    def locks(params, num_tokens, my_rank):
        while device.atomic_cas_relaxed_gpu_i32(params, 1, 2) != 1:
            pass

    assert re.match(r"\d[\d,]+ operations, and the same ones repeat:\n", hang(spins, block=1))
    assert line_of(locks, "while") in hang(locks, block=1)


def test_a_long_loop_that_does_new_things_is_no_hang(monkeypatch):
    monkeypatch.setattr(livelock, "QUIET", 10_000)
    monkeypatch.setattr(livelock, "LONG", 20_000)

    @kernel()
    def counts(params, num_tokens, my_rank):
        at = params + u64(4 * thread_idx())
        while load_i32(at) < 1500:
            store_i32(at, load_i32(at) + 1)

    assert execute(counts)[:32].tolist() == [1500] * 32


def test_ended_threads_are_not_waited_for():
    @kernel()
    def leaves(params, num_tokens, my_rank):
        if thread_idx() % 3 == 0:
            return
        syncthreads()
        store_i32(params + u64(OUT + 4 * thread_idx()), ballot(1) if thread_idx() < 32 else 0)
        syncthreads()

    got = execute(leaves, block=64, seed=2)
    want = sum(1 << i for i in range(32) if i % 3)
    assert all(got[OUT // 4 + i].astype(np.uint32) == want for i in range(32) if i % 3)


def test_blocks_that_are_not_resident_cannot_be_waited_for():
    @kernel()
    def all_meet(params, num_tokens, my_rank):
        if thread_idx() == 0:
            device.red_add_release_gpu_i32(params, 1)
            wait_for(ld_acquire_gpu_i32, params, device.grid_dim())

    @kernel()
    def later_waits_for_earlier(params, num_tokens, my_rank):
        if thread_idx() == 0:
            wait_for(ld_acquire_gpu_i32, params, device.block_idx())
            device.red_add_release_gpu_i32(params, 1)

    for seed in range(3):
        execute(all_meet, grid=3, seed=seed)
        execute(later_waits_for_earlier, grid=5, seed=seed, resident_limit=1)
    text = hang(all_meet, grid=3, resident_limit=2)
    assert "rank 0: block 2 of all_meet #1 not resident" in text and "flag[slot 0]" in text


def test_the_machine_can_be_used_after_a_hang():
    @kernel()
    def waits(params, num_tokens, my_rank):
        wait_for(ld_acquire_gpu_i32, params, 1)
        if thread_idx() == 0:
            store_i32(params + u64(OUT), 5)

    machine = device.machine(1, seed=0)
    buffer, stream = machine.alloc(4096, "words"), machine.stream()
    buffer.fill(0)
    machine.launch(waits, 1, 32, (buffer.address, 0, 0), stream=stream)
    with pytest.raises(DeadlockError, match="words \\+ 0 bytes of rank 0"):
        machine.synchronize()
    buffer.write(np.ones(1, np.int32))
    machine.launch(waits, 1, 32, (buffer.address, 0, 0), stream=stream)
    assert buffer.read(np.int32, 1, OUT)[0] == 5
    buffer.free()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_thread_that_looks_twice_at_very_many_words_does_not_hang(seed):
    """A relaxed and an acquiring load of each of 200 words: the second is no spin, since the thread moves on."""

    @kernel()
    def looks(params, num_tokens, my_rank):
        for i in range(200):
            device.ld_relaxed_sys_u64(params + u64(8 * i))
            device.ld_acquire_sys_u64(params + u64(8 * i))

    execute(looks, seed=seed, racecheck=False)


def test_a_run_that_failed_keeps_none_of_its_threads(monkeypatch):
    made, init = [], SimThread.__init__

    def counted(self, hub):
        init(self, hub)
        made.append(weakref.ref(self))

    monkeypatch.setattr(SimThread, "__init__", counted)

    @kernel()
    def waits(params, num_tokens, my_rank):
        if thread_idx() == 0:
            wait_for(ld_acquire_gpu_i32, params, 1)
        syncthreads()

    @kernel()
    def fails(params, num_tokens, my_rank):
        syncthreads()
        if thread_idx() == 5:
            raise ZeroDivisionError

    @kernel()
    def races(params, num_tokens, my_rank):
        store_i32(params, thread_idx())

    for program, error in ((waits, DeadlockError), (fails, ZeroDivisionError), (races, RaceError)):
        for _ in range(2):
            with pytest.raises(error):
                execute(program, grid=2, block=64)
    gc.collect()
    assert len(made) >= 2 * 64 and not any(ref() is not None for ref in made)
