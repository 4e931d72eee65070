"""Handles are good for any number of calls, results stay as they were, and the buffer grows without either noticing."""

import copy
import gc
import pickle

import numpy as np
import pytest
from against_reference import equal_hybrid
from rows_group import assert_same, group_of, host, routing, tokens

from epmoe import LocalWorld, fused_a2a
from epmoe.device.sim.memory import MEMORY
from epmoe.fused_a2a import buffers
from epmoe.host.memory_pool import Arrangement, MemoryPool, size_class
from epmoe.kernels.rows import mailbox, wait
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPStateError, EPValueError, PeerTimeout
from epmoe_ref.strategies import HybridWorld


def dispatched(group, rng, num_tokens=(4, 3), hidden=8):
    ids, probs = routing(rng, num_tokens, 4, 2)
    x = tokens(rng, num_tokens, hidden)
    return fused_a2a.fused_dispatch(x, ids, probs, 4, group), reference.dispatch_forward(x, ids, probs, 4)


def test_a_copy_of_a_handle_is_the_handle_and_a_pickle_is_refused():
    (*_, handle), _ = dispatched(group_of(2), np.random.default_rng(1))
    assert copy.copy(handle) is copy.deepcopy([handle])[0] is handle
    with pytest.raises(TypeError, match="RowsHandle is the routing of one fused_dispatch.*dispatch again"):
        pickle.dumps(handle)


def test_a_handle_serves_calls_of_other_sizes_and_types_and_survives_growth_as_results_do():
    group, rng = group_of(2), np.random.default_rng(1)
    (*results, handle), (*want, known) = dispatched(group, rng)
    buffer = fused_a2a.get_buffer(group, 0)
    for hidden, dtype, grows in ((8, np.float16, False), (24, np.float32, True), (8, np.float16, False)):
        rows = tokens(rng, known.num_rows, hidden, dtype)
        combined, _ = fused_a2a.fused_combine(rows, group, handle)
        assert_same(combined, reference.combine_forward(rows, known), "combined")
        if grows:
            before = buffer.allocated_bytes
            dispatched(group, rng, (8, 4), 64)
            assert buffer.allocated_bytes > before
            assert_same(results[0], want[0], "the result from before")


def test_memory_that_grew_on_some_ranks_only_is_replaced_and_its_results_stay(monkeypatch):
    group, rng, freed = group_of(2), np.random.default_rng(3), []
    (*results, handle), (*want, known) = dispatched(group, rng)
    buffer = fused_a2a.get_buffer(group, 0)
    (memory, *_), tell = buffer.pool.buffers.values(), buffer.world.tell
    memory.free = lambda free=memory.free: (freed.append(memory), free())
    buffer.turn.fail("fused_dispatch", MemoryError())

    def uneven(value, timeout):
        return [value, (value[0], [1], *value[2:])] if isinstance(value, tuple) else tell(value, timeout)

    monkeypatch.setattr(group, "tell", uneven)
    buffer.captured.append(())  # of a graph
    with pytest.raises(
        EPStateError, match="grow on some ranks only, and CUDA graphs use this buffer's: close the buffer"
    ):
        buffer.reset()
    buffer.captured.clear()
    buffer.reset()
    assert not freed
    assert_same(results[0], want[0], "the result from before")
    del results
    rows = tokens(rng, known.num_rows, 8)
    combined, _ = fused_a2a.fused_combine(rows, group, handle)
    assert_same(combined, reference.combine_forward(rows, known), "combined")
    assert freed == [memory]


class OneRank(LocalWorld):
    """A rank whose arguments are no lists, as with one rank a process."""

    lists = False


