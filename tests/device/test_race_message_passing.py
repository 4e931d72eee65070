"""Message passing: thread 0 writes data, then a flag; another thread sees the flag and reads the data.

Every way to write the flag with every way to read it, at every scope, between two warps, two blocks and two ranks. The
rule that predicts the detector's verdict is written here from the PTX memory model.
"""

import itertools
from functools import partial

import pytest
from litmus import DATA, FLAG, OUT, execute, first_race, nothing, race_of_blocks, wait_for

from epmoe import device
from epmoe.device import block_idx, i32, kernel, load_i32, store_i32, thread_idx, u64

SCOPES = {"cta": 1, "gpu": 2, "sys": 3}
BETWEEN = {"warps": 1, "blocks": 2, "ranks": 3}  # the scope that includes both threads
LAUNCH = {"warps": dict(block=64), "blocks": dict(grid=2), "ranks": dict(ranks=2)}
ADDS = [f"atomic_add_{order}" for order in ("release", "acq_rel", "acquire")]
STORES = [f"{op}_{order}" for op in ("st", "red_add") for order in ("release", "relaxed")]
WRITERS = [*STORES, "fence+st_relaxed", "fence+red_add_relaxed", *ADDS, "atomic_add_relaxed"]
READERS = ["ld_acquire", "ld_relaxed", "ld_relaxed+fence", *ADDS, "atomic_add_relaxed+fence"]


def op_of(way, scope):
    """(fence, operation) of a way such as "fence+st_relaxed"."""
    parts = way.split("+")
    name = next(p for p in parts if p != "fence")
    fence = getattr(device, f"fence_acq_rel_{scope}") if "fence" in parts else nothing
    return fence, getattr(device, f"{name}_{scope}_i32")


def side(between, my_rank):
    """Which of the two a thread belongs to, 0 or 1."""
    if between == "ranks":
        return my_rank
    return block_idx() if between == "blocks" else i32(thread_idx() // 32)


def passing(between, writer, write_scope, reader, read_scope):
    fence_before, write = op_of(writer, write_scope)
    fence_after, read = op_of(reader, read_scope)
    by_value = reader.startswith("ld")

    def look(flag):
        return read(flag) if by_value else read(flag, 0)

    @kernel()
    def pass_message(params, num_tokens, my_rank):
        if thread_idx() % 32 == 0:
            if side(between, my_rank) == 0:
                store_i32(params + u64(DATA), 42)
                fence_before()
                write(params + u64(FLAG), 1)
            else:
                wait_for(look, params + u64(FLAG), 1)
                fence_after()
                store_i32(params + u64(OUT), load_i32(params + u64(DATA)))

    return pass_message


def releases(writer):
    return "fence" in writer or "release" in writer or "acq_rel" in writer


def acquires(reader):
    return "fence" in reader or "acquire" in reader or "acq_rel" in reader


CASES = [(b, w, "sys", r, "sys") for b in BETWEEN for w in WRITERS for r in READERS]
PAIRS = (
    ("st_release", "ld_acquire"),
    ("fence+st_relaxed", "ld_relaxed+fence"),
    ("red_add_release", "atomic_add_acquire"),
)
CASES += [
    (b, w, ws, r, rs)
    for b in BETWEEN
    for w, r in PAIRS
    for ws, rs in itertools.product(SCOPES, SCOPES)
    if (ws, rs) != ("sys", "sys")
]


@pytest.mark.parametrize("between, writer, write_scope, reader, read_scope", CASES)
def test_the_verdict_is_that_of_the_memory_model(between, writer, write_scope, reader, read_scope):
    wide_enough = min(SCOPES[write_scope], SCOPES[read_scope]) >= BETWEEN[between]
    correct = releases(writer) and acquires(reader) and wide_enough
    made = passing(between, writer, write_scope, reader, read_scope)
    race = first_race(made, seeds=(0,) if correct else range(4), **LAUNCH[between])
    if correct:
        assert race is None, race
        assert execute(made, seed=None, **LAUNCH[between])[OUT // 4] == 42
        return
    assert race is not None
    if wide_enough:
        assert "data[thread 0, word 0] of rank 0" in race
        assert "load_i32" in race and "store_i32" in race
        if not acquires(reader):
            assert releases(writer) is False or "the read is relaxed" in race
        else:
            assert "the write is relaxed" in race
    else:
        assert "flag[slot 0]" in race and "do not include each other" in race


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("plain", ["store", "load"])
def test_a_plain_flag_is_a_race_itself(between, plain):
    write = store_i32 if plain == "store" else device.st_release_sys_i32
    read = load_i32 if plain == "load" else device.ld_acquire_sys_i32

    @kernel()
    def plain_flag(params, num_tokens, my_rank):
        if thread_idx() % 32 == 0:
            if side(between, my_rank) == 0:
                write(params + u64(FLAG), 1)
            else:
                wait_for(read, params + u64(FLAG), 1)

    race = first_race(plain_flag, **LAUNCH[between])
    assert "flag[slot 0]" in race and "one of them is a plain access" in race


@pytest.mark.parametrize("width", ["u64", "u32", "i32"])
def test_strong_accesses_of_different_width_race(width):
    write = getattr(device, f"st_release_sys_{width}")
    read = partial(wait_for, device.ld_acquire_sys_u32)
    race = race_of_blocks(lambda flag, data: write(flag, 1), lambda flag, data: read(flag, 1))
    if width == "u64":
        assert "both are strong, but differ in address or size" in race
    else:
        assert race is None


def test_data_behind_the_release_is_not_covered():
    def tells_too_early(flag, data):
        device.st_release_gpu_i32(flag, 1)
        store_i32(data, 42)

    def reads(flag, data):
        wait_for(device.ld_acquire_gpu_i32, flag, 1)
        load_i32(data)

    race = race_of_blocks(tells_too_early, reads)
    assert "data[thread 0, word 0]" in race and ("but not after this one" in race or "acquired nothing" in race)


def test_a_look_of_too_narrow_a_scope_counts_even_if_wider_ones_follow():
    def looks_twice(flag, data):
        if device.ld_relaxed_cta_i32(flag) != 1:
            wait_for(device.ld_acquire_gpu_i32, flag, 1)

    race = race_of_blocks(lambda flag, data: device.st_release_gpu_i32(flag, 1), looks_twice)
    assert "the scopes" in race and "do not include each other's thread" in race and "did not" not in race
