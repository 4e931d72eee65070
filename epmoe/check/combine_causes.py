"""Likely causes of a wrong combine. Computes the sum again with one mistake at a time, until it equals the result.

Each mistake is a small change of the definition. It is named only if it reproduces the rank's whole output bit for bit.
"""

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe.check.cases import epilogue, epilogue_args
from epmoe.check.causes import explained
from epmoe.check.compare import same_type
from epmoe.check.count_causes import up_to_minus_one, without_minus_one
from epmoe.check.difference import as_array, bits
from epmoe.check.place_causes import SUMS_LOST, outputs_beside
from epmoe.check.seen_causes import SEEN, of_sums

BESIDE = "each (token, k) has the row next to its own of expert_outputs: rows are read or written one place off"
OUTPUT = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def with_causes(round_, differences):
    """The differences of a round's combine, each with its likely cause if one is known."""

    def candidates(difference):
        got = as_array(round_.combined[difference.rank])
        want = round_.combined_want[difference.rank]
        if not same_type(got, want):
            return []
        if {got.ndim, want.ndim} == {2, 3}:
            return ["with router weights the rows are summed, without them they are not"]
        if got.shape != want.shape:
            return []
        got = np.ascontiguousarray(got).view(want.dtype)
        with np.errstate(all="ignore"):
            causes = (_weighted if round_.case.weighted else _unweighted)(Sum(round_, difference.rank), got)
            return causes + of_sums(got, want)

    return explained(differences, candidates, (*SEEN, SUMS_LOST))


class Sum:
    """The ingredients of one rank's combine: recv [T, top_k, hidden], takes_part [T, top_k], weights [T, top_k]."""

    def __init__(self, round_, rank):
        cfg = round_.cfg
        self.round, self.rank, self.cfg, self.dtype = round_, rank, cfg, OUTPUT[cfg.combine_dtype]
        ids = round_.topk_ids[rank]
        self.ids, self.takes_part = ids, ids >= 0
        if cfg.skip_a2a:
            self.takes_part &= ids // cfg.n_local_experts == rank
        token, k = np.indices(ids.shape)
        self.recv = round_.case.pair_outputs(round_.number, ids // cfg.n_local_experts, rank, token, k)
        self.recv = np.where(self.takes_part[..., None], self.recv, 0).astype(self.dtype)
        if round_.router_weights is not None:
            self.weights = np.where(self.takes_part, round_.router_weights[rank], 0).astype(np.float32)

    def routed(self, weights=None, order=None, step=lambda acc: acc, product=np.float64, only=None, start=None):
        """The sum over k. `step` is applied to it after every k, and products are rounded to `product`.

        order: int [T, top_k], the order of k for each token; default ascending. only: bool [T, top_k], the pairs that
        count; default: all that have an expert. start: float32 [T, hidden], the first value of the sum.
        """
        weights = self.weights if weights is None else weights
        only = self.takes_part if only is None else only
        acc = np.zeros(self.recv[:, 0].shape, np.float32) if start is None else start
        token = np.arange(len(acc))
        for k in range(self.cfg.top_k):
            place = k if order is None else order[:, k]
            term = (weights[token, place, None].astype(np.float64) * self.recv[token, place].astype(np.float64)).astype(
                product
            )
            added = step((acc.astype(np.float64) + term).astype(np.float32))
            acc = np.where(only[token, place, None], added, acc)
        return acc

    def by_expert(self):
        """int [T, top_k]: for each token, k in the order of ascending expert ids."""
        return np.argsort(self.ids, axis=1, kind="stable")

    def over_ranks(self, part):
        """Each rank's sums, with `part` applied to each, added over ranks in float32."""
        owner = self.ids // self.cfg.n_local_experts
        total = np.zeros(self.recv[:, 0].shape, np.float32)
        for rank in range(self.cfg.n_ranks):
            total += part(self.routed(only=self.takes_part & (owner == rank)))
        return total

    def shared(self):
        """float32 [T, hidden]: the shared expert's rows. Zero for tokens outside the rank's share."""
        first, n = epmoe_ref.shared_expert_share(self.cfg, self.rank, len(self.ids))
        rows = np.zeros((len(self.ids), self.cfg.hidden), self.dtype)
        rows[first : first + n] = self.round.case.shared_outputs(self.round.number, self.rank, n)
        return rows.astype(np.float32)

    def finish(self, acc, shared=True, lambda_=True, exact=False):
        """Round, add the shared expert, round, apply the epilogue, round. exact: the epilogue gets what is not rounded."""
        value = acc
        if shared and self.cfg.fused_shared_expert:
            value = self.rounded(acc) + self.shared()
        if lambda_ and self.round.case.epilogue:
            args = [a[self.rank] for a in epilogue_args(self.cfg.n_ranks)]
            value = epilogue(None, None, value if exact else self.rounded(value), *args)
        return value.astype(self.dtype)

    def rounded(self, acc):
        """Rounded to the output's type, as float32."""
        return acc.astype(self.dtype).astype(np.float32)


def _same(a, b):
    return bool(((bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))).all())


