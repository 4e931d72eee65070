"""Bad ids for the rows kernels, as device memory can hold them. In host arrays the host refuses them."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from epmoe.kernels import status
from epmoe.mutants.errors import WrongResult

OUTSIDE = (2**32, -2, 2**40 + 1, -1, -(2**63), 2**31)  # and the first number past the experts


def spoilt(ids, n_experts):
    """The ids int64 [T, top_k] with some -1 replaced by bad ids, which kernels must treat as -1."""
    others = np.array([n_experts, *OUTSIDE], np.int64)
    bad = np.where(ids < 0, others[np.arange(ids.size) % len(others)].reshape(ids.shape), ids)
    again = (ids[:, -1] < 0) & (ids[:, 0] >= 0)
    bad[again, -1] = ids[again, 0]
    return bad


@contextmanager
def counted(ids, n_experts, n_dispatches, kernels):
    """Context of dispatches with such ids. Raises WrongResult unless kernels report every one, every time.

    ids: of each rank, before the replacement. kernels: the package that the host uses.
    """
    told = Counter()

    def count(words, rank):
        told[rank, "outside"] += int(words[status.BAD_IDS])
        told[rank, "repeated"] += int(words[status.REPEATED_IDS])

    told_to = f"{kernels.__name__}.rows.wait.raise_if_bad_ids"
    with patch("epmoe.host.inputs.check_ids"), patch(told_to, count):
        yield
    for rank, clean in enumerate(ids):
        bad = spoilt(clean, n_experts)
        outside = (bad < -1) | (bad >= n_experts)
        want = (n_dispatches * int(outside.sum()), n_dispatches * int(((bad != clean) & ~outside).sum()))
        if (told[rank, "outside"], told[rank, "repeated"]) != want:
            raise WrongResult(f"rank {rank}: (outside, repeated) ids told {dict(told)}, not {want}")
