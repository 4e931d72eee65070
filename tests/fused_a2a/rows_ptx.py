"""Prints the PTX of the rows kernels named as JSON {name: text}; run with EPMOE_DEVICE=gpu in a process of its own."""

import json
import sys

from epmoe.kernels import rows
from epmoe.kernels.rows.shape import RowsShape

ROW = 7168 * 2
FP8 = dict(row_bytes=7168 + 224, value_bytes=7168, scale_words=56, encode=True)
META = dict(has_probs=True, has_meta=True)


def every_kernel():
    """(name, kernel) for 4 ranks of 64 experts, hidden 7168."""

    def shape(row_bytes=ROW, **options):
        return RowsShape(4, 64, 1024, row_bytes, **options)

    yield "dispatch", rows.dispatch_kernel(shape(top_k=8, **META))
    yield "cached dispatch", rows.resend_kernel(shape(top_k=8))
    yield "dispatch without signals", rows.dispatch_kernel(shape(top_k=8, lamport=128, **META))
    yield "cached dispatch without signals", rows.resend_kernel(shape(top_k=8, lamport=128))
    yield ("combine without signals", rows.combine_kernel(shape(top_k=8, lamport=128, has_probs=True)))
    yield "combine", rows.combine_kernel(shape(top_k=8, has_probs=True))
    yield "hybrid dispatch fp8", rows.dispatch_kernel(shape(**META, **FP8))
    yield "hybrid dispatch", rows.dispatch_kernel(shape(lamport=128, **META))
    yield "hybrid cached dispatch", rows.resend_kernel(shape())
    yield "hybrid combine without signals", rows.combine_kernel(shape(lamport=128, has_probs=True))
    yield "hybrid combine", rows.combine_kernel(shape(has_probs=True, p2p_world_size=2))
    yield "receive", rows.receive_kernel(shape(lamport=128, **META))
    yield "receive fp8", rows.receive_kernel(shape(**META, **FP8))
    yield "move", rows.move_kernel(1024)


if __name__ == "__main__":
    json.dump({name: kernel.ptx() for name, kernel in every_kernel() if name in sys.argv[1:]}, sys.stdout)
