"""A recorded round, made once for all tests of a process."""

from functools import cache

from epmoe.explain.history import History
from epmoe.explain.inputs import routed_for
from epmoe.explain.recording import record
from epmoe_ref.config import EPConfig


@cache
def history(fused=False, token_format="bf16", seed=0, ranks=3):
    hidden = 128 if token_format != "bf16" else 64
    cfg = EPConfig(ranks, 2 * ranks, 2, hidden, 2, token_format=token_format)
    return History(record(cfg, routed_for(cfg, seed), fused=fused, seed=seed))
