"""A rank that does not come to a call on rows: the others name it, and after reset() calls are equal again."""

from contextlib import contextmanager

import numpy as np
import pytest
from against_reference import equal_rows
from rows_group import group_of, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import rows as rows_calls
from epmoe.kernels.rows.shape import parameter_block
from epmoe_ref.errors import EPStateError, PeerTimeout
from epmoe_ref.strategies import RowsWorld

TIMEOUT_S = 0.01


class Nothing:
    """A launch that starts nothing."""

    def __init__(self):
        self.words = [0] * parameter_block(1).n_words

    def start(self, *words):
        """Nothing."""


def without(buffer, rank, monkeypatch):
    """From here on that rank launches nothing of this Buffer."""
    prepare = buffer.prepare
    buffer.changed()
    monkeypatch.setattr(
        buffer, "prepare", lambda kernel, r, *more: Nothing() if r.rank == rank else prepare(kernel, r, *more)
    )


def expect_named(phase, call, *arguments):
    """The call ends in rank 0's error, which names rank 1; its group has timeout=TIMEOUT_S and expire_waits=True."""
    late = rf"rank 0, {phase}: src_rank 1 did not begin the call; gave up after timeout={TIMEOUT_S} s"
    with pytest.raises(PeerTimeout, match=late):
        call(*arguments)


class CallsWithoutRank1:
    """The calls of rows_without_rank_1: each is expected to name rank 1, and followed by reset()."""

    def __init__(self, group, rng, world, handle):
        self.group, self._rng, self._world, self._handle = group, rng, world, handle
        self._buffer = fused_a2a.get_buffer(group, 0)

    def _expect_named(self, phase, call, *arguments):
        expect_named(phase, call, *arguments)
        with pytest.raises(EPStateError, match=r"call reset\(\)"):
            call(*arguments)
        self._buffer.reset()

    def dispatch(self):
        """fused_dispatch of the world."""
        world = self._world
        self._expect_named(
            "dispatch of rows",
            fused_a2a.fused_dispatch,
            world.x,
            world.token_indices,
            world.token_probs,
            world.num_experts,
            self.group,
        )

    def combine(self):
        """fused_combine of random rows."""
        rows = tokens(self._rng, self._handle.num_rows, 8)
        self._expect_named("combine of rows", fused_a2a.fused_combine, rows, self.group, self._handle)

    def cached_dispatch(self):
        """A dispatch with the handle, as combine's backward makes it."""
        self._expect_named(
            "dispatch of rows",
            self._buffer.call,
            "the gradient of fused_combine",
            rows_calls.CachedPlan,
            ("x",),
            (self._world.x,),
            (None,),
            self._handle,
        )


@contextmanager
def rows_without_rank_1(monkeypatch, seed, num_tokens):
    """CallsWithoutRank1 of three ranks that all came once; behind it all come again, twice, and calls are equal."""
    group, rng = group_of(3, timeout=TIMEOUT_S, expire_waits=True), np.random.default_rng(seed)
    ids, probs = routing(rng, num_tokens, 6, 6, dropped=0)
    world = RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 6)
    _, handle = equal_rows(group, world, rng)
    with monkeypatch.context() as patch:
        without(fused_a2a.get_buffer(group, 0), 1, patch)
        yield CallsWithoutRank1(group, rng, world, handle)
    for _ in range(2):
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 6), rng)
