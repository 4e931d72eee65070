"""The calls of a rows world and their inputs. They are the same for the reference and epmoe.fused_a2a."""

from contextlib import nullcontext
from functools import lru_cache

import ml_dtypes
import numpy as np

from epmoe.fused_a2a import hybrid, rows
from epmoe.fused_a2a.fused import values_and_scales
from epmoe.fused_a2a.plans import CombinePlan
from epmoe.host.arrays import to_numpy
from epmoe.layout import ABSENT
from epmoe.mutants import rows_bad_ids
from epmoe_ref import fused_a2a as reference

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, GROUP = np.dtype(ml_dtypes.float8_e4m3fn), 128
REPLACED = np.array([ABSENT, ABSENT, ABSENT - 1, ABSENT - 2], np.uint32)
REPLACED_AT = np.array([3, 5, 8, 13])  # the first two in one vector or in two
ABSORBING = 2.0**14, -(2.0**14), 2.0**-12  # their sums depend on the order
DISPATCHES = 2  # of rows_calls, called with ids


class Inputs:
    """Arrays over ranks, from one seed. spoilt: some -1 are replaced by bad ids, which kernels must treat as -1."""

    def __init__(self, world, spoilt=False):
        self.world, self.rng = world, np.random.default_rng(11)
        experts = [e for e in range(world.n_experts - 1) if e % world.local >= world.from_expert]
        self.ids = [
            np.array([self.rng.permutation(experts)[: world.top_k] for _ in range(n)], world.id_dtype).reshape(
                n, world.top_k
            )
            for n in world.tokens
        ]
        for ids in self.ids:
            ids[self.rng.random(ids.shape) < 0.15] = -1
        experts = range(world.n_experts)
        self.maps = [
            np.array([[e in row for e in experts] for row in ids], bool).reshape(len(ids), len(experts))
            for ids in self.ids
        ]
        if spoilt:
            self.ids = [rows_bad_ids.spoilt(ids, world.n_experts) for ids in self.ids]

    def rows(self, counts, dtype=BF16, columns=None):
        columns = self.world.hidden if columns is None else columns
        out = [self.rng.normal(size=(n, columns) if columns else n) for n in counts]
        for a in out if columns >= 8 else ():
            a[:, 3] = -0.0  # the sum of these is +0.0
            a[:, 5] = self.rng.choice(ABSORBING, len(a))
        return [a.astype(dtype) for a in out]

    def tokens(self, columns=0):
        """The dispatched tokens. columns: their number, if it is not the world's."""
        values = self.rows(self.world.tokens, E4M3 if self.world.pairs else BF16, columns or None)
        for rank, a in enumerate(values):
            for t, words in enumerate(a.view(np.uint32)):
                if t % 2:  # the sentinel of rows without signals, and words used as escapes
                    words[(t // 2 + 2 * rank + REPLACED_AT) % len(words)] = REPLACED
        if not self.world.pairs:
            return values
        return list(zip(values, self.rows(self.world.tokens, np.float32, self.world.hidden // GROUP)))

    def turned(self, of_ranks, number):
        """Another routing with as many rows: rotated by `number` tokens."""
        return of_ranks if self.world.bad_ids else [np.roll(a, number, axis=0) for a in of_ranks]


def rows_calls(world, make, functions, in_flight):
    """The calls of a rows world: (results of the dispatches, results of the others).

    functions: (dispatch, its backward, a cached dispatch), over rank lists. make: Inputs. in_flight: makes the
    context of the other calls.
    """
    dispatch, sums, cached, *counted = functions
    given = [
        (make.tokens(), make.turned(make.ids, number), make.rows(world.tokens, np.float32, world.top_k))
        for number in range(DISPATCHES)
    ]
    dispatched = [dispatch(*arguments) for arguments in given]
    handle, n = dispatched[-1][1], [len(i) for i in dispatched[-1][0][1]]
    x = [make.rows(n, world.dtype), make.rows(n, np.float32), *(make.rows(world.tokens) for _ in range(4))]
    probs = make.rows(n, np.float32, world.top_k)
    with in_flight():
        others = [sums(handle, x[0], probs), cached(handle, x[2])]
        if not world.brief:
            others += [sums(handle, x[1], None), *(cached(handle, y) for y in x[3:])]
        others += [cached(handle, x[3]) for _ in range(world.combines)]
        others += [sums(handle, x[0], probs) for _ in range(world.combines)]
        for _ in range(3 * world.between):
            few = [[_cut(a, world.few) for a in of_ranks] for of_ranks in (make.tokens(world.wide), *given[0][1:])]
            rows_of = [sum((ids // world.local == r).any(axis=1).sum() for ids in few[1]) for r in range(world.n_ranks)]
            others += [counted[0](*few, rows_of), sums(handle, x[0], probs)]
            if world.wide:  # the data that they leave in memory has the next calls' parity
                others += [counted[0](*given[1], n), sums(handle, x[0], probs)]
        if world.on_device:
            others += [counted[0](*arguments, n) for arguments in given]
    return [d for d, _ in dispatched], others


def hybrid_calls(world, make, functions, in_flight):
    """The calls of a HybridEP world, as in rows_calls."""
    dispatch, sums, cached = functions
    given = [(make.rows(world.tokens), make.rows(world.tokens, np.float32, world.n_experts)) for _ in range(3)]
    maps = [make.turned(make.maps, number) for number in range(3)]
    if world.limit is None:  # later dispatches have more rows than the first
        maps[0] = [m & (np.arange(len(m)) % 2 == 1)[:, None] for m in maps[0]]
    one, handle = dispatch(given[0][0], maps[0], given[0][1])
    with in_flight():
        two, second = dispatch(given[1][0], maps[1], given[1][1])
        n, more, y = [len(a) for a in one[0]], [len(a) for a in two[0]], make.rows(world.tokens)
        x, probs = make.rows(n, world.dtype), make.rows(n, np.float32, 0)
        others = [two, second.overflow, sums(handle, x, probs), cached(handle, y)]
        three, third = dispatch(given[2][0], maps[2], given[2][1])
        others += [three, sums(second, make.rows(more, world.dtype), None), cached(second, y)]
        others += [cached(third, y)]
        for number in range(2 * world.between):
            few = [[r[: world.few] for r in of_ranks] for of_ranks in (given[number][0], maps[0])]
            made, of_few = dispatch(*few, [r[: world.few] for r in given[0][1]])
            again = dispatch(*given[1][:1], maps[1], given[1][1])
            others += [made, sums(of_few, x, probs), cached(of_few, few[0])]
            others += [again[0], sums(again[1], x, probs)]
    return [one], others


def by_reference(world):
    """The reference's functions for the calls."""
    if world.kind == "rows":

        def dispatch(x, ids, probs):
            *results, handle = reference.dispatch_forward(x, ids, probs, world.n_experts)
            return results, handle

        return (
            dispatch,
            reference.dispatch_backward,
            reference.combine_backward,
            lambda *given: dispatch(*given[:3])[0],
        )

    def dispatch(x, maps, probs):
        *results, handle = reference.hybrid_dispatch_forward(
            x,
            maps,
            probs,
            world.local,
            num_permuted_tokens=world.limit,
            pad_multiple=world.pad,
            fp8_dispatch=world.fp8,
            p2p_world_size=world.p2p_world_size,
        )
        return results, handle

    return dispatch, reference.hybrid_dispatch_backward, reference.hybrid_combine_backward


def on_device(world, buffer):
    """epmoe.fused_a2a's functions for the calls, on a buffer."""
    if world.kind == "rows":

        def sent(x, ids, probs, on_device):
            values, *scales = values_and_scales(buffer.world_has_lists, x)
            arrays = values, ids, probs, *scales
            options = world.n_experts, None, on_device
            return buffer.call("dispatch", rows.DispatchPlan, rows.ARGUMENTS, arrays, options, buffer.world)

        def dispatch(x, ids, probs):
            return sent(x, ids, probs, False)

        def counted(x, ids, probs, n):
            (*columns, per_expert), _ = sent(x, ids, probs, True)
            return [[_cut(a, rows_here) for a, rows_here in zip(column, n)] for column in columns] + [per_expert]

        module, forward = rows, dispatch
    else:

        def forward(x, maps, probs):
            options = (world.local, world.limit, world.pad, world.fp8, world.p2p_world_size, (None, None))
            arrays = (x, maps) if probs is None else (x, maps, probs)
            return buffer.call("dispatch", hybrid.DispatchPlan, hybrid.ARGUMENTS, arrays, options, buffer.world)

        module = hybrid

    def sums(handle, x, probs):
        names = "x", "probs of x"
        arrays = (x,) if probs is None else (x, probs)
        return tuple(buffer.call("sums", CombinePlan, names, arrays, (None,), handle)[0])

    def cached(handle, x):
        return buffer.call("cached", module.CachedPlan, ("x",), (x,), (None,), handle)[0][0]

    return (forward, sums, cached, counted) if world.kind == "rows" else (forward, sums, cached)


def _cut(array, n):
    """The first n rows of an array, or of each of a pair."""
    return tuple(a[:n] for a in array) if isinstance(array, tuple) else array[:n]


CALLS = {"rows": rows_calls, "hybrid": hybrid_calls}


@lru_cache(None)
def expected(world):
    """Results of the reference, flat."""
    return list(flat(CALLS[world.kind](world, Inputs(world), by_reference(world), nullcontext)))


def flat(results):
    """All arrays of nested lists, in order, without None and empty lists."""
    if isinstance(results, (list, tuple)):
        for r in results:
            yield from flat(r)
    elif results is not None:
        yield to_numpy(results)
