"""The PTX of every word, compiled for sm_90 without a GPU."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from word_cases import CASES

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def ptx():
    """{word: PTX of a kernel that uses it}, compiled in a process that has chosen the GPU's side."""
    environment = dict(os.environ, EPMOE_DEVICE="gpu", PYTHONPATH=os.pathsep.join([str(ROOT), str(HERE)]))
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run([sys.executable, str(HERE / "ptx_of_words.py")], env=environment, capture_output=True,
                          text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", sorted(CASES))
def test_word_is_its_instruction(ptx, name):
    text = ptx[name]
    assert re.search(CASES[name].ptx, text), "no %s in\n%s" % (CASES[name].ptx, text)
    assert ".target sm_90" in text
    assert not re.search(r"\bcall\b|\.local\b", text), "a call or local memory in\n%s" % text
