"""HybridEP cases, and how to run one on a HybridImplementation: dispatch, made-up rows, combine, both gradients."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from epmoe.check import compare_hybrid, random_bits
from epmoe.check.calls import first_found, parts
from epmoe.check.cancelling import cancelling
from epmoe.check.cases import BATCHES, MANY_EXPERTS, Batches, batches, large_batch
from epmoe.check.edges import edge_nans, edge_rows, edge_tokens
from epmoe.check.made_arrays import GRAD_OUT, GRAD_PROBS, GRAD_X, PROBS, RETURNED, made
from epmoe.check.rows import ROUTING, X
from epmoe_ref import fused_a2a

FIELDS = ("dispatched_hidden", "dispatched_probs", "dispatched_scaling_factor", "tokens_per_expert")


@dataclass(frozen=True)
class HybridCase(Batches):
    """One world of HybridEP. options: keyword arguments of dispatch."""

    name: str
    seed: int
    options: dict
    n_tokens: tuple = (8, 5, 0, 6)
    n_local_experts: int = 3
    top_k: int = 4
    hidden: int = 128
    with_probs: bool = True
    rounds: int = 2
    edges: bool = False  # values for which arithmetic differs, in x and in the experts' results
    dtype: str = "bf16"  # of x and of all rows: "bf16" or "fp16"
    later: tuple = ()
    nans: bool = False  # x has NaN of other bits than the usual ones

    def needs(self):
        """The options that an implementation must serve: a set of names."""
        return set(self.options) | (set() if self.with_probs else {"without_probs"})

    @property
    def n_experts(self):
        """E, over all ranks."""
        return self.n_local_experts * len(self.n_tokens)

    def x(self, round_):
        """[T, H] over ranks."""
        shapes = [(n, self.hidden) for n in self.batch(round_)]
        plain = [made(self.dtype, self.seed, round_, X, rank, shape) for rank, shape in enumerate(shapes)]
        if self.nans:
            return [edge_nans(x) for x in plain]
        if not self.edges:
            return plain
        return [edge_tokens(x, random_bits.stream(self.seed, rank)) for rank, x in enumerate(plain)]

    def routing_map(self, round_):
        """bool [T, E] over ranks."""
        return [self._routed(round_, rank, n) for rank, n in enumerate(self.batch(round_))]

    def _routed(self, round_, rank, n):
        stream = random_bits.stream(self.seed + 1000 * round_, ROUTING, rank)
        ids = random_bits.permutations(stream, n, self.n_experts)[:, : self.top_k]
        routed = np.zeros((n, self.n_experts), bool)
        routed[np.arange(n)[:, None], ids] = True
        routed[:, self.idle(round_, np.arange(self.n_experts))] = False
        return routed

    def probs(self, round_):
        """float32 [T, E] over ranks, not zero where nothing is routed; or None."""
        if not self.with_probs:
            return None
        return [
            np.abs(made("fp32", self.seed, round_, PROBS, rank, (n, self.n_experts)))
            for rank, n in enumerate(self.batch(round_))
        ]

    def like_rows(self, round_, use, handle, hidden):
        """In the shape of dispatched_hidden, over ranks: the experts' outputs, or the gradient of the rows."""
        rows = [made(self.dtype, self.seed, round_, use, rank, rows.shape) for rank, rows in enumerate(hidden)]
        return edge_rows(rows, handle.row_of, self.seed) if self.edges and use == RETURNED else rows

    def telling_rows(self, round_, use, handle, hidden):
        """like_rows, with NaN in rows without a token. After the first round (whose rows are in the golden vector),
        sums show their order."""
        rows = self.like_rows(round_, use, handle, hidden)
        if round_:
            rows = cancelling(rows, handle.row_of, self.n_local_experts, self.seed + round_)
        return [
            np.where((token < 0)[:, None], np.array(np.nan, of.dtype), of) for token, of in zip(handle.src_token, rows)
        ]

    def gradients_of_probs(self, round_, hidden):
        """float32 [P] over ranks, or None."""
        if not self.with_probs:
            return None
        return [made("fp32", self.seed, round_, GRAD_PROBS, rank, rows.shape[:1]) for rank, rows in enumerate(hidden)]

    def gradients_of_combined(self, round_):
        """[T, hidden] over ranks."""
        shapes = [(n, self.hidden) for n in self.batch(round_)]
        return [made(self.dtype, self.seed, round_, GRAD_OUT, rank, shape) for rank, shape in enumerate(shapes)]