def _weighted(s, got):
    name = s.cfg.combine_dtype
    mistakes = (
        (
            "the weights are rounded to bf16; they are float32",
            lambda: s.routed(s.weights.astype(OUTPUT["bf16"]).astype(np.float32)),
        ),
        (
            "a sum ends at its token's first -1; each k counts for itself, whatever is before it",
            lambda: s.routed(only=s.takes_part & up_to_minus_one(s.ids)),
        ),
        (
            "exactly the tokens that have a -1 have no sum; their other k count",
            lambda: s.routed(only=s.takes_part & without_minus_one(s.ids)),
        ),
        ("the weights are applied twice", lambda: s.routed(s.weights * s.weights)),
        ("the weights are not applied", lambda: s.routed(np.ones_like(s.weights))),
        (
            "the weights are normalised, so that a token's add up to 1; they must be used as given",
            lambda: s.routed(s.weights / s.weights.sum(axis=1, keepdims=True)),
        ),
        ("the weights are in the reverse order of k", lambda: s.routed(s.weights[:, ::-1])),
        ("the weights are shifted by one: k's weight goes to k + 1", lambda: s.routed(np.roll(s.weights, 1, axis=1))),
        ("the weights are shifted by one: k's weight goes to k - 1", lambda: s.routed(np.roll(s.weights, -1, axis=1))),
        (
            "the weights are in the order of the experts' ids, not of k",
            lambda: s.routed(np.take_along_axis(s.weights, s.by_expert(), axis=1)),
        ),
        (
            "each product is rounded to float32 before it is added; a fused multiply-add rounds once a step",
            lambda: s.routed(product=np.float32),
        ),
        (
            "the rows are added in descending order of k",
            lambda: s.routed(order=np.broadcast_to(np.arange(s.cfg.top_k)[::-1], s.ids.shape)),
        ),
        ("the rows are added in the order of their experts' ids", lambda: s.routed(order=s.by_expert())),
        (
            "each rank's rows are summed first, then the ranks' sums; the definition is one sum over all k",
            lambda: s.over_ranks(lambda part: part),
        ),
        (
            f"each rank's rows are summed first and rounded to {name}, then the ranks' sums; the definition is one sum "
            "over all k",
            lambda: s.over_ranks(s.rounded),
        ),
        (
            f"double rounding: the sum is rounded to {name} after every row; it stays float32 until the end",
            lambda: s.routed(step=s.rounded),
        ),
        (f"double rounding: every product is rounded to {name} before it is added", lambda: s.routed(product=s.dtype)),
        ("the sum is kept in float64; one rounding to float32 a step is the definition", lambda: _in_float64(s)),
    )
    causes = _ids_of_minus_one(s, got)
    causes += [cause for cause, acc in mistakes if _same(got, s.finish(acc()))]
    if _begins_with_the_round_before(s, got):
        causes.append("the sum begins with the previous round's, which was not cleared; it must begin with +0")
    acc = s.routed()
    if s.cfg.combine_dtype == "bf16" and _same(got, s.finish(_toward_zero(acc))):
        causes.append("the sum is cut off to bf16; it is rounded to nearest even")
    if s.cfg.combine_dtype == "bf16" and _same(got, s.finish(_toward_zero(_half_away(acc)))):
        causes.append("halves are rounded away from zero (+ 0x8000); the sum is rounded to nearest even")
    if s.cfg.fused_shared_expert and _same(got, s.finish(acc, shared=False)):
        causes.append("the shared expert's rows are not added")
    if s.cfg.fused_shared_expert and _same(got, s.finish(acc + s.shared(), shared=False)):
        causes.append(f"the shared expert's row is added before the sum is rounded to {name}; it is added after")
    if s.round.case.epilogue and _same(got, s.finish(acc, lambda_=False)):
        causes.append("the epilogue is not called")
    if s.round.case.epilogue and _same(got, s.finish(acc, exact=True)):
        causes.append(f"the epilogue got the sum before it was rounded to {name}")
    if any(_same(got[known], other.finish(other.routed())[known]) for other, known in outputs_beside(s) if known.any()):
        causes.append(BESIDE)
    return causes + _of_other_rank(s, got) + _left_over(s, got)


