"""Small configurations and inputs for the tests of the host side; what is refused, and what equals the reference."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import epmoe_ref
from epmoe import EPConfig, EPValueError, ExpertParallel, LaunchConfig, LocalWorld, layout
from epmoe.check import compare_combined_world, compare_dispatched_world, report
from epmoe.host.arrays import to_numpy

BF16 = ml_dtypes.bfloat16
SMALLEST = LaunchConfig(n_sms=2, num_threads=32)


def config(**changes):
    sizes = dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)
    return EPConfig(**sizes | changes)


def parallel(cfg, *, launch=SMALLEST, **options):
    """An ExpertParallel over a LocalWorld; simulation options go to the world."""
    simulation = {k: options.pop(k) for k in ("seed", "racecheck", "expire_waits") if k in options}
    return ExpertParallel(cfg, LocalWorld(cfg.n_ranks, **simulation), launch=launch, **options)


def batch(cfg, seed=0, num_tokens=None):
    """x, topk_ids, router weights: lists over ranks; ids distinct in a token, about one in six -1."""
    rng = np.random.default_rng(seed)
    num_tokens = num_tokens or [cfg.max_tokens_per_rank - r % 2 for r in range(cfg.n_ranks)]
    x, ids, weights = [], [], []
    for n in num_tokens:
        x.append(rng.standard_normal((n, cfg.hidden)).astype(BF16))
        order = np.argsort(rng.random((n, cfg.n_experts)), axis=1)
        of_rank = order[:, : cfg.top_k].astype(np.int32)
        of_rank[rng.random(of_rank.shape) < 1 / 6] = -1
        ids.append(of_rank)
        weights.append(rng.random((n, cfg.top_k)).astype(np.float32))
    return x, ids, weights


def regions(ep):
    """All memory of all ranks."""
    names = [name for name, *_ in layout.named_words(ep.cfg)]
    return {(name, rank): ep.region(name, rank) for name in names for rank in ep.world.ranks}


@contextmanager
def refused(ep, said):
    """What happens inside raises an EPValueError that says this; nothing is placed, launched or written, of no rank."""
    before, launched, placing = regions(ep), ep.world.machine.count, ep._engine.placing
    with patch.object(placing, "place", wraps=placing.place) as place:
        with pytest.raises(EPValueError, match=said):
            yield
    assert ep.world.machine.count == launched and not place.called
    after = regions(ep)
    assert all(np.array_equal(after[name], before[name]) for name in before)


def scaled_rows(d, factor):
    """Expert outputs that depend on the expert: rows of group g times factor + g, in bf16."""
    y = []
    for of_rank in d:
        offsets = np.asarray(of_rank.row_offsets).astype(np.int64)
        rows = np.asarray(of_rank.output_tokens)[: offsets[-1]].astype(np.float32)
        group = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        y.append((rows * (factor + group)[:, None]).astype(BF16))
    return y


def equal_dispatch(cfg, d, x, ids, **options):
    """The reference's results; those here are equal."""
    want = epmoe_ref.dispatch(cfg, x, ids, **options)
    found = compare_dispatched_world(cfg, [a.trimmed().numpy() for a in d], want)
    assert not found, report(found)
    return want


def equal_combine(cfg, out, want, weights):
    """The reference's rows, as they are, combined by the reference are these outputs."""
    rows = [a.output_tokens for a in want]
    expected = epmoe_ref.combine(cfg, rows, want, router_weights=weights)
    found = compare_combined_world(cfg, [to_numpy(a) for a in out], expected)
    assert not found, report(found)


def combine(ep, d, weights=None, *functions, **options):
    """What combine makes of the dispatched rows as they are."""
    return ep.combine([a.output_tokens for a in d], d, weights, *functions, **options)


def equal_round(ep, x, ids, weights):
    """A round whose experts are the identity is the reference's."""
    d = ep.dispatch(x, ids)
    equal_combine(ep.cfg, combine(ep, d, weights), equal_dispatch(ep.cfg, d, x, ids), weights)


class OtherStart:
    """Kernels, one of which begins with start(its launch, cfg, what was wanted, the words that it would start with)."""

    def __init__(self, kernels, name, start):
        self.kernels, self.name, self.start = kernels, name, start

    def __getattr__(self, name):
        made = getattr(self.kernels, name)

        def factory(cfg, *arguments, **options):
            call = made(cfg, *arguments, **options)
            prepared = call.prepared

            def changed(wanted):
                launch = prepared(wanted)
                return SimpleNamespace(start=lambda *words: self.start(launch, cfg, wanted, words))

            call.prepared = changed
            return call

        return factory if name == self.name else made


def same_bits(some, others):
    """Whether two lists of 16-bit arrays hold the same."""
    bits = [[np.ascontiguousarray(a).view(np.uint16) for a in of] for of in (some, others)]
    return all(map(np.array_equal, *bits))
