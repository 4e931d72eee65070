"""The report on each common mistake: the two accesses, then the cause, and never a wrong cause."""

import pytest
from litmus import DATA, FLAG, OUT, first_race, line_of, nothing, wait_for

from epmoe import device
from epmoe.device import block_idx, kernel, load_i32, store_i32, syncthreads, thread_idx, u64

FENCE, RELAXED_TELL, RELAXED_LOOK = device.fence_acq_rel_gpu, device.st_relaxed_gpu_i32, device.ld_relaxed_gpu_i32
RELAXED = dict(tell=RELAXED_TELL, look=RELAXED_LOOK)


def passing(
    *,
    tells_first=False,
    fence=nothing,
    tell=device.st_release_gpu_i32,
    barrier=syncthreads,
    waits=True,
    look=device.ld_acquire_gpu_i32,
    fence_behind=nothing,
):
    """Block 0 writes and signals; block 1 polls and reads. Each argument makes one mistake."""

    @kernel()
    def passes(params, num_tokens, my_rank):
        at = params + u64(DATA + 4 * thread_idx())
        if block_idx() == 0:
            if tells_first and thread_idx() == 0:
                tell(params + u64(FLAG), 1)  # too early
            store_i32(at, 42)
            barrier()
            if not tells_first and thread_idx() == 0:
                fence()
                tell(params + u64(FLAG), 1)  # in time
        else:
            if waits:
                while look(params + u64(FLAG)) == 0:  # the look
                    pass
                fence_behind()
            store_i32(params + u64(OUT + 4 * thread_idx()), load_i32(at))

    return passes


def reports(seeds=range(8), block=32, **mistake):
    """(kernel, the reports of some schedules)."""
    program = passing(**mistake)
    texts = [first_race(program, seeds=(seed,), grid=2, block=block) for seed in seeds]
    return program, [text for text in texts if text]


def test_a_right_one_has_no_report():
    assert reports()[1] == []
    assert reports(**RELAXED, fence=FENCE, fence_behind=FENCE)[1] == []


