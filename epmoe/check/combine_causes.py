"""Likely causes of a wrong combine: the sum is done again with one mistake at a time, until it gives what was returned.

Each mistake is a small change of the definition; only one that reproduces the whole output of the rank, to the bit, is
named.
"""

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe.check.cases import epilogue, epilogue_args
from epmoe.check.difference import bits

OUTPUT = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def with_causes(round_, rank, differences):
    """The differences of a rank's combine, each with its likely cause where one is known."""
    if not differences or differences[0].what != "output":
        return differences
    got = np.asarray(round_.combined[rank])
    if got.shape != round_.combined_want[rank].shape:
        return [d.because("the sum over slots belongs to calls with router weights; without them there is none")
                if got.ndim + round_.combined_want[rank].ndim == 5 else d for d in differences]
    test = _weighted if round_.case.weighted else _unweighted
    with np.errstate(all="ignore"):
        cause = test(Sum(round_, rank), got)
    return [d.because(cause) if cause else d for d in differences]


class Sum:
    """The ingredients of one rank's combine: recv [T, top_k, hidden], takes_part [T, top_k], weights [T, top_k]."""

    def __init__(self, round_, rank):
        cfg = round_.cfg
        self.round, self.rank, self.cfg, self.dtype = round_, rank, cfg, OUTPUT[cfg.combine_dtype]
        ids = round_.topk_ids[rank]
        self.ids, self.takes_part = ids, ids >= 0
        if cfg.skip_a2a:
            self.takes_part &= ids // cfg.n_local_experts == rank
        token, slot = np.indices(ids.shape)
        self.recv = round_.case.pair_outputs(round_.number, ids // cfg.n_local_experts, rank, token, slot)
        self.recv = np.where(self.takes_part[..., None], self.recv, 0).astype(self.dtype)
        if round_.router_weights is not None:
            self.weights = np.where(self.takes_part, round_.router_weights[rank], 0).astype(np.float32)

    def routed(self, weights=None, slots=None, step=lambda acc: acc, product=np.float64):
        """The sum over slots; `step` is applied to it after every slot, products are rounded to `product`."""
        weights = self.weights if weights is None else weights
        acc = np.zeros(self.recv[:, 0].shape, np.float32)
        for k in range(self.cfg.top_k) if slots is None else slots:
            term = (weights[:, k, None].astype(np.float64) * self.recv[:, k].astype(np.float64)).astype(product)
            added = step((acc.astype(np.float64) + term).astype(np.float32))
            acc = np.where(self.takes_part[:, k, None], added, acc)
        return acc

    def shared(self):
        first, n = epmoe_ref.shared_expert_share(self.cfg, self.rank, len(self.ids))
        rows = np.zeros((len(self.ids), self.cfg.hidden), self.dtype)
        rows[first:first + n] = self.round.case.shared_outputs(self.round.number, self.rank, n)
        return rows.astype(np.float32)

    def finish(self, acc, shared=True, lambda_=True):
        """Rounding, the shared expert, rounding, epilogue, rounding."""
        value = acc.astype(self.dtype)
        if shared and self.cfg.fused_shared_expert:
            value = (value.astype(np.float32) + self.shared()).astype(self.dtype)
        if lambda_ and self.round.case.epilogue:
            args = [a[self.rank] for a in epilogue_args(self.cfg.n_ranks)]
            value = epilogue(None, None, value.astype(np.float32), *args).astype(self.dtype)
        return value

    def rounded(self, acc):
        return acc.astype(self.dtype).astype(np.float32)


def _same(a, b):
    return bool(((bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))).all())


def _weighted(s, got):
    got = np.ascontiguousarray(got).view(s.dtype)
    has_gap = (~s.takes_part).any(axis=1)
    if np.isnan(got).any() and (np.isnan(got).any(axis=1) == has_gap).all():
        return "slots of -1 take part: NaN at exactly the tokens that have one; such a slot adds nothing, whatever its " \
               "weight"
    name = s.cfg.combine_dtype
    mistakes = (
        ("the weights are applied twice", lambda: s.routed(s.weights * s.weights)),
        ("the weights are not applied", lambda: s.routed(np.ones_like(s.weights))),
        ("the weights are in another order than the slots: reversed", lambda: s.routed(s.weights[:, ::-1])),
        ("the weights are shifted by one slot", lambda: s.routed(np.roll(s.weights, 1, axis=1))),
        ("the weights are shifted by one slot", lambda: s.routed(np.roll(s.weights, -1, axis=1))),
        ("the slots are added in descending order", lambda: s.routed(slots=range(s.cfg.top_k)[::-1])),
        (f"double rounding: the sum is rounded to {name} after every slot; it stays float32 until the end",
         lambda: s.routed(step=s.rounded)),
        (f"double rounding: every product is rounded to {name} before it is added",
         lambda: s.routed(product=s.dtype)),
        ("each product is rounded to float32 before it is added; a fused multiply-add rounds once a step",
         lambda: s.routed(product=np.float32)),
        ("the sum is kept in float64; one rounding to float32 a step is the definition", lambda: _in_float64(s)),
    )
    for cause, acc in mistakes:
        if _same(got, s.finish(acc())):
            return cause
    acc = s.routed()
    endings = (
        (s.cfg.fused_shared_expert, "the shared expert's rows are not added", lambda: s.finish(acc, shared=False)),
        (s.cfg.fused_shared_expert, f"the shared expert's row is added before the sum is rounded to {name}; it is added "
                                    "after", lambda: s.finish(acc + s.shared(), shared=False)),
        (s.round.case.epilogue, "the epilogue is not called", lambda: s.finish(acc, lambda_=False)),
    )
    for applies, cause, output in endings:
        if applies and _same(got, output()):
            return cause
    return _left_over(s, got)


def _in_float64(s):
    terms = s.weights[..., None].astype(np.float64) * s.recv.astype(np.float64)
    return np.where(s.takes_part[..., None], terms, 0).sum(axis=1)


def _unweighted(s, got):
    got = np.ascontiguousarray(got).view(s.dtype)
    if _same(got[s.takes_part], s.recv[s.takes_part]):
        return "rows of slots with -1 are not zero"
    return _left_over(s, got)


def _left_over(s, got):
    previous = s.round.previous
    if previous is None or previous.combined is None or previous.combined[s.rank].shape != got.shape:
        return ""
    before = np.ascontiguousarray(previous.combined[s.rank]).view(s.dtype)
    want = s.round.combined_want[s.rank]
    wrong = (bits(got) != bits(want)).reshape(len(got), -1).any(axis=1)
    return "stale rows: the wrong tokens hold what the round before left there" if _same(got[wrong], before[wrong]) else ""