def test_freeing_a_hybrid_ep_buffer_ends_graphs_but_not_while_another_call_uses_it(monkeypatch):
    group, rng = OneRank(1), np.random.default_rng(4)
    (x,) = tokens(rng, (3,), 16)
    fused_a2a.hybrid_ep_dispatch(x, np.ones((3, 2), bool), None, group, 2)
    buffer = buffers.hybrid_ep_buffer(group)
    buffer.captured.append(())  # of a graph
    buffer.turn.thread = None  # another thread's call is under way
    buffer.turn.free.clear()
    with pytest.raises(EPStateError, match="another call is under way"):
        fused_a2a.reset_hybrid_ep_buffer(group)
    assert buffer.captured and buffers.hybrid_ep_buffer(group) is buffer
    buffer.turn.free[:] = (True,)
    buffer.turn.fail("hybrid_ep_dispatch", MemoryError())
    monkeypatch.setattr(group, "tell", lambda value, timeout: [value, (value[0], [1], *value[2:])])
    fused_a2a.reset_hybrid_ep_buffer(group)
    assert buffer.closed and not buffer.captured


def test_outgrown_memory_is_freed_once_no_result_is_in_it():
    group, rng, freed = group_of(2), np.random.default_rng(3), []
    (*results, _), (*want, _) = dispatched(group, rng)
    buffer = fused_a2a.get_buffer(group, 0)
    outgrown = list(buffer.pool.buffers.values())
    for memory in outgrown:
        memory.free = lambda memory=memory, free=memory.free: (freed.append(memory), free())
    for _ in range(2):
        dispatched(group, rng, (8, 4), 64)
    assert not freed
    assert_same(results[0], want[0], "the result from before")
    del results
    dispatched(group, rng, (8, 4), 64)
    assert set(freed) == set(outgrown)


def test_outgrown_memory_is_freed_after_close_too():
    group, rng, freed = group_of(1), np.random.default_rng(3), []
    (*results, _), _ = dispatched(group, rng, (4,))
    buffer = fused_a2a.get_buffer(group, 0)
    (outgrown,) = buffer.pool.buffers.values()
    outgrown.free = lambda free=outgrown.free: (freed.append(outgrown), free())
    dispatched(group, rng, (8,), 64)
    buffer.close()
    assert not freed
    del results
    assert freed == [outgrown]


def test_calls_numbered_anew_find_nothing_of_earlier_ones_in_memory_that_captured_graphs_use():
    """Flags and mailboxes hold numbers of calls. Those of an earlier pool would name calls to come."""
    group, rng = group_of(2), np.random.default_rng(8)

    def dispatch(n):
        maps = [rng.random((n, 4)) < 0.5 for _ in range(2)]
        probs = [rng.random(m.shape, np.float32) for m in maps]
        fused_a2a.hybrid_ep_dispatch(tokens(rng, (n, n), 16), maps, probs, group, 2)

    dispatch(9)
    buffer = buffers.hybrid_ep_buffer(group)
    buffer.captured.append(())  # of a graph
    used = [(memory, buffer.pool_layout.flag_bytes) for memory in buffer.pool.buffers.values()]
    used += [(memory, memory.nbytes) for memory in buffer.control.buffers.values()]

    def hold_something():
        return [memory.read(np.uint8, (nbytes,)).any() for memory, nbytes in used]

    dispatch(30)
    assert all(hold_something()) and buffer.pool.buffers[0] is not used[0][0]
    buffer.initialise()
    assert not any(hold_something())
    with pytest.raises(EPStateError, match="a larger one has 128 experts a rank, more than 64, and CUDA graphs use"):
        buffer.make_room("a larger one", 2 * buffer.n_local_experts)


@pytest.mark.parametrize("source", [0, 1])
def test_a_rank_may_get_back_more_rows_than_any_rank_has_ever_received(source):
    """As many tokens go to a rank as before, and no more; but all of them are one rank's, and go to both."""
    group, rng = group_of(2), np.random.default_rng(5)
    for sizes in ((3, 3), (7, 0) if source == 0 else (0, 7)):
        maps = [np.arange(n)[:, None] % 8 < np.array([5, 0, 5, 0]) for n in sizes]
        probs, x = [rng.random(m.shape, np.float32) for m in maps], tokens(rng, sizes, 16)
        equal_hybrid(group, HybridWorld(x, maps, probs, 2, None, None, False, None), rng, hidden=16)
    # known to all, so a budget next would find room
    assert buffers.hybrid_ep_buffer(group).max_tokens == 7


