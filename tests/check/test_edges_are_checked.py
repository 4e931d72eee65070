"""Implementations that lose NaN, subnormals, large numbers or the sign of zero fail, in every layout."""

import ml_dtypes
import numpy as np
import pytest

from epmoe.check import check
from epmoe.check.adapters.reference import ReferenceHybrid, ReferenceRows

LOSSES = {
    "nan": lambda a: np.where(np.isnan(a), 0, a),
    "subnormals": lambda a: np.where(np.abs(a) < ml_dtypes.finfo(a.dtype).smallest_normal, 0, a),
    "through fp16": lambda a: a.astype(np.float16),
    "sign of zero": lambda a: np.where(a == 0, -0.0, a),
}


def losing(base, function, loss):
    """An implementation whose results of dispatch (its rows), or of combine, have lost something."""

    def lossy(arrays):
        with np.errstate(all="ignore"):
            return [LOSSES[loss](a.astype(a.dtype)).astype(a.dtype) for a in arrays]

    class Loses(base):
        def dispatch(self, *arguments, **options):
            rows, *others = super().dispatch(*arguments, **options)
            return (lossy(rows) if function == "dispatch" else rows, *others)

        def combine(self, x, handle):
            sums = super().combine(x, handle)
            return lossy(sums) if function == "combine" else sums

    return Loses


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("function", ["dispatch", "combine"])
@pytest.mark.parametrize("base", [ReferenceRows, ReferenceHybrid])
def test_a_loss_differs_where_there_is_something_to_lose(base, function, loss):
    report = check(losing(base, function, loss), n_ranks=2, only="at the edges")
    assert len(report.failed) == 1
    arrays = {"dispatch": ("recv_x", "dispatched_hidden"), "combine": ("combined_x",)}[function]
    assert all(d.what in arrays for d in report.failed[0].differences), str(report)
