"""Compiling before a run: a call on a machine on which nothing runs tells the kernels that it needs. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import argparse, json
from benchmarks import compiling, plan
parser = argparse.ArgumentParser()
plan.add_arguments(parser)
cases = plan.cases(parser.parse_args("--shapes 16x1024/16/4 128x1024/16/4 16x1024/16/4:fp8:zipf".split()))
found = [(case.kernels, str(case.shape), [(k.name, k.fingerprint((9, 0))) for k in compiling.kernels_of(case, 4, 132)])
         for case in compiling.distinct(cases)]
print(json.dumps([len(cases), found]))
"""


def test_kernels_of_every_case():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=100,
                          env=os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    n_cases, found = json.loads(done.stdout)
    kernels = {(name, shape): {k for k, _ in of} for name, shape, of in found}
    assert n_cases == 17 and len(found) == len(kernels) == 14
    assert kernels["pairs fused", "16x1024/16/4:bf16:uniform"] == {"dispatch", "combine"}
    assert kernels["pairs split", "128x1024/16/4:bf16:uniform"] == {"dispatch_async", "dispatch_wait", "combine_async",
                                                                    "combine_wait"}
    # tokens make no difference to rows
    assert ("rows", "16x1024/16/4:bf16:uniform") in kernels and ("rows", "128x1024/16/4:bf16:uniform") not in kernels
    assert all(kernels.values())
    assert all(fingerprint for _, _, of in found for _, fingerprint in of)      # else the cache could not keep them