def test_the_most_tokens_of_a_rank_are_remembered_also_where_all_rows_have_room():
    """A call that does not look at the device may have as many next, on one rank alone."""
    group, rng = group_of(2), np.random.default_rng(6)
    dispatched(group, rng, (3, 3))
    ids = [np.full((n, 1), -1) for n in (0, 7)]
    fused_a2a.fused_dispatch(tokens(rng, (0, 7), 8), ids, [a.astype(np.float32) for a in ids], 4, group)
    assert fused_a2a.get_buffer(group, 0).max_tokens == 7


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_gradients_with_wrong_numbers_of_rows_are_not_taken_as_left_out(n_ranks):
    group, rng = group_of(n_ranks), np.random.default_rng(5)
    (*_, handle), (*_, known) = dispatched(group, rng, (4, 3)[:n_ranks])
    rows, ctx = tokens(rng, known.num_rows, 8), fused_a2a.Context()
    ctx.group, ctx.handle = group, handle
    for _ in range(2):  # the second is done by the plan of the first, when memory has grown
        assert fused_a2a.FusedDispatch.backward(ctx, rows, None, None, None, None)[2] is None
    wrong = [np.zeros((n + 1, 2), np.float32) for n in known.num_rows]
    with pytest.raises(EPValueError, match="probs of grad_output of rank 0 has . rows, . are need"):
        fused_a2a.FusedDispatch.backward(ctx, rows, None, wrong, None, None)


def test_results_that_are_kept_are_not_written_again():
    """More than the heap has room for: later ones are received in the staging area and moved."""
    group, rng = group_of(2), np.random.default_rng(3)
    kept = [dispatched(group, rng) for _ in range(3)]
    for got, want in kept:
        for one, other, name in zip(got[:4], want[:4], ("recv_x", "recv_token_indices", "recv_token_probs", "counts")):
            assert_same(one, other, name)
    back = [fused_a2a.FusedCombine.backward(ctx_of(group, got[4]), tokens(rng, (4, 3), 8))[0] for got, _ in kept]
    copies = host(back)
    dispatched(group, rng)
    assert_same(back, copies, "rows of cached dispatches")


def ctx_of(group, handle):
    ctx = fused_a2a.Context()
    ctx.group, ctx.handle = group, handle
    return ctx


def test_without_a_wait_of_the_host_results_have_room_for_the_worst_case():
    """More calls than the heap has room for, so that some results come through the staging area."""
    group, rng, kept = group_of(2), np.random.default_rng(7), []
    for _ in range(3):
        ids, probs = routing(rng, (4, 3), 4, 2)
        x = tokens(rng, (4, 3), 8)
        kept.append(
            (fused_a2a.fused_dispatch_on_device(x, ids, probs, 4, group), reference.dispatch_forward(x, ids, probs, 4))
        )
    for (*got, handle), (*want, known) in kept:
        assert all(len(a) == 2 * 4 for a in got[0]) and handle.num_rows == [8, 8]
        of_src_rank = [np.bincount(r, minlength=2) for r in known.src_rank]
        assert all(map(np.array_equal, host(handle.recv_count), of_src_rank))
        for one, other in zip(got, want):
            assert_same([a[: len(b)] for a, b in zip(host(one), other)], other, "the rows that hold tokens")
        rows = [np.full((8, 16), np.nan, np.float16) for _ in range(2)]
        for a, n in zip(rows, known.num_rows):
            a[:n] = rng.standard_normal((n, 16))
        wanted = reference.combine_forward([a[:n] for a, n in zip(rows, known.num_rows)], known)
        combined, _ = fused_a2a.fused_combine(rows, group, handle)
        assert_same(combined, wanted, "combined")
        back = fused_a2a.FusedCombine.backward(ctx_of(group, handle), combined)[0]
        back = [a[:n] for a, n in zip(host(back), known.num_rows)]
        assert_same(back, reference.combine_backward(known, wanted), "back")


