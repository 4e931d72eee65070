"""fused_a2a cases, and how to run one on a RowsImplementation: dispatch, made-up rows, combine, both gradients."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from epmoe.check import random_bits
from epmoe.check.calls import first_found, parts
from epmoe.check.cancelling import cancelling
from epmoe.check.cases import BATCHES, MANY_EXPERTS, Batches, batches, large_batch
from epmoe.check.compare_rows import compare_combined_rows, compare_prob_gradients, compare_received, compare_rows_back
from epmoe.check.edges import edge_nans, edge_rows, edge_tokens
from epmoe.check.made_arrays import GRAD_OUT, GRAD_PROBS, GRAD_X, made
from epmoe_ref import fused_a2a
from epmoe_ref.fused_a2a.hybrid import blockwise_fp8

FIELDS = "recv_x", "recv_token_indices", "recv_token_probs", "tokens_per_expert"
X, ROUTING, GAPS, PROBS, RETURNED = range(100, 105)


@dataclass(frozen=True)
class RowsCase(Batches):
    """One world of fused_a2a. Routing is as in epmoe.check.cases.Case."""

    name: str
    seed: int
    n_tokens: tuple
    n_experts: int
    top_k: int
    hidden: int
    routing: str = "spread"
    rounds: int = 2
    edges: bool = False  # values for which arithmetic differs, in x and in the experts' results
    dtype: str = "bf16"  # of x: "bf16", "fp16", "fp32", or "fp8" for pairs (e4m3, float32 scales)
    later: tuple = ()
    nans: bool = False  # x has NaN of other bits than the usual ones

    @property
    def summed(self):
        """The type of the experts' outputs and of the gradients."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    def x(self, round_):
        """[T, H] over ranks, or pairs."""
        plain = [
            random_bits.floats(self.summed, random_bits.stream(self.seed, round_, X, rank, np.arange(n)), self.hidden)
            for rank, n in enumerate(self.batch(round_))
        ]
        if self.dtype == "fp8":
            return list(zip(*blockwise_fp8(plain)))
        if self.nans:
            return [edge_nans(x) for x in plain]
        if not self.edges:
            return plain
        return [edge_tokens(x, random_bits.stream(self.seed, rank)) for rank, x in enumerate(plain)]

    def token_indices(self, round_):
        """int64 [T, K] over ranks."""
        return [self._indices(round_, rank, n) for rank, n in enumerate(self.batch(round_))]

    def _indices(self, round_, rank, n):
        ids = random_bits.permutations(random_bits.stream(self.seed, round_, ROUTING, rank), n, self.n_experts)
        if self.routing == "hot":
            ids = np.argsort(np.where(np.arange(self.n_experts) == 0, -1, ids), axis=1, kind="stable")
        ids = ids[:, : self.top_k].copy()
        gaps = random_bits.words(random_bits.stream(self.seed, round_, GAPS, rank), ids.size).reshape(ids.shape)
        if self.routing == "gaps":
            ids[gaps % np.uint64(3) == 0] = -1
        ids[self.idle(round_, ids)] = -1
        return np.full_like(ids, -1) if self.routing == "dropped" else ids

    def token_probs(self, round_):
        """float32 [T, K] over ranks, not zero where the id is -1."""
        seeds = [random_bits.stream(self.seed, round_, PROBS, rank) for rank in range(len(self.n_tokens))]
        probs = [random_bits.floats("fp32", s, n * self.top_k, (-5, -1)) for s, n in zip(seeds, self.batch(round_))]
        return [np.abs(of_rank).reshape(-1, self.top_k) for of_rank in probs]

    def gradients(self, round_, recv_ids):
        """([N, H], float32 as recv_ids and zero at its -1), over ranks: the arguments of dispatch_backward."""
        shapes = [(len(ids), self.hidden) for ids in recv_ids]
        of_x = [made(self.summed, self.seed, round_, GRAD_X, rank, shape) for rank, shape in enumerate(shapes)]
        return of_x, [
            np.where(ids >= 0, made("fp32", self.seed, round_, GRAD_PROBS, rank, ids.shape), np.float32(0))
            for rank, ids in enumerate(recv_ids)
        ]

    def gradients_of_combined(self, round_):
        """[T, hidden] over ranks: the argument of combine's backward."""
        shapes = [(n, self.hidden) for n in self.batch(round_)]
        return [made(self.summed, self.seed, round_, GRAD_OUT, rank, shape) for rank, shape in enumerate(shapes)]

    def returned(self, round_, handle):
        """The experts' outputs for the rows of the reference's handle: [N, hidden] over ranks."""
        rows = [
            random_bits.floats(
                self.summed, random_bits.stream(self.seed, round_, RETURNED, rank, *of_rows), self.hidden
            )
            for rank, of_rows in enumerate(zip(handle.src_rank, handle.src_token))
        ]
        return edge_rows(rows, handle.row_of, self.seed) if self.edges else rows


