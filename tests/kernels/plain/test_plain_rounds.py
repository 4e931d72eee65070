"""The plain kernels, split and fused, against the reference: rounds follow one another and each is exact."""

import numpy as np
import pytest
from plain_world import PlainWorld
from rounds import run_round

from epmoe_ref.config import EPConfig

CASES = {
    "two ranks": (dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=6), [5, 6], {}),
    "an empty rank": (dict(n_ranks=3, n_experts=6, top_k=3, hidden=24, max_tokens_per_rank=5), [5, 0, 3], {}),
    "one rank": (dict(n_ranks=1, n_experts=3, top_k=3, hidden=8, max_tokens_per_rank=9), [9], {}),
    "nobody has a token": (dict(n_ranks=2, n_experts=2, top_k=1, hidden=8, max_tokens_per_rank=2), [0, 0], {}),
    "a hot expert": (dict(n_ranks=2, n_experts=8, top_k=2, hidden=8, max_tokens_per_rank=70), [70, 66], dict(hot=5)),
}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("case", CASES)
def test_rounds_are_exact_and_need_no_host_reset(case, fused):
    sizes, counts, options = CASES[case]
    cfg, rng = EPConfig(**sizes), np.random.default_rng(len(case))
    world = PlainWorld(cfg, fused=fused)
    for _ in range(2):
        run_round(world, rng, counts, **options)
