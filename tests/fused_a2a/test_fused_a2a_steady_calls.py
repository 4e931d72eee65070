"""Calls made before with the same arguments: their launches start again, with new data and the reference's results.

The simulator stands in for a GPU with one rank a process: its launches are recorded and started again as GpuMachine
does it, and the caller's arrays are seen as device arrays.
"""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from rows_group import BF16, OneRank, assert_same, group_of, host, routing, tokens

from epmoe import LaunchConfig, fused_a2a
from epmoe.device.captures import CAPTURED
from epmoe.fused_a2a import arguments, buffers, expanding, heap, rows
from epmoe.fused_a2a.buffer import Buffer
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.kernels.rows import records
from epmoe.kernels.written_blocks import words_at
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPValueError

T, EXPERTS, TOP_K, HIDDEN = 5, 4, 2, 16


class OnDevice:
    """A NumPy array as a library for GPUs would show it."""

    def __init__(self, machine, array):
        self.values, self.dtype = array, array.dtype
        machine.adopt(array, "given", 0)

    @property
    def __cuda_array_interface__(self):
        return dict(self.values.__array_interface__, strides=None)


class Recorded(NamedTuple):
    """A launch."""

    kernel: object
    grid: int
    threads: int
    values: tuple
    how: dict


class Flat(NamedTuple):
    """What GpuMachine.flat gives: words, and whether one is counted from an address."""

    words: np.ndarray
    counted_from: np.ndarray
    reads: list

    ADDRESSES = 1


class Slot:
    """Memory for the parameters of recorded launches, and these with the arguments that the words say."""

    def __init__(self, recorder):
        self.recorder, self.memory, self.owner = recorder, [], None

    def fill(self, flat, addresses):
        words = flat.words + np.array([0, *addresses])[flat.counted_from]
        launches, self.memory = [], []
        for one in flat.reads:
            n, n_words = len(one.values), len(words_at(one.values[0]))
            block = self.recorder.machine.alloc(8 * n_words, "parameters")
            block.write(words[n:n + n_words].astype(np.uint64))
            launches.append(one._replace(values=(block.address, *map(int, words[1:n]))))
            words = words[n + n_words:]
            self.memory.append(block)
        self.start = self.recorder.again(launches)

    def begin(self):
        self.recorder.n_begun += 1
        return self.start()


class Recorder:
    """What GpuMachine has for launches that start again, on a simulator's machine."""

    def __init__(self, machine, monkeypatch):
        self.machine, self.recorded, self.n_started, self.launch = machine, None, 0, machine.launch
        self.capturing, self.n_begun = False, 0
        for stream in machine.streams:
            monkeypatch.setattr(stream, "capture", self.capture)
        for name, value in dict(n_freed=0, has_captured=False, launch=self.record, recording=self.recording,
                                again=self.again, flat=self.flat, slots=lambda n, flat: self).items():
            monkeypatch.setattr(machine, name, value, raising=False)

    def capture(self):
        self.machine.has_captured |= self.capturing
        return self.capturing

    def record(self, kernel, grid, threads, values, **how):
        if self.recorded is not None:
            self.recorded.append(Recorded(kernel, grid, threads, values, how))
        self.launch(kernel, grid, threads, values, **how)

    @contextmanager
    def recording(self):
        self.recorded = launches = []
        yield launches
        self.recorded = None

    def again(self, launches):
        launches = list(launches)       # as they are now

        def start():
            if self.capturing:
                return CAPTURED
            self.n_started += 1
            for one in launches:
                self.launch(one.kernel, one.grid, one.threads, one.values, **one.how)
            self.machine.synchronize()
            return 0

        return start

    def flat(self, launches, blocks):
        words = [word for one, block in zip(launches, blocks) for word in (0, *one.values[1:], *map(int, block))]
        return Flat(np.array(words), np.zeros(len(words), int), list(launches))

    def serve(self, flat):
        return True

    def take(self):
        return Slot(self)

    def free(self):
        """Slots free their memory with the machine."""


@pytest.fixture
def group(monkeypatch):
    """A world of one rank, seen as one rank a process on a GPU."""
    monkeypatch.setattr(inputs, "_array", lambda machine, given, what: view(given, what))
    world = OneRank(group_of(1))
    world.recorder = Recorder(world.machine, monkeypatch)
    for kind in (buffers._buffer, buffers._hybrid_ep_buffer):
        kind[world] = Buffer(world, launch=LaunchConfig(2, 32))
        kind[world].steady.applies = True
    yield world
    for kind in (buffers._buffer, buffers._hybrid_ep_buffer):
        kind.pop(world).close()


