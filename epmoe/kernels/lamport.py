"""Lamport rows: each 32-bit word of a row is its own ready flag, so rows need no signals.

Until a row arrives, every 32-bit word of the buffer is the sentinel ABSENT, all ones, which is a NaN in every output
type. Rows are stored relaxed at system scope. Their receiver polls their words until none is ABSENT. By the PTX memory
model each of the four words of a 16-byte access is read and written as a whole, so a thread that sees another value
sees the word itself. No order between words is needed. No release waits for acknowledgements, no signal follows the
row, and no second load fetches it. The name "Lamport" for these buffers is NCCL's and TensorRT-LLM's, after Lamport's
queue without locks.

In a row that is summed NAN replaces the word ABSENT. This gives the same sum, as the bits of a NaN result are
unspecified. Rows that are not summed use signals, or escapes (rows/small/lamport.py).
"""

from epmoe import layout
from epmoe.device import device_fn, store16_relaxed_sys, u32

ABSENT = layout.ABSENT
NAN = 0x7FFF7FFF        # not ABSENT, and a NaN wherever ABSENT is one: in bf16, fp16 and float32
BEGUN = 1               # written instead of a count by a combine of pairs without signals (pairs/await_rows.py)


def applies(cfg, wanted, router_weights):
    """Whether a fused combine may use this, if requested."""
    return wanted and layout.has_lamport_buf(cfg) and router_weights is not None


def recv_buf_name(cfg, wanted, router_weights):
    """Name of the epmoe.layout region to which recv_buf_ptrs of that combine must point."""
    return "combine_lamport_buf" if applies(cfg, wanted, router_weights) else "combine_recv_buf"


@device_fn
def store_row(place, a, b, c, d):
    """Stores 16 bytes of a row in the receiver's memory."""
    store16_relaxed_sys(place, _present(a), _present(b), _present(c), _present(d))


@device_fn
def _present(word):
    return u32(NAN) if word == u32(ABSENT) else word


@device_fn
def is_absent(q):
    """Whether a word of a vector has not arrived."""
    return q[0] == u32(ABSENT) or q[1] == u32(ABSENT) or q[2] == u32(ABSENT) or q[3] == u32(ABSENT)