def test_a_steady_state_takes_no_more_memory():
    group, rng = group_of(2), np.random.default_rng(4)

    def one():
        (recv_x, *_, handle), _ = dispatched(group, rng, (2, 1))
        fused_a2a.fused_combine(recv_x, group, handle)
        maps = [np.ones((1, 4), bool)] * 2
        hidden, *_, handle = fused_a2a.hybrid_ep_dispatch(tokens(rng, (1, 1), 8), maps, None, group, 2)
        fused_a2a.hybrid_ep_combine(hidden, handle)

    used = [fused_a2a.get_buffer(group, 0), buffers.hybrid_ep_buffer(group)]
    one()
    one()
    before = [b.allocated_bytes for b in used], n_spans()
    for _ in range(2):
        one()
    assert ([b.allocated_bytes for b in used], n_spans()) == before


def n_spans():
    """Buffers and arrays that the simulator knows of."""
    gc.collect()  # groups of earlier tests
    return len(MEMORY.spans)


def test_a_group_that_is_gone_leaves_no_memory():
    gc.collect()
    before = len(MEMORY.spans)
    group, rng = LocalWorld(2), np.random.default_rng(5)
    recv_x = dispatched(group, rng)[0][0]
    fused_a2a.init_hybrid_ep_buffer(group, 8, 4, 2, 24, 24, False)
    assert len(MEMORY.spans) > before
    copies = host(recv_x)
    del group
    gc.collect()
    assert_same(recv_x, copies, "a result that outlives its group")
    del recv_x
    gc.collect()
    assert len(MEMORY.spans) == before


def test_one_buffer_a_group():
    one, other = group_of(2), group_of(2)
    buffer = fused_a2a.get_buffer(one, 16)
    assert fused_a2a.get_buffer(one, 64) is buffer
    assert fused_a2a.get_buffer(other, 16) is not buffer and fused_a2a.get_buffer(one, 16) is buffer
    buffer.close()
    assert fused_a2a.get_buffer(one, 16) is not buffer


def test_the_hybrid_buffer_is_replaced_and_handles_stay_good():
    group, rng = group_of(2), np.random.default_rng(6)
    x, maps = tokens(rng, (3, 2), 128), [rng.random((n, 4)) < 0.6 for n in (3, 2)]
    *_, handle = fused_a2a.hybrid_ep_dispatch(x, maps, None, group, 2)
    *_, known = reference.hybrid_dispatch_forward(x, maps, None, 2)
    fused_a2a.init_hybrid_ep_buffer(group, 128, 3, 2, 24, 24, True)
    want = reference.hybrid_dispatch_forward(x, maps, None, 2, fp8_dispatch=True)
    got = fused_a2a.hybrid_ep_dispatch(x, maps, None, group, 2)
    assert_same(got[:4], want[:4], "blockwise FP8")
    rows = tokens(rng, known.num_rows, 16)
    for _ in range(2):
        combined = fused_a2a.hybrid_ep_combine(rows, handle)
        assert_same(combined, reference.hybrid_combine_forward(rows, known), "combined")
        fused_a2a.reset_hybrid_ep_buffer()


def test_a_combine_whose_growth_is_refused_grows_the_next_time(monkeypatch):
    group, rng = group_of(2), np.random.default_rng(6)
    (*_, handle), (*_, known) = dispatched(group, rng)
    buffer, rows = fused_a2a.get_buffer(group, 0), tokens(rng, known.num_rows, 8)
    with monkeypatch.context() as refusing:
        refusing.setattr(buffer, "make_room", refuse)
        with pytest.raises(EPValueError, match="not now"):
            fused_a2a.fused_combine(rows, group, handle)
    combined, _ = fused_a2a.fused_combine(rows, group, handle)
    assert_same(combined, reference.combine_forward(rows, known), "combined")


