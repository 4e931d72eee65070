"""Random calls of rows and by expert on a driver that runs nothing: every launch is told the arrays of its own call.

`python known_calls_program.py SEED STEPS`, EPMOE_DEVICE=gpu: one rank of two; arrays come again or are new, results are
held for a while, numbers of rows differ. What each kernel's parameters say is compared with the arrays of the call when
it is launched, and nothing that is held may share memory.
"""

import ctypes
import random
import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parents[1] / "host"),
]

import numpy as np  # noqa: E402
from counted_driver import Driver, FakeDtype, FakeTensor, bfloat16, counted_machine, float32, int64  # noqa: E402
from host_cost import OneRankHere  # noqa: E402

from epmoe import fused_a2a  # noqa: E402
from epmoe.fused_a2a.buffers import hybrid_ep_buffer  # noqa: E402
from epmoe.fused_a2a.handles import counts_offset  # noqa: E402
from epmoe.fused_a2a.steady import SteadyCalls  # noqa: E402
from epmoe.host import elsewhere  # noqa: E402
from epmoe.kernels.rows.block import parameter_block  # noqa: E402

RANKS, T, HIDDEN, TOP_K, EXPERTS, LIMIT = 2, 4, 64, 8, 16, 12
BY_EXPERT_BYTES = 8 * EXPERTS // RANKS
boolean = FakeDtype("bool")
N_WORDS, START = parameter_block(RANKS).n_words, 0x7F0000000000


class Launches(Driver):
    """Keeps the parameters of launches as they were then; tells numbers of rows that a kernel would have told."""

    told = np.array(
        [1, 0, T, T, 2, 2, 2, 2], np.int32
    )  # has room, padded rows, tokens, rows [R, R]

    def __init__(self, real):
        super().__init__(real)
        self.seen = []

    def cuLaunchKernel(self, *arguments):
        result = super().cuLaunchKernel(*arguments)
        name, *_, params, _, _ = self.launches.pop()
        words = np.frombuffer((ctypes.c_uint8 * 8 * N_WORDS).from_address(params), np.uint64)
        self.seen.append((str(name), words.copy()))
        return result

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        ctypes.memset(to, 0, nbytes)
        if nbytes > BY_EXPERT_BYTES:  # else the status words
            ctypes.memmove(to, self.told.ctypes.data, self.told.nbytes)
        return self._success


class Calls:
    """Calls on one world, and what was launched by each."""

    def __init__(self, seed):
        self.rng, self.made, self.n_general = random.Random(seed), 0, 0
        machine, self.driver = counted_machine(RANKS, 0)
        self.world, self.known = OneRankHere(machine, RANKS), {}
        watching = SteadyCalls.watching

        def counted(*what):
            self.n_general += 1
            return watching(*what)

        SteadyCalls.watching = counted

    def given(self, i):
        """(x, ids, probs) number i."""
        at = START + 0x200000 * i + 16 * self.rng.randrange(64)
        return self.known.setdefault(
            i,
            (
                FakeTensor(at, (T, HIDDEN), bfloat16),
                FakeTensor(at + 0x1000, (T, TOP_K), int64),
                FakeTensor(at + 0x4000, (T, TOP_K), float32),
            ),
        )

    def rows(self, n):
        """n rows and their probs, anywhere."""
        at = START + 0x10000000000 + 0x1000 * self.rng.randrange(1 << 16)
        return FakeTensor(at, (n, HIDDEN), bfloat16), FakeTensor(
            at + 0x100000000, (n, TOP_K), float32
        )

    def launched(self, function, *arguments):
        """(result, [(kernel, fields)]) of a call."""
        self.driver.seen.clear()
        self.made += 1
        result = function(*arguments)
        places = parameter_block(RANKS)._places
        return result, [
            (name, {field: words[at : at + n].tolist() for field, (at, n) in places.items()})
            for name, words in self.driver.seen
        ]

    def pool(self, buffer):
        """Where this rank's pool of a Buffer begins."""
        return buffer._pool.buffers[0].address


