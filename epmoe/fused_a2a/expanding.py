"""The staging area of a HybridEPDispatch: rows come there, and rows of experts are made of them."""

import numpy as np

from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.launches import arranged, at
from epmoe.host.lending import arrange
from epmoe.kernels.rows.send import expert_masks

STAGED = "x", "slots", "probs", "masks"
RESULTS = {"out": "x", "out_probs": "probs", "out_scales": "scales"}
NO_ROOM = 0xFFFFFFFF  # a capacity: not even for zero rows, so that all ranks grow


def staged_arrays(rows, row_bytes, local):
    """What lies in the staging area between sending and expanding: {name: (shape, dtype)}."""
    return {
        "x": ((rows, row_bytes), np.uint8),
        "slots": ((rows, local), np.int32),
        "probs": ((rows, local), FP32),
        "masks": ((rows, expert_masks(local)), np.uint32),
    }


def staged_bytes(rows, row_bytes, local):
    """Bytes of the staging area for so many rows."""
    return arrange(staged_arrays(rows, row_bytes, local))[1]


class StagingArea:
    """The staging area of every rank for so many rows. values: fields of the block, whether there is room or not."""

    def __init__(self, buffer, rows, row_bytes, local):
        fields, nbytes = arrange(staged_arrays(rows, row_bytes, local))
        self._offsets, layout = [fields[name].offset for name in STAGED], buffer.pool_layout
        self.values = dict(
            places=[layout.staging_at + offset for offset in self._offsets],
            capacity=rows if nbytes <= layout.staging_bytes else NO_ROOM,
        )

    def expanded(self, buffer, r):
        """The fields of the parameter block for expanding it on a rank."""
        return self.values | dict(sources=[buffer.staging(r) + offset for offset in self._offsets])


class ExpertRows:
    """What the rows of experts of a dispatch are like, whatever number of them there is."""

    def __init__(self, shape, hidden, dtype):
        self.shape = shape
        has_probs, n_scales = shape.has_probs, shape.scale_words

        def shapes(rows):
            return {
                "x": ((rows, hidden), dtype),
                "probs": ((rows if has_probs else 0,), FP32),
                "scales": ((rows if n_scales else 0, n_scales), FP32),
            }

        self.of = arranged("hybrid result", shapes, {at(f): name for f, name in RESULTS.items()})

    def arrays(self, loan, result):
        """x, probs or None, scales or None, of a Loan. result: as of an Interface."""
        fields = loan.fields
        return (
            result(loan, fields["x"]),
            result(loan, fields["probs"]) if self.shape.has_probs else None,
            result(loan, fields["scales"]) if self.shape.scale_words else None,
        )