def cases(n_ranks=4):
    """The HybridEP cases for a world of n_ranks."""
    n_tokens = tuple((8, 5, 0, 6)[rank % 4] for rank in range(n_ranks))
    first, *later = batches(n_ranks)
    listed = [
        ("exact rows", {}),
        ("padding to 16", {"pad_multiple": 16}),
        ("more rows than needed", {"num_permuted_tokens": 64, "pad_multiple": 8}),
        ("overflow", {"num_permuted_tokens": 17}),
        ("overflow by padding", {"num_permuted_tokens": 40, "pad_multiple": 16}),
        ("no room at all", {"num_permuted_tokens": 0}),
        ("fp8", {"fp8_dispatch": True, "pad_multiple": 4}, dict(hidden=256)),
        ("two p2p worlds", {"p2p_world_size": n_ranks // 2}),
        ("without probs", {}, dict(with_probs=False)),
        ("no tokens at all", {"pad_multiple": 8}, dict(n_tokens=(0,) * n_ranks)),
        ("every expert", {}, dict(top_k=3 * n_ranks)),
        ("bf16 at the edges of its numbers", {}, dict(n_tokens=(8,) * n_ranks, rounds=1, edges=True)),
        (
            "many local experts, a large batch",
            {},
            dict(n_tokens=large_batch(n_ranks), n_local_experts=MANY_EXPERTS, top_k=2, hidden=64, rounds=1),
        ),
        ("five rounds", {}, dict(n_tokens=(2,) * n_ranks, top_k=2, hidden=64, rounds=5)),
        ("fp16", {}, dict(hidden=64, dtype="fp16", rounds=1, nans=True)),
        (
            "batch sizes that change",
            {},
            dict(n_tokens=first, later=tuple(later), top_k=2, hidden=64, rounds=len(BATCHES), nans=True),
        ),
    ]
    made_cases = [
        HybridCase(name, 300 + i, options, **dict(n_tokens=n_tokens) | dict(*more))
        for i, (name, options, *more) in enumerate(listed)
    ]
    return [case for case in made_cases if n_ranks % 2 == 0 or case.name != "two p2p worlds"]


def run_case(implementation, case, ranks, not_given):
    """Differences of the first round that has any, over the ranks of this process.

    not_given: a set; "overflow" and "gradients" are added to it if they were not compared.
    """
    return first_found(implementation, case, ranks, partial(_steps, case, not_given))


def _steps(case, not_given, world, call, round_):
    x, routing_map, probs = case.x(round_), case.routing_map(round_), case.probs(round_)
    if probs is not None:  # only the probs of routed pairs are read
        probs = [np.where(routed, p, np.float32("nan")) for routed, p in zip(routing_map, probs)]
    *want, known = fused_a2a.hybrid_dispatch_forward(x, routing_map, probs, case.n_local_experts, **case.options)
    arguments = dict(x=x, routing_map=routing_map, probs=probs)
    results, changed = call(world.dispatch, arguments, case.n_local_experts, **case.options)
    *got, handle = parts("dispatch", results, (*FIELDS, "handle"))
    overflow = getattr(handle, "overflow", None)
    if overflow is None:
        not_given.add("overflow")
    names = *FIELDS, "overflow"
    got = {
        name: call.over_ranks(f"dispatch: {name}", of, optional=name != "tokens_per_expert")
        for name, of in zip(names, (*got, overflow))
    }
    want = dict(zip(names, (*want, known.overflow)))
    yield changed, call.each(lambda rank: compare_hybrid.received(routing_map, known, rank, got, want))

    returned = case.telling_rows(round_, RETURNED, known, want["dispatched_hidden"])
    combined, changed = call(world.combine, dict(x=returned), handle)
    combined = call.over_ranks("combine", combined)
    sums = fused_a2a.hybrid_combine_forward(returned, known)

    def combined_rows(rank):
        return compare_hybrid.sums("combined_x", known, rank, combined[rank], sums[rank], returned)

    yield changed, call.each(combined_rows)

    if world.dispatch_backward is None or world.combine_backward is None:
        not_given.add("gradients")
        return
    rows = case.telling_rows(round_, GRAD_X, known, want["dispatched_hidden"])
    row_probs = case.gradients_of_probs(round_, want["dispatched_hidden"])
    x_want, probs_want = fused_a2a.hybrid_dispatch_backward(known, rows, row_probs)
    back, changed = call(world.dispatch_backward, dict(grad_hidden=rows, grad_probs=row_probs), handle)
    grad_x, grad_probs = parts("dispatch_backward", back, ("grad_x", "grad_probs"))
    grad_x = call.over_ranks("dispatch_backward", grad_x)
    grad_probs = call.over_ranks("dispatch_backward: grad_probs", grad_probs, optional=True)

    def gradients(rank):
        yield from compare_hybrid.sums("grad_x", known, rank, grad_x[rank], x_want[rank], rows)
        if row_probs is not None:
            yield from compare_hybrid.dense_gradients(known, rank, grad_probs, probs_want)

    yield changed, call.each(gradients)

    grad_combined = case.gradients_of_combined(round_)
    rows_want = fused_a2a.hybrid_combine_backward(known, grad_combined)
    back, changed = call(world.combine_backward, dict(grad_combined_x=grad_combined), handle)
    back = call.over_ranks("combine_backward", back)
    name = "grad_x of combine"
    yield changed, call.each(lambda rank: compare_hybrid.rows(name, known, rank, back[rank], rows_want[rank]))
