"""A program: compiles formats' kernels and SwiGLU for sm_90 without a GPU; JSON {name: {ptx, spills, registers}}.

Its arguments name the kernels.
"""

import json
import os
import re
import sys

os.environ["EPMOE_DEVICE"] = "gpu"  # before epmoe.device is imported

from cuda.bindings import nvjitlink
from row_kernels import decode_kernel, encode_kernel

from epmoe.kernels import formats
from epmoe.kernels.swiglu import fused_silu_kernel
from epmoe_ref.config import EPConfig

HIDDEN = 7168


def config(token_format, **options):
    return EPConfig(8, 256, 8, HIDDEN, 4096, token_format=token_format, **options)


def kernels():
    for name in ("fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"):
        yield f"encode {name}", encode_kernel(formats.of(config(name)), 2 * HIDDEN)
    for name in ("bf16", "fp8_blockwise", "nvfp4", "mxfp4_rows"):
        yield f"decode {name}", decode_kernel(formats.of(config(name)), 32)
    yield ("decode slots", decode_kernel(formats.of(config("mxfp4_rows", fuse_a_scale_preshuffle=True)), 32))
    for output_format in ("bf16", "fp8_blockwise"):
        call = fused_silu_kernel(config("bf16"), intermediate=2048, output_format=output_format, limit=7.0)
        yield f"swiglu {output_format}", call.kernel()


def assembled(ptx):
    """(bytes of spills and stack, registers) as the assembler reports them."""
    linker = nvjitlink.create(3, ["-arch=sm_90", "-verbose", "-Xptxas=-v"])
    nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), "kernel")
    nvjitlink.complete(linker)
    log = bytearray(nvjitlink.get_info_log_size(linker))
    nvjitlink.get_info_log(linker, log)
    log = log.decode()
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return sum(int(n) for n in memory.groups()), int(re.search(r"[Uu]sed (\d+) registers", log).group(1))


if __name__ == "__main__":
    found = {}
    for name, kernel in kernels():
        if name not in sys.argv[1:]:
            continue
        ptx = kernel.ptx()
        spills, registers = assembled(ptx)
        found[name] = {"ptx": ptx, "spills": spills, "registers": registers}
    json.dump(found, sys.stdout)
