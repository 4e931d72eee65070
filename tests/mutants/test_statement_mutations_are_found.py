"""Mutants of statements: each kind is found where it should be."""

from epmoe.mutants import hunt
from epmoe.mutants.statement_mutations import statement_mutations_of

SOURCE = """
def make(at):
    def f(words, my_rank, owner, count):
        i = thread_idx()
        store_i32(words, count)
        copy(words, i)
        red_add_release_gpu_i32(words + at.finished, i32(1))   # adds
        syncthreads()
        store_i32(words + at.reserved, i32(0))
        ok = wait_for_own_blocks(words + at.finished,
                                 count, at.status)
        last = atomic_add_acq_rel_gpu_i32(words + at.d, i32(1)) == count - 1
        signal(owner, my_rank, count)
        there = waits.wait_for_counter(words + at.e, READY, waiter)
        return ok and last and there
"""


def found(kind):
    return [
        (s.token.line, s.new.splitlines()[0].strip()) for s in statement_mutations_of("f.py", SOURCE) if s.kind == kind
    ]


def test_neighbours_change_places_unless_one_needs_the_other():
    assert [line for line, _ in found("swap")] == [6, 7, 8, 9, 10, 12]
    assert found("swap")[0] == (6, "red_add_release_gpu_i32(words + at.finished, i32(1))")


def test_what_releases_comes_early():
    assert (4, "red_add_release_gpu_i32(words + at.finished, i32(1)); i = thread_idx()") in found("early")


def test_resets_are_left_out_somewhere():
    assert found("skip") == [
        (9, "if (thread_idx() + block_idx()) & 1 == 0: store_i32(words + at.reserved, i32(0))"),
        (9, "if my_rank & 1 == 0: store_i32(words + at.reserved, i32(0))"),
    ]


def test_numbers_are_wrong():
    assert found("off by one") == [
        (10, "((count) - 1)"),
        (10, "((count) + 1)"),
        (12, "((count - 1) - 1)"),
        (12, "((count - 1) + 1)"),
        (14, "((READY) - 1)"),
        (14, "((READY) + 1)"),
    ]
    assert found("twice") == [(7, "i32(2)"), (12, "i32(2)")]
    assert (13, "owner") in found("whose") and (13, "my_rank") in found("whose")


def test_a_release_and_its_acquire_are_found_by_running():
    from epmoe.mutants.pairs import seen_in, statement_mutations_of_pairs
    from epmoe.mutants.worlds import WORLDS

    assert not statement_mutations_of_pairs(set())
    pairs = statement_mutations_of_pairs(seen_in(lambda: hunt.attempt(WORLDS["idle blocks"], 0, {})))
    assert pairs and all("become relaxed" in s.what and s.other for s in pairs)
    edits = hunt.edits_of(pairs[0])
    assert all("_relaxed_" in text for text in (pairs[0].new, pairs[0].other.new))
    assert set(edits) == {pairs[0].token.file, pairs[0].other.token.file}
