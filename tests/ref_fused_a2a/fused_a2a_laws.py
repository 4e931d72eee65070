"""Shared by the tests of fused_a2a's laws: the same worlds in every run, exact equality."""

import numpy as np
from hypothesis import HealthCheck, settings

# Derandomised, so that a run depends only on the code; slow machines do not fail.
law = settings(
    max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def assert_same_bits(got, want, name):
    """Same dtype, shape and bits; two NaNs are equal whatever their sign and payload.

    got, want: arrays, or lists over ranks of them (None where there is nothing; it stands for a list of None too).
    """
    if isinstance(want, (list, tuple)):
        got = [None] * len(want) if got is None else got
        assert len(got) == len(want), f"{name}: {len(got)} ranks, wanted {len(want)}"
        for rank, (one, other) in enumerate(zip(got, want)):
            assert_same_bits(one, other, f"{name}[rank {rank}]")
        return
    if want is None:
        assert got is None, f"{name} is {got!r}, wanted None"
        return
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{name} is {got.dtype} {got.shape}, wanted {want.dtype} {want.shape}"
    )
    bits = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits)
    if got.dtype.kind not in "iub":
        differ &= ~(np.isnan(got) & np.isnan(want))
    for place in np.argwhere(differ)[:1]:
        place = tuple(int(i) for i in place)
        raise AssertionError(f"{name}{list(place)} is {got[place]!r}, wanted {want[place]!r}")
