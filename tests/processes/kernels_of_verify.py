"""Prints as JSON fingerprints of kernels that cases launch, and of those in their pieces; EPMOE_DEVICE=gpu, no GPU."""

import json
import random
import sys

from epmoe.verify import compiled_first
from epmoe.verify.matrix import cases

SM_90 = 9, 0


def fingerprints(pieces):
    """{fingerprint: name of the kernel}"""
    return {
        kernel.fingerprint(SM_90): kernel.name
        for case, phase in pieces
        for kernel in compiled_first.kernels_of(case, phase)
    }


chosen = random.Random(0).sample(list(cases(4, 256)), 5)
pieces = compiled_first.pieces(chosen)
phases = compiled_first.DISPATCH, compiled_first.COMBINE
launched = fingerprints((case, phase) for case in chosen for phase in phases)
json.dump({"launched": launched, "in pieces": fingerprints(pieces), "pieces": len(pieces)}, sys.stdout)
