"""What the fast kernels cannot do their factories refuse; the configuration and the plain kernels may do it."""

import pytest

from epmoe import kernels
from epmoe.kernels import plain
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SIX = [name for name in plain.__all__ if name.endswith("_kernel")]


@pytest.mark.parametrize("name", SIX)
def test_top_k_above_32_is_for_the_plain_kernels(name):
    cfg = EPConfig(n_ranks=1, n_experts=40, top_k=33, hidden=8, max_tokens_per_rank=1)
    with pytest.raises(EPValueError, match="top_k=33 must be at most 32 for the fast kernels"):
        getattr(kernels, name)(cfg)
    getattr(plain, name)(cfg)


@pytest.mark.parametrize("name", SIX)
def test_a_p2p_world_has_as_many_ranks_as_the_rank_completion_region_has_words(name):
    cfg = EPConfig(n_ranks=16, n_experts=16, top_k=1, hidden=8, max_tokens_per_rank=1, p2p_world_size=16)
    for module in (kernels, plain):
        with pytest.raises(EPValueError, match="p2p_world_size=16 .*8"):
            getattr(module, name)(cfg)
