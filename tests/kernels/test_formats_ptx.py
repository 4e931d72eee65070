"""Law: compiled for sm_90, which needs no GPU, encoders and decoders move 16 bytes a lane and spill nothing."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ENCODED = ["fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"]
DECODED = ["bf16", "fp8_blockwise", "nvfp4", "mxfp4_rows", "slots"]
SWIGLU = ["bf16", "fp8_blockwise"]
NAMES = (
    [f"encode {name}" for name in ENCODED]
    + [f"decode {name}" for name in DECODED]
    + [f"swiglu {name}" for name in SWIGLU]
)


@pytest.fixture(scope="module")
def compiled(gpu_side):
    """{kernel: its PTX, registers, spills}"""
    found = gpu_side(Path(__file__).with_name("compiled_formats.py"), *NAMES)
    assert sorted(found) == sorted(NAMES)
    return found


def count(ptx, pattern):
    return len(re.findall(pattern, ptx))


@pytest.mark.parametrize("name", NAMES)
def test_no_local_memory_and_no_calls(compiled, name):
    ptx = compiled[name]["ptx"]
    assert not count(ptx, r"\.local\b") and not count(ptx, r"\bcall\b")
    assert compiled[name]["spills"] == 0
    assert compiled[name]["registers"] <= 64  # 1024 threads a block


@pytest.mark.parametrize("name", ENCODED)
def test_encoders_read_16_bytes_a_lane_and_only_once(compiled, name):
    ptx = compiled[f"encode {name}"]["ptx"]
    assert count(ptx, r"ld\.global\.v4\.u32") == 2
    # besides the test kernel's three parameters
    assert count(ptx, r"ld\.global") == 2 + 3
    assert count(ptx, r"st\.global\.v4\.u32") == (1 if "8" in name else 0)
    assert count(ptx, r"st\.global\.u64") == (0 if "8" in name else 1)


@pytest.mark.parametrize("name", ENCODED)
def test_float_arithmetic_is_as_written(compiled, name):
    """No contraction, no flush to zero, no approximate division; fused only where the quotient is corrected."""
    ptx = compiled[f"encode {name}"]["ptx"]
    assert not count(ptx, r"\.ftz") and not count(ptx, r"\.approx") and not count(ptx, r"(mul|add|sub)\.f32")
    assert count(ptx, r"fma\.rn\.f32") == (2 * 16 + 2 if name == "fp8_blockwise" else 0)
    assert count(ptx, r"cvt\.rn\.satfinite\.e4m3x2\.f32") == {"fp8_blockwise": 8, "mxfp8": 8, "nvfp4": 1}.get(name, 0)


@pytest.mark.parametrize("name", DECODED)
def test_decoders_copy_16_bytes_a_lane_and_never_through_the_read_only_path(compiled, name):
    ptx = compiled[f"decode {name}"]["ptx"]
    # batches in flight: of eight, and at the end of four
    assert count(ptx, r"ld\.global\.v4\.u32") >= 8
    assert not count(ptx, r"ld\.global\.nc")