def rows_round(group, given, rng):
    """All calls of the rows family on arrays that lie where they did; their results and the reference's."""
    x, ids, probs, y = given
    for a, new in zip(given, (*(r[0] for r in (tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K))),
                              tokens(rng, (len(y.values),), HIDDEN)[0])):
        a.values[...] = new
    *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
    *got, handle = fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)
    n = known.num_rows[0]
    for one, other in zip(got, want):
        assert_same(host(one)[:len(other[0])], other[0], "dispatch")
    ctx = fused_a2a.Context()
    combined, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
    assert_same(combined, reference.combine_forward([y.values[:n]], known)[0], "combine")
    back = fused_a2a.FusedCombine.backward(ctx, x)[0]
    assert_same(host(back)[:n], reference.combine_backward(known, [x.values])[0], "cached dispatch")


def hybrid_round(group, given, rng):
    """All calls of the HybridEP family."""
    x, routing_map, probs, y = given
    for a, new in zip(given, (tokens(rng, (T,), HIDDEN)[0], rng.random((T, EXPERTS)) < 0.5,
                              rng.random((T, EXPERTS), np.float32), tokens(rng, (12,), HIDDEN)[0])):
        a.values[...] = new
    *want, known = reference.hybrid_dispatch_forward([x.values], [routing_map.values], [probs.values], EXPERTS,
                                                     num_permuted_tokens=12, pad_multiple=2)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(ctx, x, routing_map, probs, group, EXPERTS,
                                                      num_permuted_tokens=12, pad_multiple=2)
    for one, of_all in zip(got, want):
        assert_same(one, None if of_all is None else of_all[0], "dispatch by expert")
    assert_same(handle.overflow, known.overflow[0], "overflow")
    combined = fused_a2a.HybridEPCombine.forward(other, y, handle)
    assert_same(combined, reference.hybrid_combine_forward([y.values], known)[0], "combine by expert")
    back = fused_a2a.HybridEPCombine.backward(other, x)[0]
    assert_same(back, reference.hybrid_combine_backward(known, [x.values])[0], "rows by expert")


ROWS = [np.zeros((T, HIDDEN), BF16), np.zeros((T, TOP_K), np.int64), np.zeros((T, TOP_K), np.float32),
        np.zeros((T, HIDDEN), BF16)]
HYBRID = [np.zeros((T, HIDDEN), BF16), np.zeros((T, EXPERTS), bool), np.zeros((T, EXPERTS), np.float32),
          np.zeros((12, HIDDEN), BF16)]


@pytest.mark.parametrize("one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"])
def test_launches_start_again_on_new_data(group, one_round, arrays, monkeypatch):
    rng, given = np.random.default_rng(1), [OnDevice(group.machine, a.copy()) for a in arrays]
    started = [0]
    for _ in range(8):      # until every call has been made in the memory that it finds when all take turns
        one_round(group, given, rng)
        started.append(group.recorder.n_started)
    assert np.diff(started)[-3:].tolist() == [3, 3, 3], "a call that was made before took the general way"
    with monkeypatch.context() as patch:
        patch.setattr(heap, "_lend", lambda *what: pytest.fail("results that nobody holds were made anew"))
        one_round(group, given, rng)
    others = [OnDevice(group.machine, a.copy()) for a in arrays]
    before = group.recorder.n_started
    one_round(group, others, rng)
    assert group.recorder.n_started < before + 3, "other arrays have launches of their own"


@pytest.mark.parametrize("one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"])
def test_launches_for_new_arrays_are_made_of_earlier_ones(group, one_round, arrays):
    """From the first calls of a form it is learned what follows from addresses; later ones start at once."""
    rng, recorder = np.random.default_rng(6), group.recorder
    kept, general = [], []
    for _ in range(12):
        kept.append([OnDevice(group.machine, a.copy()) for a in arrays])
        before = recorder.n_started
        one_round(group, kept[-1], rng)
        general.append(3 - (recorder.n_started - before))
    assert general[0] == 3 and general[-6:] == [0] * 6, general
    begun = recorder.n_begun
    assert begun >= 18
    for given in kept[-4:]:         # and when they come again, not even the parameters are made anew
        one_round(group, given, rng)
    assert recorder.n_begun == begun


