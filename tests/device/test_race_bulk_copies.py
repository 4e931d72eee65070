"""Bulk copies need their waits and proxy fences: each mutation of a correct kernel is found."""

import numpy as np
import pytest
from litmus import DATA, FLAG, OUT, blocks, execute, first_race, nothing, wait_for

from epmoe import device
from epmoe.device import bulk_load, bulk_store, dynamic_shared, kernel, store_i32, syncthreads, thread_idx, u32, u64
from epmoe_ref.errors import EPError, OutOfBoundsError

ROUNDS = 3
SHARED = 1024


def sender(
    fence=device.fence_proxy_async,
    barrier=syncthreads,
    commit=device.bulk_commit,
    reuse=device.bulk_wait_read,
    wait=device.bulk_wait,
):
    """Rank 0 stages rows in shared memory, bulk stores them and releases a flag; rank 1 acquires it and reads them."""

    @kernel()
    def send_rows(params, num_tokens, my_rank):
        i = thread_idx()
        if my_rank == 0:
            stage = dynamic_shared()
            for n in range(ROUNDS):
                device.shared_store_i32(stage + u32(4 * i), 100 * n + i)
                fence()
                barrier()
                if i == 0:
                    bulk_store(params + u64(OUT + 256 * n), stage, u32(256))
                    commit()
                    reuse()
                syncthreads()
            if i == 0:
                wait()
                device.st_release_sys_i32(params + u64(FLAG), 1)
        else:
            if i == 0:
                wait_for(device.ld_acquire_sys_i32, params + u64(FLAG), 1)
            syncthreads()
            for n in range(ROUNDS):
                store_i32(params + u64(DATA + 256 * n + 4 * i), device.load_i32(params + u64(OUT + 256 * n + 4 * i)))

    return send_rows


WORLD = dict(ranks=2, block=64, shared_bytes=SHARED)