def addresses(arrays):
    return [a.address if hasattr(a, "address") else a.data_ptr() for a in arrays]


def received(calls, seen, results, row_words):
    """Launches have put what was received into these results: at once, or by a move."""
    sent = [fields for name, fields in seen if name != "rows_move"][-1]
    pool = calls.pool(fused_a2a.get_buffer(calls.world, 0))
    there, n = [pool + place for place in sent["places"][: len(results)]], results[0].shape[0]
    if seen[-1][0] == "rows_move":
        assert seen[-1][1]["sources"][: len(results)] == there
        assert seen[-1][1]["word_counts"][: len(results)] == [n * words for words in row_words]
        there = seen[-1][1]["targets"][: len(results)]
    assert there == addresses(results)
    return sent


def a_step(calls, i):
    """A dispatch and some calls with its handle: everything that it gave."""
    rng, world, (x, ids, probs) = calls.rng, calls.world, calls.given(i)
    dispatch = rng.choice((fused_a2a.fused_dispatch, fused_a2a.fused_dispatch_on_device))
    calls.driver.told[4:] = [rng.randint(0, T) for _ in range(4)]
    (*got, per_expert, handle), seen = calls.launched(dispatch, x, ids, probs, EXPERTS, world)
    sent, at = received(calls, seen, got, [HIDDEN // 2, 2 * TOP_K, TOP_K]), handle.loans[0].address
    of_handle = {"row_of": [at("row_of")], "counts": [at("info") + counts_offset(RANKS)]}
    expect(sent, of_handle, x=x, ids=ids, probs=probs)
    n, everything = handle.num_rows[0], [*got, handle]
    assert got[0].shape == (n, HIDDEN) and sent["info"] == [at("info")]
    ctx, of_dispatch = fused_a2a.Context(), fused_a2a.Context()
    of_dispatch.group, of_dispatch.handle = world, handle
    y, _ = calls.rows(n)
    (out, _), ((_, fields),) = calls.launched(fused_a2a.FusedCombine.forward, ctx, y, world, handle)
    expect(fields, of_handle, x=y, out=out)
    assert fields["capacity"] == [handle.most_returned] and fields["probs"] == [0]
    if rng.random() < 0.5:
        g = calls.given(rng.randrange(8))[0]
        (back, *_), seen = calls.launched(fused_a2a.FusedCombine.backward, ctx, g)
        sent = received(calls, seen, [back], [HIDDEN // 2])
        expect(sent, of_handle, x=g)
        assert sent["capacity"] == [handle.most_rows] and back.shape[0] == n
        everything.append(back)
    if rng.random() < 0.5:
        y, y_probs = calls.rows(n)
        (grad, _, grad_probs, *_), ((_, fields),) = calls.launched(
            fused_a2a.FusedDispatch.backward, of_dispatch, y, None, y_probs, None, None
        )
        expect(fields, of_handle, x=y, probs=y_probs, out=grad, out_probs=grad_probs)
        assert fields["capacity"] == [handle.most_returned]
        everything += [grad, grad_probs]
    return [*everything, out]


def a_step_by_expert(calls, i):
    """The same of HybridEP; with a limit the dispatch expands, without one a launch behind its wait."""
    rng, world, (x, ids, probs) = calls.rng, calls.world, calls.given(i)
    limit, padded = rng.choice((None, LIMIT)), rng.randint(0, RANKS * T * TOP_K)
    calls.driver.told[1] = padded
    routing_map = FakeTensor(ids.data_ptr() + 0x8000, (T, EXPERTS), boolean)
    probs = FakeTensor(probs.data_ptr() + 0x8000, (T, EXPERTS), float32)
    (hidden, row_probs, _, _, handle), seen = calls.launched(
        fused_a2a.hybrid_ep_dispatch, x, routing_map, probs, world, EXPERTS // RANKS, 24, 24, limit
    )
    (loan,), n, (_, sent), (kernel, made) = handle.loans, limit or padded, seen[0], seen[-1]
    at, of_handle = (
        loan.address,
        {
            "row_of": [loan.address("row_of")],
            "counts": [loan.address("info") + counts_offset(RANKS)],
            "expert_rows": [loan.address("expert_rows")],
            "expert_row": [loan.expert_row.address("expert_row")],
        },
    )
    assert len(seen) == (1 if limit else 2) and kernel == (
        "rows_dispatch" if limit else "rows_expand"
    )
    expect(sent, of_handle, x=x, ids=routing_map, probs=probs)
    expect(made, of_handle, out=hidden, out_probs=row_probs)
    pool = calls.pool(hybrid_ep_buffer(world))
    assert made["sources"] == [pool + place for place in sent["places"]] and made["n_rows"] == [n]
    assert made["expert_base"] == sent["expert_base"] == [at("expert_base")] and sent["info"] == [
        at("info")
    ]
    assert hidden.shape == (n, HIDDEN) and handle.num_rows == [n]
    ctx, of_dispatch = fused_a2a.Context(), fused_a2a.Context()
    of_dispatch.group, of_dispatch.handle = world, handle
    y, _ = calls.rows(n)
    out, ((_, fields),) = calls.launched(fused_a2a.HybridEPCombine.forward, ctx, y, handle)
    expect(fields, of_handle, x=y, out=out)
    g = calls.given(rng.randrange(8))[0]
    (back, *_), ((_, fields),) = calls.launched(fused_a2a.HybridEPCombine.backward, ctx, g)
    expect(fields, of_handle, x=g, out=back)
    assert fields["n_rows"] == [n] and back.shape == (n, HIDDEN)
    y, y_probs = calls.rows(n)
    y_probs = FakeTensor(y_probs.data_ptr(), (n,), float32)
    (grad, _, grad_probs, *_), ((_, fields),) = calls.launched(
        fused_a2a.HybridEPDispatch.backward, of_dispatch, y, y_probs, None, None, None
    )
    expect(fields, of_handle, x=y, probs=y_probs, out=grad, out_probs=grad_probs)
    return [hidden, row_probs, handle.overflow, handle, out, back, grad, grad_probs]


def expect(fields, of_handle, **arrays):
    """The fields are the addresses of these arrays, and what the handle says."""
    for name, array in arrays.items():
        assert fields[name] == addresses([array]), name
    for name, value in of_handle.items():
        assert fields[name] == value, name


def main(seed, steps):
    import counted_driver

    counted_driver.Driver, elsewhere.N_SLOTS = Launches, 16
    calls, held, n_new, steps_of = Calls(seed), [], 100, [a_step, a_step_by_expert]
    rng = calls.rng
    fused_a2a.fused_dispatch_on_device(
        *calls.given(0), EXPERTS, calls.world
    )  # now there is room for T tokens
    fused_a2a.init_hybrid_ep_buffer(calls.world, HIDDEN, T, EXPERTS // RANKS, 24, 24, False)
    for _ in range(steps):
        n_new += 1
        made = rng.choice(steps_of)(calls, n_new if rng.random() < 0.4 else rng.randrange(5))
        if rng.random() < 0.6:
            held.append(made)
        del made
        while len(held) > rng.choice((0, 2, 5, 8)):
            held.pop(rng.randrange(len(held)))
        spans = sorted(
            (a.address, a.address + a.nbytes)
            for one in held
            for a in one
            if getattr(a, "nbytes", 0)
        )
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:])), (
            "results that are held overlap"
        )
    assert calls.n_general < calls.made / 20, (
        f"{calls.n_general} of {calls.made} calls took the general way"
    )
    print(f"{calls.made} calls, {calls.n_general} of them checked and launched anew")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
