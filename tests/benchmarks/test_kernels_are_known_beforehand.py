"""Kernels to compile before a run: a call on a dry machine lists those it needs. Needs no GPU."""

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
shapes = "16x1024/16/4 128x1024/16/4 300x1024/16/4 4096x1024/16/4 16x1024/16/4:fp8:zipf"
cases = plan.cases(parser.parse_args(["--shapes", *shapes.split()]))
found = [(case.kernels, str(case.shape), [(k.name, k.fingerprint((9, 0))) for k in compiling.kernels_of(case, 4, 132)],
          case in compiling.distinct(cases, 4)) for case in cases]
print(json.dumps(found))
"""


def test_kernels_of_every_case():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)
    found = [case for case in cases if case[3]]
    kernels = {(name, shape): {k for k, _ in of} for name, shape, of, _ in found}
    assert len(cases) == 32 and len(found) == len(kernels) == 29
    assert kernels["pairs fused", "16x1024/16/4:bf16:uniform"] == {"dispatch", "combine"}
    assert kernels["pairs split", "128x1024/16/4:bf16:uniform"] == {
        "dispatch_async",
        "dispatch_wait",
        "combine_async",
        "combine_wait",
    }
    # small batches use other kernels, and so do large ones with all SMs
    name = "expert-major"
    assert all((name, f"{tokens}x1024/16/4:bf16:uniform") in kernels for tokens in (16, 128, 300, 4096))
    assert all(kernels.values())
    prints = {fingerprint for *_, of, _ in found for _, fingerprint in of}
    assert all(prints)  # otherwise the cache could not keep them
    assert prints == {fingerprint for *_, of, _ in cases for _, fingerprint in of}, "kernels that no part compiles"
