"""Stale mode: a strong load may return an older value that no known write hides."""

import pytest
from litmus import OUT, blocks, execute, wait_for

from epmoe import device
from epmoe.device import i32, st_relaxed_gpu_i32, store_i32, u64

FROM_DATA = OUT - 64  # the result, from the data


def results(*programs, stale=True, seeds=range(40)):
    """What blocks that run one of these programs each leave as the result."""
    made = blocks(*programs)
    return {int(execute(made, grid=2, seed=seed, stale=stale)[OUT // 4]) for seed in seeds}


def relaxed_message(write, read):
    """Message passing in which the message is strong too: no data race, yet wrong without release and acquire."""
    store, load = getattr(device, f"st_{write}_gpu_i32"), getattr(device, f"ld_{read}_gpu_i32")

    def writes(flag, message):
        st_relaxed_gpu_i32(message, 42)
        store(flag, 1)

    def reads(flag, message):
        wait_for(load, flag, 1)
        store_i32(message + u64(FROM_DATA), device.ld_relaxed_gpu_i32(message))

    return writes, reads


def test_release_and_acquire_deliver_the_message():
    assert results(*relaxed_message("release", "acquire")) == {42}


@pytest.mark.parametrize("write, read", [("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")])
def test_without_them_the_old_value_may_be_seen(write, read):
    assert results(*relaxed_message(write, read)) == {0, 42}
    assert results(*relaxed_message(write, read), stale=False, seeds=range(8)) == {42}


def test_a_value_once_seen_is_not_forgotten():
    def counts(flag, data):
        for n in range(20):
            st_relaxed_gpu_i32(flag, n + 1)

    def looks(flag, data):
        last = 0
        while last < 20:
            now = device.ld_relaxed_gpu_i32(flag)
            if now < last:
                store_i32(data + u64(FROM_DATA), 1)
            last = i32(now)

    assert results(counts, looks, seeds=range(10)) == {0}


def test_a_wait_sees_the_newest_value_in_the_end():
    def stores(flag, data):
        st_relaxed_gpu_i32(flag, 1)
        st_relaxed_gpu_i32(flag, 2)

    def waits(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag, 2)
        store_i32(data + u64(FROM_DATA), 7)

    assert results(stores, waits, seeds=range(10)) == {7}


def test_what_a_store_of_another_size_has_left_is_no_older_value():
    """Words of 8 bytes, and then, after a release, words of 4 at the same address."""

    def stores(flag, message):
        device.st_relaxed_gpu_u64(message, u64(2**40))
        device.st_release_gpu_i32(flag, 1)
        device.st_relaxed_gpu_u32(message, 1)
        device.st_relaxed_gpu_u32(message, 2)

    def looks(flag, message):
        wait_for(device.ld_acquire_gpu_i32, flag, 1)
        now = 0
        while now != 2:
            now = device.ld_relaxed_gpu_u32(message)
            if now > 2:
                store_i32(message + u64(FROM_DATA), 1)

    assert results(stores, looks) == {0}