@pytest.mark.parametrize(
    "mutation, said",
    [
        (dict(fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(barrier=nothing), "both are in one"),
        (dict(commit=nothing), "bulk_commit and bulk_wait_read"),
        (dict(reuse=nothing), "bulk_commit and bulk_wait_read by its thread are missing"),
        (dict(wait=device.bulk_wait_read), "bulk_commit and bulk_wait by its thread are missing"),
        (dict(wait=nothing), "bulk_commit and bulk_wait by its thread are missing"),
    ],
)
def test_each_mutation_of_the_sender_is_found(mutation, said):
    assert said in first_race(sender(**mutation), **WORLD)


def test_a_thread_may_not_end_before_its_copies_have_read():
    assert "bulk" in first_race(sender(reuse=nothing, wait=nothing), **WORLD)

    @kernel()
    def leaves(params, num_tokens, my_rank):
        if thread_idx() == 0:
            bulk_store(params + u64(OUT), dynamic_shared(), u32(256))
            device.bulk_commit()

    assert "ended while its bulk stores may still read shared memory" in first_race(leaves, shared_bytes=SHARED)


def receiver(
    init_fence=device.fence_proxy_async,
    init_barrier=syncthreads,
    wait=True,
    global_fence=device.fence_proxy_async,
    reuse_barrier=syncthreads,
):
    """Rank 0 writes rows and releases a flag; rank 1 acquires it and bulk loads the rows through shared memory."""

    @kernel()
    def receive_rows(params, num_tokens, my_rank):
        i = thread_idx()
        if my_rank == 0:
            for n in range(ROUNDS):
                store_i32(params + u64(OUT + 256 * n + 4 * i), 100 * n + i)
            syncthreads()
            if i == 0:
                device.st_release_sys_i32(params + u64(FLAG), 1)
        else:
            stage = dynamic_shared()
            bar = stage + u32(512)
            if i == 0:
                device.mbar_init(bar, u32(1))
                init_fence()
                wait_for(device.ld_acquire_sys_i32, params + u64(FLAG), 1)
                global_fence()
            init_barrier()
            for n in range(ROUNDS):
                if i == 0:
                    device.mbar_expect_tx(bar, u32(256))
                    bulk_load(stage, params + u64(OUT + 256 * n), u32(256), bar)
                if wait:
                    while device.mbar_try_wait(bar, u32(n & 1)) == 0:
                        pass
                store_i32(params + u64(DATA + 256 * n + 4 * i), device.shared_load_i32(stage + u32(4 * i)))
                reuse_barrier()

    return receive_rows


@pytest.mark.parametrize("side", [sender, receiver])
def test_a_correct_side_is_silent_and_its_rows_arrive(side):
    assert first_race(side(), seeds=range(6), **WORLD) is None
    got = execute(side(), seed=3, **WORLD)
    assert (got[DATA // 4 : DATA // 4 + 192] == (np.arange(ROUNDS)[:, None] * 100 + np.arange(64)).ravel()).all()


@pytest.mark.parametrize(
    "mutation, said",
    [
        (dict(global_fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(init_fence=nothing, global_fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(reuse_barrier=nothing), "nothing orders them: a syncthreads between them would"),
    ],
    ids=["global fence", "both fences", "barrier before the next round"],
)
def test_each_mutation_of_the_receiver_is_found(mutation, said):
    race = first_race(receiver(**mutation), seeds=range(8), **WORLD)
    assert race is not None and (said in race or "both are in one" in race), race


def test_the_receiver_has_to_wait():
    texts = [first_race(receiver(wait=False), seeds=[seed], **WORLD) for seed in range(8)]
    assert any("mbar_try_wait of its phase is missing" in text for text in texts)
    # the second kind of report comes if the copy is issued after the read
    assert all("mbar_try_wait" in text or "a syncwarp or syncthreads between" in text for text in texts)


def test_a_phase_that_does_not_count_the_bytes_is_told_as_that():
    @kernel()
    def forgets(params, num_tokens, my_rank):
        stage = dynamic_shared()
        device.mbar_init(stage + u32(512), u32(1))
        device.fence_proxy_async()
        device.mbar_arrive(stage + u32(512))  # not mbar_expect_tx
        bulk_load(stage, params, u32(256), stage + u32(512))
        while device.mbar_try_wait(stage + u32(512), u32(0)) == 0:
            pass
        device.shared_load_i32(stage)

    said = "or mbar_expect_tx of its bytes before that phase ended"
    assert said in first_race(forgets, block=1, shared_bytes=SHARED)


def test_a_copy_that_is_issued_after_a_read_without_a_wait():
    @kernel()
    def reads_first(params, num_tokens, my_rank):
        stage = dynamic_shared()
        if thread_idx() == 0:
            device.mbar_init(stage + u32(512), u32(1))
            device.fence_proxy_async()
        syncthreads()
        if thread_idx() == 40:
            device.shared_load_i32(stage)
        if thread_idx() == 0:
            device.mbar_expect_tx(stage + u32(512), u32(256))
            device.nanosleep(20)
            bulk_load(stage, params, u32(256), stage + u32(512))

    texts = [first_race(reads_first, seeds=[seed], block=64, shared_bytes=SHARED) for seed in range(12)]
    texts = [text for text in texts if text.splitlines()[1].startswith("  1. read")]
    assert texts
    for text in texts:
        assert text.endswith("if the first access is meant to find the copied bytes, it must come after mbar_try_wait")


def test_an_mbarrier_that_another_thread_has_not_seen_made():
    found = []
    for seed in range(8):
        try:
            execute(receiver(init_barrier=nothing), seed=seed, **WORLD)
        except EPError as error:
            found.append(str(error))
    assert found and any("mbar_init" in text for text in found)


def test_what_is_not_waited_for_is_really_old_without_the_detector():
    @kernel()
    def impatient(params, num_tokens, my_rank):
        stage = dynamic_shared()
        if thread_idx() == 0:
            device.mbar_init(stage + u32(512), u32(1))
            device.mbar_expect_tx(stage + u32(512), u32(256))
            bulk_load(stage, params, u32(256), stage + u32(512))
        syncthreads()
        store_i32(params + u64(OUT + 4 * thread_idx()), device.shared_load_i32(stage + u32(4 * thread_idx())))

    runs = [
        execute(impatient, block=64, shared_bytes=SHARED, seed=seed, racecheck=False)[OUT // 4 : OUT // 4 + 64]
        for seed in range(6)
    ]
    assert any((got == np.int32(np.uint32(0xA5A5A5A5).view(np.int32))).any() for got in runs)


@pytest.mark.parametrize(
    "copy, error, said",
    [
        (lambda at, stage: bulk_store(at, stage, u32(24)), EPError, "multiple of 16"),
        (lambda at, stage: bulk_store(at, stage, u32(2 * SHARED)), OutOfBoundsError, "shared address"),
        (lambda at, stage: bulk_store(at + u64(8), stage, u32(16)), OutOfBoundsError, "not 16-byte aligned"),
        (lambda at, stage: bulk_load(stage, at, u32(16), stage + u32(512)), EPError, "has not made an mbarrier"),
    ],
    ids=["odd size", "too long", "unaligned", "no mbarrier"],
)
def test_sizes_and_places_of_bulk_copies_are_checked(copy, error, said):
    with pytest.raises(error, match=said):
        execute(blocks(lambda flag, data: copy(flag, dynamic_shared())), shared_bytes=SHARED)
