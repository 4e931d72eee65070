"""The PTX of the intrinsics, compiled for sm_90 without a GPU: all at night, every third by day."""

import re
from pathlib import Path

import pytest
from covering import rest_at_night
from intrinsic_cases import CASES

BY_DAY = sorted(CASES)[::3]


@pytest.fixture(scope="module")
def ptx(gpu_side, tonight):
    """{intrinsic: PTX of a kernel that uses it}"""
    return gpu_side(Path(__file__).with_name("ptx_of_intrinsics.py"), *(sorted(CASES) if tonight else BY_DAY))


@pytest.mark.parametrize("name", rest_at_night(sorted(CASES), BY_DAY))
def test_word_is_its_instruction(ptx, name):
    text = ptx[name]
    assert re.search(CASES[name].ptx, text), "no %s in\n%s" % (CASES[name].ptx, text)
    assert ".target sm_90" in text
    assert not re.search(r"\bcall\b|\.local\b", text), "a call or local memory in\n%s" % text