def test_steps_of_several_layers_start_again_though_all_results_are_held(group):
    """Forward and backward of 4 layers: some results find no room in the heap, and are moved."""
    rng, recorder = np.random.default_rng(7), group.recorder
    layers = [[OnDevice(group.machine, a.copy()) for a in ROWS] for _ in range(4)]

    def step():
        held = []
        for x, ids, probs, y in layers:
            for a, new in zip((x, ids, probs, y), (r[0] for r in (
                    tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K), tokens(rng, (T,), HIDDEN)))):
                a.values[...] = new
            *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
            *got, handle = fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)
            ctx = fused_a2a.Context()
            out, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
            held.append((got, want, known, ctx, out, x, y))
        for got, want, known, ctx, out, x, y in reversed(held):
            n = known.num_rows[0]
            back = fused_a2a.FusedCombine.backward(ctx, x)[0]
            assert_same(host(back)[:n], reference.combine_backward(known, [x.values])[0], "combine's gradient")
            assert_same(out, reference.combine_forward([y.values[:n]], known)[0], "combine")
            for one, other in zip(got, want):
                assert_same(host(one)[:len(other[0])], other[0], "dispatch")

    for _ in range(8):
        before = recorder.n_started
        step()
    assert recorder.n_started == before + 12


def exact_round(group, given, rng):
    """A dispatch whose rows the host learns, and a combine of them."""
    x, ids, probs, _ = given
    for a, new in zip(given, (r[0] for r in (tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K)))):
        a.values[...] = new
    *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
    *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
    for one, other in zip(got, want):
        assert_same(one, other[0], "dispatch")
    assert handle.counts.tolist() == [known.num_rows] and handle.group is group
    y = OnDevice(group.machine, np.asarray(got[0]).copy())
    combined, _ = fused_a2a.fused_combine(y, group, handle)
    assert_same(combined, reference.combine_forward([y.values], known)[0], "combine")


def exact_round_by_expert(group, given, rng):
    """The same of HybridEP, and the gradients; the number of rows."""
    x, routing_map, probs = given
    for a, new in zip(given, (tokens(rng, (T,), HIDDEN)[0], rng.random((T, EXPERTS)) < rng.random(),
                              rng.random((T, EXPERTS), np.float32))):
        a.values[...] = new
    *want, known = reference.hybrid_dispatch_forward([x.values], [routing_map.values], [probs.values], EXPERTS,
                                                     pad_multiple=2)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(ctx, x, routing_map, probs, group, EXPERTS, pad_multiple=2)
    for one, of_all in zip(got, want):
        assert_same(one, None if of_all is None else of_all[0], "dispatch by expert")
    assert handle.num_rows == known.num_rows and handle.overflow == 0
    y, row_probs = (OnDevice(group.machine, np.asarray(a).copy()) for a in got[:2])
    combined = fused_a2a.HybridEPCombine.forward(other, y, handle)
    assert_same(combined, reference.hybrid_combine_forward([y.values], known)[0], "combine by expert")
    back = fused_a2a.HybridEPCombine.backward(other, x)[0]
    assert_same(back, reference.hybrid_combine_backward(known, [x.values])[0], "rows by expert")
    grad, _, grad_probs, *_ = fused_a2a.HybridEPDispatch.backward(ctx, y, row_probs, None, None, None)
    want_grad, want_probs = reference.hybrid_dispatch_backward(known, [y.values], [row_probs.values])
    assert_same(grad, want_grad[0], "gradient of tokens")
    assert_same(grad_probs, want_probs[0], "gradient of probs")
    return len(y.values)


def test_a_dispatch_that_the_host_waits_for_starts_again_too(group, monkeypatch):
    rng, given = np.random.default_rng(4), [OnDevice(group.machine, a.copy()) for a in ROWS]
    for _ in range(4):
        exact_round(group, given, rng)
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "matrices", checked_once(arguments.matrices))
        before = group.recorder.n_started
        for _ in range(3):
            exact_round(group, given, rng)
    assert group.recorder.n_started >= before + 3