def _begins_with_the_round_before(s, got):
    """Whether the previous round's sum, before rounding, was not cleared."""
    if s.round.previous is None:
        return False
    acc = None
    for round_ in _earlier(s.round):
        of = Sum(round_, s.rank)
        if acc is not None and acc.shape != of.recv[:, 0].shape:
            return False
        acc = of.routed(start=acc)
    return acc.shape == s.recv[:, 0].shape and _same(got, s.finish(s.routed(start=acc)))


def _earlier(round_):
    """The rounds before this one, the first one first."""
    rounds = []
    while (round_ := round_.previous) is not None:
        rounds.insert(0, round_)
    return rounds


def _toward_zero(acc):
    """Float32 numbers with their lower half cut off, so that rounding them to bf16 changes nothing."""
    return np.where(np.isnan(acc), acc, (acc.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))


def _half_away(acc):
    """Float32 numbers whose upper half is rounded to nearest, halves away from zero."""
    return np.where(np.isfinite(acc), (acc.view(np.uint32) + np.uint32(0x8000)).view(np.float32), acc)


def _ids_of_minus_one(s, got):
    nan = np.isnan(got).any(axis=1)
    if nan.any() and (nan == (~s.takes_part).any(axis=1)).all():
        return [
            "ids of -1 take part: NaN at exactly the tokens that have one; an id of -1 adds nothing, whatever "
            "its weight"
        ]
    return []


def _in_float64(s):
    terms = s.weights[..., None].astype(np.float64) * s.recv.astype(np.float64)
    return np.where(s.takes_part[..., None], terms, 0).sum(axis=1)


def _unweighted(s, got):
    if _same(got[s.takes_part], s.recv[s.takes_part]):
        return ["rows of ids of -1 are not zero"]
    if any(_same(got[known], other.recv[known]) for other, known in outputs_beside(s) if known.any()):
        return [BESIDE]
    return _of_other_rank(s, got) + _left_over(s, got)


def _of_other_rank(s, got):
    others = [(rank, want) for rank, want in enumerate(s.round.combined_want) if rank != s.rank]
    return [
        f"these are the tokens of rank {rank}" for rank, want in others if want.shape == got.shape and _same(got, want)
    ]


def _left_over(s, got):
    previous = s.round.previous
    before = None if previous is None else previous.combined[s.rank]
    if before is None:
        return []
    before, want = np.asarray(before), s.round.combined_want[s.rank]
    wrong = np.flatnonzero((bits(got) != bits(want)).reshape(len(got), -1).any(axis=1))
    if before.shape[1:] != got.shape[1:] or len(before) <= wrong[-1]:
        return []
    before = np.ascontiguousarray(before).view(s.dtype)
    if _same(got[wrong], before[wrong]):
        return ["stale rows: the wrong tokens hold what the previous round left there"]
    added = (want[wrong].astype(np.float32) + before[wrong].astype(np.float32)).astype(s.dtype)
    if _same(got[wrong], added):
        return ["the sum is added to what the previous round left there; it must replace that"]
    return []
