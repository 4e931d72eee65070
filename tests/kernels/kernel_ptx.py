"""Prints the PTX of the kernels named as JSON {name: text}; run with EPMOE_DEVICE=gpu, in a process of its own.

Needs no GPU.
"""

import json
import sys

import numpy as np

from epmoe import kernels
from epmoe.device import add_rn, mul_rn
from epmoe.kernels import LaunchConfig
from epmoe_ref.config import EPConfig

SIZES = dict(n_ranks=4, n_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128)
LAUNCH = LaunchConfig(n_sms=132, num_threads=1024)


def half(i):
    return np.float32(0.5)


def weight(token, k, table):
    return table[token, k]


def bias(token, col, value, scale, values):
    return add_rn(mul_rn(value, scale), values[col])


def into(token, col, value, table):
    table[token, col] = mul_rn(value, np.float32(2))


def every_kernel():
    """(name, compiled kernel): the six, and the fused ones with all options."""
    cfg = EPConfig(**SIZES)
    for name in ("dispatch_async", "dispatch_wait", "dispatch", "combine_async", "combine_wait", "combine"):
        yield name, getattr(kernels, f"{name}_kernel")(cfg, LAUNCH).kernel()
    without_signals = kernels.combine_kernel(EPConfig(**SIZES), LAUNCH, without_signals=True)
    yield "combine without signals", without_signals.kernel()
    options = EPConfig(**SIZES, token_format="nvfp4", fused_shared_expert=True, skip_a2a=True, allreduce_world_size=4)
    yield ("dispatch with options", kernels.dispatch_kernel(options, LAUNCH, input_scale=half).kernel())
    call = kernels.combine_kernel(options, LAUNCH, router_weights=weight, epilogue=bias)
    stores = kernels.combine_kernel(EPConfig(**SIZES), LAUNCH, elementwise_lambda_fn=into)
    yield "combine with an output lambda", stores.kernel([], [("float32", 2, True)])
    yield ("combine with options", call.kernel([("float32", 2, False)], [("float32", 0, False), ("float32", 1, False)]))


if __name__ == "__main__":
    json.dump({name: kernel.ptx() for name, kernel in every_kernel() if name in sys.argv[1:]}, sys.stdout)