def test_calls_with_a_handle_start_again_whatever_number_of_rows_it_has(group):
    """What an exact dispatch gives has another number of rows in each step, and so have the combines of it."""
    rng, recorder = np.random.default_rng(8), group.recorder
    x, ids, probs, g = (OnDevice(group.machine, a.copy()) for a in (*ROWS[:3], ROWS[0]))
    seen, general = set(), []
    for _ in range(25):
        for a, new in zip((x, ids, probs, g), (r[0] for r in (
                tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K), tokens(rng, (T,), HIDDEN)))):
            a.values[...] = new
        ids.values[rng.random(T) < 0.5] = -1        # tokens that go nowhere
        *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
        *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
        n = known.num_rows[0]
        assert handle.num_rows == [n] and len(got[0]) == n
        y, row_probs = (OnDevice(group.machine, np.asarray(a).copy()) for a in (got[0], got[2]))
        before = recorder.n_started
        ctx, of_dispatch = fused_a2a.Context(), fused_a2a.Context()
        combined, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
        assert_same(combined, reference.combine_forward([y.values], known)[0], "combine")
        back = fused_a2a.FusedCombine.backward(ctx, g)[0]
        assert_same(back, reference.combine_backward(known, [g.values])[0], "cached dispatch")
        of_dispatch.group, of_dispatch.handle = group, handle
        grad, _, grad_probs, *_ = fused_a2a.FusedDispatch.backward(of_dispatch, y, None, row_probs, None, None)
        want_grad, want_probs = reference.dispatch_backward(known, [y.values], [row_probs.values])
        assert_same(grad, want_grad[0], "gradient of tokens")
        assert_same(grad_probs, want_probs[0], "gradient of probs")
        general.append(3 - (recorder.n_started - before))
        seen.add(n)
        with pytest.raises(EPValueError, match="rows|shape"):
            fused_a2a.fused_combine(OnDevice(group.machine, np.zeros((n + 1, HIDDEN), BF16)), group, handle)
    assert len(seen) > 3 and sum(general[-8:]) <= 1, (seen, general)


def test_exact_results_are_moved_out_of_the_staging_area_by_known_launches(group, monkeypatch):
    """Of steps whose results are all held, whatever number of rows they have, none is checked or launched anew."""
    rng, held, anew, step = np.random.default_rng(9), [], [], -1
    x, ids, probs = (OnDevice(group.machine, a.copy()) for a in ROWS[:3])
    ids.values[...] = 0, 1
    filled = [fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group) for _ in range(4)]     # the heap
    for name in ("_move", "_send_first"):
        general = getattr(rows, name)
        monkeypatch.setattr(rows, name, lambda *what, general=general: anew.append(step) or general(*what))
    for step in range(40):
        for a, new in zip((x, ids, probs), (r[0] for r in (
                tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K)))):
            a.values[...] = new
        ids.values[rng.random(T) < 0.4] = -1
        *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
        *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
        assert handle.num_rows == known.num_rows
        held = [*held[-4:], (got, [one[0].copy() for one in want])]
        for got, wanted in held:
            for one, other in zip(got, wanted):
                assert_same(one, other, f"dispatch, looked at after step {step}")
    assert filled and anew and max(anew) < 28, anew


def test_exact_dispatches_by_expert_start_again_whatever_number_of_rows_comes(group):
    """The dispatch, what is launched behind its wait, and the combines of it: only the first ones are general."""
    rng, given = np.random.default_rng(10), [OnDevice(group.machine, a.copy()) for a in HYBRID[:3]]
    general, seen = [], set()
    for _ in range(10):
        before = group.recorder.n_started
        seen.add(exact_round_by_expert(group, given, rng))
        general.append(5 - (group.recorder.n_started - before))
    assert len(seen) > 3 and general[0] == 5 and not any(general[-3:]), (seen, general)


def checked_once(matrices):
    """arguments.matrices, but for a dispatch's own."""
    def check(buffer, name, *more, **options):
        assert name not in ("token_indices", "token_probs"), f"{name} was checked again"
        return matrices(buffer, name, *more, **options)

    return check


@pytest.mark.parametrize("one_round, arrays, sender", [
    (exact_round, ROWS, rows), (exact_round_by_expert, HYBRID[:3], expanding)], ids=["rows", "hybrid"])
def test_without_room_a_dispatch_that_started_again_is_sent_again(group, one_round, arrays, sender, monkeypatch):
    """On another rank there may be more tokens than ever: then there is no room on any, and all come to the same."""
    rng, given, n_told = np.random.default_rng(5), [OnDevice(group.machine, a.copy()) for a in arrays], []
    for _ in range(4):
        one_round(group, given, rng)
    buffer = buffers.buffer_of(group) if sender is rows else buffers.hybrid_ep_buffer(group)

    def more_elsewhere(*what):
        told = Buffer.told(buffer, *what)
        for words, _ in told:       # none of a check
            n_told.append(words)
            words[records.HAS_ROOM], words[records.TOKENS] = 0, words[records.TOKENS] + 2
        return told

    sent, before = [], group.recorder.n_started
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "told", more_elsewhere)
        resend = sender.resend_kernel
        patch.setattr(sender, "resend_kernel", lambda shape: sent.append(shape) or resend(shape))
        one_round(group, given, rng)
    assert group.recorder.n_started == before + 1 and len(n_told) == len(sent) == 1 and buffer.max_tokens == T + 2
    for _ in range(4):
        one_round(group, given, rng)
    assert group.recorder.n_started > before + 1


