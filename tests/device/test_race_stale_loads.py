"""Stale mode: a strong load may return an older value that no known write hides."""

import pytest
from litmus import FLAG, OUT, execute

from epmoe import device
from epmoe.device import block_idx, i32, kernel, st_relaxed_gpu_i32, store_i32, thread_idx, u64

MESSAGE = 256


def relaxed_message(write, read):
    """Message passing in which the message is strong too: no data race, yet wrong without release and acquire."""
    store, load = getattr(device, "st_%s_gpu_i32" % write), getattr(device, "ld_%s_gpu_i32" % read)

    @kernel()
    def message(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                st_relaxed_gpu_i32(params + u64(MESSAGE), 42)
                store(params + u64(FLAG), 1)
            else:
                while load(params + u64(FLAG)) == 0:
                    pass
                store_i32(params + u64(OUT), device.ld_relaxed_gpu_i32(params + u64(MESSAGE)))

    return message


def results(made, stale, seeds=range(40)):
    return {int(execute(made, grid=2, seed=seed, stale=stale)[OUT // 4]) for seed in seeds}


def test_release_and_acquire_deliver_the_message():
    assert results(relaxed_message("release", "acquire"), stale=True) == {42}


@pytest.mark.parametrize("write, read", [("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")])
def test_without_them_the_old_value_may_be_seen(write, read):
    assert results(relaxed_message(write, read), stale=True) == {0, 42}
    assert results(relaxed_message(write, read), stale=False, seeds=range(8)) == {42}


def test_a_value_once_seen_is_not_forgotten():
    @kernel()
    def counting(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                for n in range(20):
                    st_relaxed_gpu_i32(params, n + 1)
            else:
                last = 0
                while last < 20:
                    now = device.ld_relaxed_gpu_i32(params)
                    if now < last:
                        store_i32(params + u64(OUT), 1)
                    last = i32(now)

    assert results(counting, stale=True, seeds=range(10)) == {0}


def test_a_wait_sees_the_newest_value_in_the_end():
    @kernel()
    def waits(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                st_relaxed_gpu_i32(params, 1)
                st_relaxed_gpu_i32(params, 2)
            else:
                while device.ld_relaxed_gpu_i32(params) != 2:
                    pass
                store_i32(params + u64(OUT), 7)

    assert results(waits, stale=True, seeds=range(10)) == {7}


def test_what_a_store_of_another_size_has_left_is_no_older_value():
    """Words of 8 bytes, and then, after a release, words of 4 at the same address."""

    @kernel()
    def of_two_sizes(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                device.st_relaxed_gpu_u64(params + u64(MESSAGE), u64(2**40))
                device.st_release_gpu_i32(params + u64(FLAG), 1)
                device.st_relaxed_gpu_u32(params + u64(MESSAGE), 1)
                device.st_relaxed_gpu_u32(params + u64(MESSAGE), 2)
            else:
                while device.ld_acquire_gpu_i32(params + u64(FLAG)) == 0:
                    pass
                now = 0
                while now != 2:
                    now = device.ld_relaxed_gpu_u32(params + u64(MESSAGE))
                    if now > 2:
                        store_i32(params + u64(OUT), 1)

    assert results(of_two_sizes, stale=True) == {0}
