"""The PTX of the intrinsics, compiled for sm_90 without a GPU: all at night, every third by day."""

import importlib.util
import re
from pathlib import Path

import pytest
from commands_shown import python
from covering import rest_at_night
from intrinsic_cases import CASES

BY_DAY = sorted(CASES)[::3]
WITHOUT_NVRTC = """
from cuda.pathfinder import DynamicLibNotFoundError
from numba.cuda.cudadrv import nvrtc
from epmoe.device import kernel

def missing(*_):
    raise DynamicLibNotFoundError("libnvrtc.so")

@kernel(max_threads=32)
def nothing(params, num_tokens, my_rank):
    pass

nvrtc.get_arch_option = missing
nothing.ptx()
"""


@pytest.fixture(scope="module")
def ptx(gpu_side, tonight):
    """{intrinsic: PTX of a kernel that uses it}"""
    return gpu_side(Path(__file__).with_name("intrinsic_cases.py"), *(sorted(CASES) if tonight else BY_DAY))


@pytest.mark.parametrize("name", rest_at_night(sorted(CASES), BY_DAY))
def test_word_is_its_instruction(ptx, name):
    text = ptx[name]
    assert re.search(CASES[name].ptx, text), "no %s in\n%s" % (CASES[name].ptx, text)
    assert ".target sm_90" in text
    assert not re.search(r"\bcall\b|\.local\b", text), "a call or local memory in\n%s" % text


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda has no wheels for this system")
def test_a_compiler_that_is_incomplete_is_explained():
    said = python("-c", WITHOUT_NVRTC, EPMOE_DEVICE="gpu").stderr.splitlines()[-1]
    assert "UnavailableError: no kernel can be compiled: NVVM, NVRTC or nvJitLink is missing" in said
    assert "pip install" in said and "[gpu]" in said