MISTAKES = {  # name: (arguments of passing, threads of a block, the comment at the signal)
    "telling before writing": (dict(tells_first=True), 1, "too early"),
    "telling before writing, in a warp": (dict(tells_first=True), 32, "too early"),
    "not waiting": (dict(waits=False), 32, None),
    "a relaxed flag": (dict(tell=RELAXED_TELL), 32, "in time"),
    "a relaxed look": (dict(look=RELAXED_LOOK), 32, "in time"),
    "no fence before the flag": (dict(**RELAXED, fence_behind=FENCE), 32, "in time"),
    "no fence behind the look": (dict(**RELAXED, fence=FENCE), 32, "in time"),
    "no barrier": (dict(barrier=nothing), 32, "in time"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_line_names_the_two_accesses(name):
    mistake, block, _ = MISTAKES[name]
    program, texts = reports(block=block, **mistake)
    write, read = line_of(program, "store_i32(at, 42)"), line_of(program, "load_i32(at)")
    assert texts
    for text in texts:
        first = text.splitlines()[0]
        assert first.startswith("data race on data[thread ")
        assert first.endswith(
            "of rank 0: the read at %s is not ordered after the write at %s" % (read, write)
        ) or first.endswith("of rank 0: the write at %s is not ordered after the read at %s" % (write, read))


def said(name, way):
    """Reports of a mistake in which the write came first (way "write"), or the read; and the line of the signal."""
    mistake, block, told = MISTAKES[name]
    program, texts = reports(range(16), block, **mistake)
    texts = [t for t in texts if t.splitlines()[1].startswith("  1. " + way)]
    assert texts
    return texts, told and line_of(program, told), line_of(program, "# the look")


def test_telling_before_writing_is_told_as_that():
    texts, at, _ = said("telling before writing", "write")
    for text in texts:
        assert text.endswith("but not after this one: the release comes before it, %s st_release_gpu_i32" % at)
    texts, at, _ = said("telling before writing, in a warp", "write")
    for text in texts:
        assert "not after this one: the release comes before it, %s" % at in text or text.endswith(
            "a syncwarp or syncthreads is missing before its release, %s st_release_gpu_i32" % at
        )
        assert "did not synchronise" not in text


def test_not_waiting_is_told_as_that():
    for text in said("not waiting", "read")[0]:
        assert text.endswith("here the read came first: if it is meant to see the write, it does not wait for it")
    for text in said("not waiting", "write")[0]:
        assert text.endswith("the second access's thread does not wait for one") or text.endswith(
            "st_release_gpu_i32, to flag[slot 0] of rank 0; the second access's thread does not acquire that word"
        )
        assert "did not synchronise" not in text


@pytest.mark.parametrize(
    "name, ops, why",
    [
        ("a relaxed flag", ("st_relaxed_gpu_i32", "ld_acquire_gpu_i32"), "the write is relaxed"),
        ("a relaxed look", ("st_release_gpu_i32", "ld_relaxed_gpu_i32"), "the read is relaxed"),
        ("no fence before the flag", ("st_relaxed_gpu_i32", "ld_relaxed_gpu_i32"), "the write is relaxed"),
        ("no fence behind the look", ("st_relaxed_gpu_i32", "ld_relaxed_gpu_i32"), "the read is relaxed"),
    ],
)
def test_the_pair_that_did_not_synchronise_is_named(name, ops, why):
    texts, told, look = said(name, "write")
    for text in texts:
        assert text.endswith("did not synchronise: %s %s -> %s %s: %s" % (told, ops[0], look, ops[1], why))


def test_a_missing_barrier_is_told_with_the_release_that_it_should_precede():
    texts, told, _ = said("no barrier", "write")
    for text in texts:
        assert text.endswith("a syncwarp or syncthreads is missing before its release, %s st_release_gpu_i32" % told)


def test_two_lanes_that_write_at_one_line_need_no_barrier():
    race = first_race(kernel()(lambda params, num_tokens, my_rank: store_i32(params, 1)))
    assert race.endswith("both are in one warp, and both write here: only one of them should, or use an atomic")


def test_adds_that_count_for_several_are_not_blamed():
    """Two blocks count with releasing adds: that neither acquires the other's is no mistake."""

    @kernel()
    def counts_first(params, num_tokens, my_rank):
        if block_idx() < 2:
            device.red_add_release_gpu_i32(params + u64(FLAG), 1)
            store_i32(params + u64(DATA + 4 * block_idx()), 42)
        else:
            wait_for(device.ld_acquire_gpu_i32, params + u64(FLAG), 2)
            load_i32(params + u64(DATA))
            load_i32(params + u64(DATA + 4))

    texts = [first_race(counts_first, seeds=(seed,), grid=3, block=1) for seed in range(8)]
    texts = [text for text in texts if text and text.splitlines()[1].startswith("  1. write")]
    assert texts
    for text in texts:
        assert "the release comes before it, %s" % line_of(counts_first, "red_add_release") in text
        assert "did not synchronise" not in text


def counting(*, add=device.red_add_release_sys_i32, fence=nothing, barrier=syncthreads):
    """Each of three ranks claims slots, writes them, and counts. Rank 0 waits for all and reads."""

    @kernel()
    def counts(params, num_tokens, my_rank):
        slot = device.atomic_add_relaxed_sys_i32(params + u64(FLAG), 1)  # the claim
        store_i32(params + u64(DATA + 4 * slot), my_rank)
        fence()
        barrier()
        if thread_idx() == 0:
            add(params + u64(FLAG + 16), 1)  # the count
        if my_rank == 0:
            if thread_idx() == 0:
                while device.ld_acquire_sys_i32(params + u64(FLAG + 16)) < 3:  # the wait
                    pass
            syncthreads()
            for i in range(3):
                load_i32(params + u64(DATA + 4 * (thread_idx() + device.block_dim() * i)))

    texts = [first_race(counts, seeds=(seed,), ranks=3) for seed in range(12)]
    return counts, [text for text in texts if text]


def test_a_relaxed_count_is_blamed_and_not_the_claims_before_the_writes():
    program, texts = counting(add=device.red_add_relaxed_sys_i32)
    assert texts
    for text in texts:
        assert [line for line in text.splitlines() if "did not synchronise" in line] == [
            "  did not synchronise: %s red_add_relaxed_sys_i32 -> %s ld_acquire_sys_i32: the write is relaxed"
            % (line_of(program, "the count"), line_of(program, "the wait"))
        ]


def test_a_fence_before_the_barrier_is_told_as_that():
    assert counting()[1] == []
    program, texts = counting(add=device.red_add_relaxed_sys_i32, fence=device.fence_acq_rel_sys)
    assert texts
    for text in texts:
        assert text.endswith(
            "before its release, the fence before %s red_add_relaxed_sys_i32" % line_of(program, "the count")
        )


def test_the_remedy_for_a_narrow_scope_and_for_a_sum_without_atomics():
    narrow = kernel()(lambda params, num_tokens, my_rank: device.red_add_release_gpu_i32(params, 1))
    assert "the scopes gpu and gpu do not include each other's thread: both need scope sys" in first_race(
        narrow, ranks=2
    )
    narrow = kernel()(lambda params, num_tokens, my_rank: device.red_add_release_cta_i32(params, 1))
    assert first_race(narrow, grid=2).endswith("both need scope gpu or sys")
    adds = kernel()(lambda params, num_tokens, my_rank: store_i32(params, load_i32(params) + 1))
    texts = [first_race(adds, seeds=(seed,)) for seed in range(8)]
    assert any(text.endswith("if they all add to one number, use an atomic") for text in texts)
