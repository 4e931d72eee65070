"""Prints, as JSON, the fingerprints of kernels under a few configurations and options. Run with EPMOE_DEVICE=gpu."""

import json

from epmoe import EPConfig, LaunchConfig, fma_rn, kernels, mul_rn

FACTOR = 3.0


def scaled(token, k, table):
    return mul_rn(table[token, k], FACTOR)


def shifted(shift):
    def epilogue(token, col, value, bias):
        return fma_rn(value, shift, bias[col])

    return epilogue


def keys():
    cfg, launch = EPConfig(2, 8, 2, 256, 8), LaunchConfig(num_threads=512)
    arrays = (("float32", 2, False),), (("float32", 1, False),)
    yield "dispatch", kernels.dispatch_kernel(cfg).kernel()
    yield ("dispatch nvfp4", kernels.dispatch_kernel(EPConfig(2, 8, 2, 256, 8, token_format="nvfp4")).kernel())
    yield "dispatch wide", kernels.dispatch_kernel(EPConfig(2, 8, 2, 512, 8)).kernel()
    yield "dispatch 512", kernels.dispatch_kernel(cfg, launch).kernel()
    yield "dispatch_async", kernels.dispatch_async_kernel(cfg).kernel()
    yield "combine", kernels.combine_kernel(cfg, router_weights="array").kernel()
    yield "combine unreduced", kernels.combine_kernel(cfg, router_weights=None).kernel()
    for shift in (1.0, 2.0):
        made = kernels.combine_kernel(cfg, router_weights=scaled, epilogue=shifted(shift))
        yield f"combine shifted {shift}", made.kernel(*arrays)


print(json.dumps({name: kernel.fingerprint((9, 0)) for name, kernel in keys()}))
