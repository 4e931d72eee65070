"""The page's JavaScript: its own tests under node, and its model against epmoe_ref, in the engine that draws stills."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from worlds_of_the_page import worlds

from epmoe.explain.bundle import script

HERE = Path(__file__).parent


def test_the_model_equals_the_reference_on_200_worlds():
    import dukpy

    equals = (HERE / "page" / "equals.mjs").read_text(encoding="utf-8").replace("export ", "")
    code = (
        f"{script('model')}\n{equals}\nvar cases = dukpy.cases, right = firstDifference($model, cases);"
        "cases[7].reference.row_offsets[0][1] += 1;"
        "JSON.stringify([cases.length, right, firstDifference($model, cases)])"
    )
    n, right, spoilt = json.loads(dukpy.evaljs(code, cases=worlds()))
    assert (n, right) == (200, None) and spoilt.startswith("world 7: row_offsets")


@pytest.mark.skipif(not shutil.which("node"), reason="node, which runs the page's own tests, is not installed")
def test_the_modules_pass_their_own_tests():
    ran = subprocess.run(["node", "--test", str(HERE / "page") + os.sep], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0 and "# skipped 0" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