@pytest.mark.parametrize("kind", ["rows", "hybrid"])
def test_handles_that_take_turns_make_nothing_anew(group, kind, monkeypatch):
    """A caller who keeps a handle until the next dispatch has two in turn, whose combines differ."""
    x, of_routing, probs, y = (OnDevice(group.machine, a.copy()) for a in (ROWS if kind == "rows" else HYBRID))
    of_routing.values[...] = (0, 1) if kind == "rows" else True

    def a_round():
        if kind == "rows":      # whose heap has no room for the result of a cached dispatch as well
            *_, handle = fused_a2a.fused_dispatch_on_device(x, of_routing, probs, EXPERTS, group)
            fused_a2a.fused_combine(y, group, handle)
            return handle
        *_, handle = fused_a2a.hybrid_ep_dispatch(x, of_routing, probs, group, EXPERTS, num_permuted_tokens=12)
        ctx = fused_a2a.Context()
        fused_a2a.HybridEPCombine.forward(ctx, y, handle)
        fused_a2a.HybridEPCombine.backward(ctx, x)
        return handle

    for _ in range(20):     # until launches are known in all the memory that calls find
        handle = a_round()
    before = group.recorder.n_started
    monkeypatch.setattr(heap, "_lend", lambda *what: pytest.fail("results that nobody holds were made anew"))
    for _ in range(4):
        handle = a_round()
    assert group.recorder.n_started == before + 4 * (2 if kind == "rows" else 3) and handle is not None


def test_what_changes_in_the_buffer_makes_calls_new(group):
    rng, given = np.random.default_rng(2), [OnDevice(group.machine, a.copy()) for a in ROWS]
    for _ in range(3):
        rows_round(group, given, rng)
    before = group.recorder.n_started
    fused_a2a.get_buffer(group, 0).want_tokens(T + 3)
    given[3] = OnDevice(group.machine, np.zeros((T + 3, HIDDEN), BF16))
    rows_round(group, given, rng)
    assert group.recorder.n_started == before


@pytest.mark.parametrize("one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"])
def test_nothing_gets_the_memory_that_a_captured_graph_writes_to(group, one_round, arrays, monkeypatch):
    """Results, handles and scratch of captured calls are lent for good, and their launches do not start again."""
    rng, given, recorder = np.random.default_rng(3), [OnDevice(group.machine, a.copy()) for a in arrays], group.recorder
    for _ in range(3):
        one_round(group, given, rng)
    lent, of_a_graph, lend = [], [], heap._lend

    def seen(piece, buffer, start, *more):
        place = buffer.address + start
        assert place not in of_a_graph, "memory that a graph writes to at its replays"
        lent.append(place)
        return lend(piece, buffer, start, *more)

    monkeypatch.setattr(heap, "_lend", seen)
    recorder.capturing = True
    before = recorder.n_started
    one_round(group, given, rng)
    assert recorder.n_started == before and lent
    of_a_graph += lent
    recorder.capturing = False
    for _ in range(3):
        one_round(group, given, rng)
    assert recorder.n_started > before


@pytest.mark.parametrize("held", ["x", "handle"])
def test_results_that_somebody_holds_are_not_given_again(group, held):
    """Whatever is held of a call's results keeps all of them; when nothing is, the same objects come back."""
    x, ids, probs, _ = (OnDevice(group.machine, a.copy()) for a in ROWS)
    ids.values[...] = 0, 1

    def dispatch():
        return fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)

    for _ in range(4):
        dispatch()
    first = dispatch()
    kept, values = (first[0] if held == "x" else first[-1]), host(first[0]).copy()
    del first
    x.values[...] += 1
    other = dispatch()
    assert not any(one is kept for one in other)
    if held == "x":
        assert_same(kept, values, "results that are held")
    del kept, other
    dispatch()
    before = group.recorder.n_started
    again = dispatch()
    name = id(again[0])
    del again
    assert id(dispatch()[0]) == name and group.recorder.n_started == before + 2
