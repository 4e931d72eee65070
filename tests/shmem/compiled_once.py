"""Prints as JSON the texts that NVRTC compiled, and the results; a stand-in for NVRTC, no GPU."""

import json
import sys

from cuda.core import ObjectCode
from numba.cuda.cudadrv import nvrtc

from epmoe.device import nvshmem_code

asked, got = [], []


def stand_in(source, name, cc, ltoir=False, **options):
    asked.append([source, list(cc), ltoir])
    return ObjectCode.from_ltoir(b"code of %d\0%r" % (len(asked), ltoir)), ["a log"]


def ask(source, cc, **options):
    with nvshmem_code.compiled_once():
        got.append(nvrtc.compile(source, "shim", cc, **options)[0].code.decode())


nvrtc.compile = stand_in
ask("put", (9, 0), ltoir=True)
ask("put", (9, 0), ltoir=True)
nvshmem_code._code.clear()  # as in another process
ask("put", (9, 0), ltoir=True)
ask("put, get", (9, 0), ltoir=True)
ask("put", (10, 0), ltoir=True)
ask("put", (9, 0))  # PTX is not kept
try:
    with nvshmem_code.compiled_once():
        raise KeyError
except KeyError:
    pass
json.dump({"asked": asked, "got": got, "restored": nvrtc.compile is stand_in}, sys.stdout)
