"""Bulk copies need their waits and proxy fences: each mutation of a correct kernel is found."""

import numpy as np
import pytest
from litmus import DATA, FLAG, OUT, execute, first_race, nothing

from epmoe import device
from epmoe.device import (
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    dynamic_shared,
    fence_proxy_async,
    kernel,
    ld_acquire_sys_i32,
    load_i32,
    mbar_expect_tx,
    mbar_init,
    mbar_try_wait,
    shared_load_i32,
    shared_store_i32,
    st_release_sys_i32,
    store_i32,
    syncthreads,
    thread_idx,
    u32,
    u64,
)
from epmoe_ref.errors import EPError, OutOfBoundsError

ROUNDS = 3
SHARED = 1024


def sender(fence=fence_proxy_async, barrier=syncthreads, commit=bulk_commit, reuse=bulk_wait_read, wait=bulk_wait):
    """Rank 0 stages rows in shared memory, bulk stores them and releases a flag; rank 1 acquires it and reads them."""

    @kernel()
    def send_rows(params, num_tokens, my_rank):
        i = thread_idx()
        if my_rank == 0:
            stage = dynamic_shared()
            for n in range(ROUNDS):
                shared_store_i32(stage + u32(4 * i), 100 * n + i)
                fence()
                barrier()
                if i == 0:
                    bulk_store(params + u64(OUT + 256 * n), stage, u32(256))
                    commit()
                    reuse()
                syncthreads()
            if i == 0:
                wait()
                st_release_sys_i32(params + u64(FLAG), 1)
        else:
            if i == 0:
                while ld_acquire_sys_i32(params + u64(FLAG)) == 0:
                    pass
            syncthreads()
            for n in range(ROUNDS):
                store_i32(params + u64(DATA + 256 * n + 4 * i), load_i32(params + u64(OUT + 256 * n + 4 * i)))

    return send_rows


WORLD = dict(ranks=2, block=64, shared_bytes=SHARED)


def test_a_correct_sender_is_silent_and_sends():
    assert first_race(sender(), seeds=range(6), **WORLD) is None
    got = execute(sender(), seed=3, **WORLD)
    want = (np.arange(ROUNDS)[:, None] * 100 + np.arange(64)).ravel()
    assert (got[DATA // 4 : DATA // 4 + 192] == want).all()


@pytest.mark.parametrize(
    "mutation, said",
    [
        (dict(fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(barrier=nothing), "both are in one"),
        (dict(commit=nothing), "bulk_commit and bulk_wait_read"),
        (dict(reuse=nothing), "bulk_commit and bulk_wait_read is missing"),
        (dict(wait=bulk_wait_read), "bulk_commit and bulk_wait is missing"),
        (dict(wait=nothing), "bulk_commit and bulk_wait is missing"),
    ],
)
def test_each_mutation_of_the_sender_is_found(mutation, said):
    assert said in first_race(sender(**mutation), **WORLD)


def test_a_thread_may_not_end_before_its_copies_have_read():
    race = first_race(sender(reuse=nothing, wait=nothing), **WORLD)
    assert "bulk" in race

    @kernel()
    def leaves(params, num_tokens, my_rank):
        if thread_idx() == 0:
            bulk_store(params + u64(OUT), dynamic_shared(), u32(256))
            bulk_commit()

    assert "ended while its bulk stores may still read shared memory" in first_race(leaves, shared_bytes=SHARED)


def receiver(
    init_fence=fence_proxy_async,
    init_barrier=syncthreads,
    wait=True,
    global_fence=fence_proxy_async,
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
                st_release_sys_i32(params + u64(FLAG), 1)
        else:
            stage = dynamic_shared()
            bar = stage + u32(512)
            if i == 0:
                mbar_init(bar, u32(1))
                init_fence()
                while ld_acquire_sys_i32(params + u64(FLAG)) == 0:
                    pass
                global_fence()
            init_barrier()
            for n in range(ROUNDS):
                if i == 0:
                    mbar_expect_tx(bar, u32(256))
                    bulk_load(stage, params + u64(OUT + 256 * n), u32(256), bar)
                if wait:
                    while mbar_try_wait(bar, u32(n & 1)) == 0:
                        pass
                store_i32(params + u64(DATA + 256 * n + 4 * i), shared_load_i32(stage + u32(4 * i)))
                reuse_barrier()

    return receive_rows


def test_a_correct_receiver_is_silent_and_receives():
    assert first_race(receiver(), seeds=range(6), **WORLD) is None
    got = execute(receiver(), seed=2, **WORLD)
    assert (got[DATA // 4 : DATA // 4 + 192] == (np.arange(ROUNDS)[:, None] * 100 + np.arange(64)).ravel()).all()


@pytest.mark.parametrize(
    "mutation, said",
    [
        (dict(global_fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(init_fence=nothing, global_fence=nothing), "fence_proxy_async is missing between the two"),
        (dict(reuse_barrier=nothing), "syncthreads is missing between the two"),
    ],
)
def test_each_mutation_of_the_receiver_is_found(mutation, said):
    race = first_race(receiver(**mutation), seeds=range(8), **WORLD)
    assert race is not None and (said in race or "both are in one" in race), race


def test_the_receiver_has_to_wait():
    race = first_race(receiver(wait=False), **WORLD)
    assert "mbar_try_wait on its mbarrier is missing" in race


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
            mbar_init(stage + u32(512), u32(1))
            mbar_expect_tx(stage + u32(512), u32(256))
            bulk_load(stage, params, u32(256), stage + u32(512))
        syncthreads()
        store_i32(params + u64(OUT + 4 * thread_idx()), shared_load_i32(stage + u32(4 * thread_idx())))

    runs = [
        execute(impatient, block=64, shared_bytes=SHARED, seed=seed, racecheck=False)[OUT // 4 : OUT // 4 + 64]
        for seed in range(6)
    ]
    assert any((got == np.int32(np.uint32(0xA5A5A5A5).view(np.int32))).any() for got in runs)


def test_sizes_and_places_of_bulk_copies_are_checked():
    @kernel()
    def odd_size(params, num_tokens, my_rank):
        if thread_idx() == 0:
            bulk_store(params, dynamic_shared(), u32(24))

    @kernel()
    def too_long(params, num_tokens, my_rank):
        if thread_idx() == 0:
            bulk_store(params, dynamic_shared(), u32(2 * SHARED))

    @kernel()
    def unaligned(params, num_tokens, my_rank):
        if thread_idx() == 0:
            bulk_store(params + u64(8), dynamic_shared(), u32(16))

    @kernel()
    def no_mbarrier(params, num_tokens, my_rank):
        if thread_idx() == 0:
            device.bulk_load(dynamic_shared(), params, u32(16), dynamic_shared() + u32(512))

    with pytest.raises(EPError, match="multiple of 16"):
        execute(odd_size, shared_bytes=SHARED)
    with pytest.raises(OutOfBoundsError, match="shared address"):
        execute(too_long, shared_bytes=SHARED)
    with pytest.raises(OutOfBoundsError, match="not 16-byte aligned"):
        execute(unaligned, shared_bytes=SHARED)
    with pytest.raises(EPError, match="mbar_init has not made an mbarrier"):
        execute(no_mbarrier, shared_bytes=SHARED)