def cases(n_ranks=4):
    """The fused_a2a cases for a world of n_ranks."""
    n = 3 * n_ranks
    uneven = tuple((8, 5, 1, 6, 3, 7, 2, 4)[rank % 8] for rank in range(n_ranks))
    one_empty = tuple(0 if rank == n_ranks - 1 else count for rank, count in enumerate(uneven))
    first, *later = batches(n_ranks)
    listed = [
        ("uneven ranks", uneven, n, min(4, n), 128),
        ("slots without an expert", uneven, n, min(4, n), 128, "gaps", 3),
        ("a rank without tokens", one_empty, n, min(4, n), 128, "gaps"),
        ("no slot has an expert", uneven, n, min(4, n), 128, "dropped"),
        ("a hot expert", uneven, n, 2, 128, "hot"),
        ("one slot", uneven, n, 1, 256),
        ("as many slots as experts", uneven, n, n, 128),
        ("bf16 at the edges of its numbers", (8,) * n_ranks, n, min(4, n), 128, "spread", 1, True),
        ("many local experts, a large batch", large_batch(n_ranks), MANY_EXPERTS * n_ranks, 2, 64, "spread", 1),
        ("five rounds", (2,) * n_ranks, n, 2, 64, "gaps", 5),
        ("fp8 pairs", uneven, n, 2, 256, "gaps", 1, False, "fp8"),
        ("fp16", uneven, n, min(4, n), 64, "gaps", 1, False, "fp16", (), True),
        ("float32", uneven, n, min(4, n), 64, "gaps", 1, False, "fp32", (), True),
        ("batch sizes that change", first, n, 2, 64, "gaps", len(BATCHES), False, "bf16", tuple(later), True),
    ]
    return [RowsCase(name, seed, *sizes) for seed, (name, *sizes) in enumerate(listed)]


def run_case(implementation, case, ranks, not_given):
    """Differences of the first round that has any, over the ranks of this process.

    not_given: a set; "gradients" is added to it if the implementation has no backward functions.
    """
    return first_found(implementation, case, ranks, partial(_steps, case, not_given))


def _steps(case, not_given, world, call, round_):
    x, ids, probs = case.x(round_), case.token_indices(round_), case.token_probs(round_)
    *want, handle_want = fused_a2a.dispatch_forward(x, ids, probs, case.n_experts)
    rows = [np.stack(pair, axis=1) for pair in zip(handle_want.src_rank, handle_want.src_token)]
    results, changed = call(world.dispatch, dict(x=x, token_indices=ids, token_probs=probs), case.n_experts)
    *got, handle = parts("dispatch", results, (*FIELDS, "handle"))
    got = [call.over_ranks(f"dispatch: {name}", of) for name, of in zip(FIELDS, got)]

    def received(rank):
        return compare_received(rank, rows[rank], [part[rank] for part in got], [part[rank] for part in want])

    yield changed, call.each(received)

    returned = case.returned(round_, handle_want)
    if round_:  # in the first round they are the golden vector's
        returned = cancelling(returned, handle_want.row_of, 1, case.seed + round_)
    combined_want = fused_a2a.combine_forward(returned, handle_want)
    combined, changed = call(world.combine, dict(x=returned), handle)
    combined = call.over_ranks("combine", combined)

    def sums(rank):
        return compare_combined_rows(rank, combined[rank], combined_want[rank], returned, handle_want.row_of[rank])

    yield changed, call.each(sums)

    if world.dispatch_backward is None or world.combine_backward is None:
        not_given.add("gradients")
        return
    grads, of_probs = case.gradients(round_, want[1])
    grads = cancelling(grads, handle_want.row_of, 1, case.seed + round_) if round_ else grads
    x_want, probs_want = fused_a2a.dispatch_backward(handle_want, grads, of_probs)
    back, changed = call(world.dispatch_backward, dict(grad_recv_x=grads, grad_recv_token_probs=of_probs), handle)
    back = parts("dispatch_backward", back, ("grad_x", "grad_token_probs"))
    grad_x, grad_probs = (call.over_ranks("dispatch_backward", of) for of in back)

    def gradients(rank):
        yield from compare_combined_rows(rank, grad_x[rank], x_want[rank], grads, handle_want.row_of[rank], "grad_x")
        yield from compare_prob_gradients(rank, grad_probs[rank], probs_want[rank])

    yield changed, call.each(gradients)

    grad_combined = case.gradients_of_combined(round_)
    rows_want = fused_a2a.combine_backward(handle_want, grad_combined)
    back, changed = call(world.combine_backward, dict(grad_combined_x=grad_combined), handle)
    back = call.over_ranks("combine_backward", back)
    yield changed, call.each(lambda rank: compare_rows_back(rank, rows[rank], back[rank], rows_want[rank]))