def refuse(*given, **needs):
    raise EPValueError("not now")


def test_a_buffer_is_freed_also_if_a_peer_does_not_come_to_close_it(monkeypatch):
    group = group_of(2)
    dispatched(group, np.random.default_rng(7))
    buffer, before = fused_a2a.get_buffer(group, 0), len(MEMORY.spans)

    def nobody_comes(occasion, timeout):
        raise PeerTimeout("rank 1 did not come")

    monkeypatch.setattr(group, "barrier", nobody_comes)
    with pytest.raises(PeerTimeout, match="did not come"):
        buffer.close()
    assert len(MEMORY.spans) < before
    with pytest.raises(EPStateError, match="closed"):
        buffer.reset()


def test_after_a_reset_the_error_of_a_kernel_is_not_ascribed_to_an_earlier_call(monkeypatch):
    group = group_of(1)
    (*_, handle), (*_, known) = dispatched(group, np.random.default_rng(8), (3,))
    buffer = fused_a2a.get_buffer(group, 0)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(buffer, "capture", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dispatched(group, np.random.default_rng(8), (3,))
    with pytest.raises(EPStateError, match="fused_dispatch was ended by ZeroDivisionError"):
        buffer.expect_open()
    buffer.reset()
    r = buffer.ranks[0]
    r.words.write(np.array([wait.ROWS_DISPATCH], np.int32), mailbox.STATUS)
    with pytest.raises(PeerTimeout):
        buffer.check()
    with pytest.raises(EPStateError, match="a kernel was ended by PeerTimeout"):
        buffer.expect_open()


@pytest.mark.parametrize(
    "function, more",
    [
        (fused_a2a.get_buffer, (16,)),
        (fused_a2a.reset_hybrid_ep_buffer, ()),
        (fused_a2a.init_hybrid_ep_buffer, (8, 1, 1, None, None, False)),
    ],
)
def test_a_group_is_a_world(function, more):
    with pytest.raises(EPValueError, match="group must be a LocalWorld, MPIWorld or ShmemWorld, not str"):
        function("group", *more)


def arranged(n, dtype):
    """An Arrangement of one array."""
    return Arrangement("result", {"a": ((n,), dtype)})


@pytest.mark.parametrize("seed", range(3))
def test_the_heap_lends_no_byte_twice_and_gets_all_back(seed):
    rng, machine = np.random.default_rng(seed), LocalWorld(1).machine
    buffer = machine.alloc(8192, "heap", 0)
    heap, lent = MemoryPool(machine, part=(buffer, 1024, 8192)), []
    for _ in range(60):
        if lent and rng.random() < 0.5:
            lent.pop(int(rng.integers(len(lent))))
        loan = heap.lend(arranged(int(rng.integers(1, 1500)), np.uint8))
        if loan is not None:
            lent.append(loan)
        spans = sorted((x.address("a"), x.address("a") + x.fields["a"].nbytes) for x in lent)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
        assert all(buffer.address + 1024 <= a and b <= buffer.address + 8192 for a, b in spans)
    loan = None
    lent.clear()
    assert heap.lend(arranged(7168, np.uint8)) is not None, "pieces were not joined again"


def test_the_arena_uses_a_buffer_again_when_its_arrays_are_gone():
    arena = MemoryPool(LocalWorld(1).machine, 0)
    loan = arena.lend(arranged(100, np.float32))
    array, address = loan.array("a"), loan.address("a")
    del loan
    assert arena.lend(arranged(100, np.float32)).address("a") != address, "an array in use was overwritten"
    del array
    assert arena.lend(arranged(90, np.float32)).buffer.nbytes == size_class(512)
    assert sum(arena.bytes_by_name.values()) == 2 * size_class(512)
