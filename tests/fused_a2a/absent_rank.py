"""A rank that does not come to a call on rows, and the error in which rank 0 names it."""

import pytest

from epmoe.kernels.rows.shape import parameter_block
from epmoe_ref.errors import PeerTimeout

TIMEOUT_S = 0.01


class Nothing:
    """A launch that starts nothing."""

    def __init__(self):
        self.words = [0] * parameter_block(1).n_words

    def start(self, *words):
        """Nothing."""


def without(buffer, rank, monkeypatch):
    """From here on that rank launches nothing of this Buffer."""
    prepared = buffer.machine.prepared
    buffer.changed()
    monkeypatch.setattr(
        buffer.machine, "prepared", lambda *what, **how: Nothing() if what[-1] == rank else prepared(*what, **how)
    )


def expect_named(phase, call, *arguments):
    """The call ends in rank 0's error, which names rank 1; its group has timeout=TIMEOUT_S and expire_waits=True."""
    late = rf"rank 0, {phase}: src_rank 1 did not begin the call; gave up after timeout={TIMEOUT_S} s"
    with pytest.raises(PeerTimeout, match=late):
        call(*arguments)
