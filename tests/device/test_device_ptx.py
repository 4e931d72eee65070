"""The PTX of every word, compiled for sm_90 without a GPU."""

import re
from pathlib import Path

import pytest
from word_cases import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ptx(gpu_side):
    """{word: PTX of a kernel that uses it}"""
    return gpu_side(HERE / "ptx_of_words.py", *sorted(CASES))


@pytest.mark.parametrize("name", sorted(CASES))
def test_word_is_its_instruction(ptx, name):
    text = ptx[name]
    assert re.search(CASES[name].ptx, text), "no %s in\n%s" % (CASES[name].ptx, text)
    assert ".target sm_90" in text
    assert not re.search(r"\bcall\b|\.local\b", text), "a call or local memory in\n%s" % text
