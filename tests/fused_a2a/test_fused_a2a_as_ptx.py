"""The rows kernels compiled for sm_90, without a GPU: what the protocol needs is in the PTX, and nothing slow is."""

import re
from pathlib import Path

import pytest
from covering import rest_at_night

pytestmark = pytest.mark.timeout(900)  # one compilation for all, on a busy machine
HERE = Path(__file__).parent
TELLS = r"st\.relaxed\.sys\.\S*u64"
ASKS, FENCE = r"ld\.acquire\.sys\.\S*u64", r"fence\.acq_rel\.sys"
ARRIVES, AWAITS = r"red\.release\.sys\.\S*add\.s32", r"ld\.acquire\.sys\.\S*s32"
FLAGS, READS_FLAGS = r"st\.release\.sys\.\S*u32", r"ld\.acquire\.sys\.\S*u32"
OF_BLOCKS = [r"st\.relaxed\.gpu\.\S*u64", r"ld\.relaxed\.gpu\.\S*u64"]
LOAD16, INPUT16, STORE16 = r"ld\.global\.v4", r"ld\.global\.nc\S*\.v4", r"st\.global\S*\.v4"
READS_WORDS = r"ld\.relaxed\.sys\.\S*u64"  # of the bits by expert
# of Lamport rows
VECTORS = [r"st\.relaxed\.sys\.global\.v4\.u32", r"ld\.relaxed\.sys\.global\.v4\.u32"]
MEETS_PEERS = [TELLS, ASKS, FENCE, STORE16]
SAYS_SO = r"red\.release\.gpu\S*add\.s32"  # that it has begun, or numbered
BY_FLAGS = [*MEETS_PEERS, SAYS_SO, FLAGS, READS_FLAGS]
RECORDED, SENDS_WORDS = r"st\.release\.gpu\.\S*s32", r"st\.relaxed\.sys\.\S*u32"
NEEDED = {
    "dispatch": [*MEETS_PEERS, SAYS_SO, *OF_BLOCKS, ARRIVES, AWAITS, INPUT16],
    "cached dispatch": [*MEETS_PEERS, ARRIVES, AWAITS, INPUT16],
    "dispatch without signals": [*MEETS_PEERS, SAYS_SO, ARRIVES, AWAITS, INPUT16, *VECTORS],
    "cached dispatch without signals": [*MEETS_PEERS, SAYS_SO, ARRIVES, AWAITS, INPUT16, *VECTORS],
    "combine without signals": [*BY_FLAGS, INPUT16, *VECTORS],
    "combine": [*BY_FLAGS, INPUT16, LOAD16],
    "hybrid dispatch fp8": [*BY_FLAGS, *OF_BLOCKS, LOAD16, r"cvt\.rn\.satfinite\.e4m3x2"],
    "hybrid dispatch": [*BY_FLAGS, *OF_BLOCKS, RECORDED, INPUT16, LOAD16, READS_WORDS, SENDS_WORDS],
    "hybrid cached dispatch": [*BY_FLAGS, INPUT16, LOAD16],
    "hybrid combine without signals": [*BY_FLAGS, LOAD16, *VECTORS],
    "hybrid combine": [*BY_FLAGS, LOAD16],
    "receive": [READS_FLAGS, READS_WORDS, INPUT16, LOAD16, STORE16, VECTORS[1]],
    "receive fp8": [READS_FLAGS, LOAD16, STORE16],
    "move": [LOAD16, STORE16],
}


BY_DAY = ("cached dispatch", "move")  # one that meets its peers and one alone; at night all


@pytest.fixture(scope="module")
def ptx(gpu_side, tonight):
    """{kernel: its PTX}"""
    return gpu_side(HERE / "rows_ptx.py", *(NEEDED if tonight else BY_DAY))


@pytest.mark.parametrize("name", rest_at_night(NEEDED, BY_DAY))
def test_accesses_and_orders_are_in_the_ptx(ptx, name):
    assert ".target sm_90" in ptx[name]
    for pattern in NEEDED[name]:
        assert re.search(pattern, ptx[name]), f"{name} has no {pattern}"


@pytest.mark.parametrize("name", rest_at_night(NEEDED, BY_DAY))
def test_no_local_memory_no_calls_no_double(ptx, name):
    for unwanted in (r"\.local", r"\bcall\b", r"\.f64", r"\bvolatile\b", r"\.func\b"):
        assert not re.search(unwanted, ptx[name]), f"{name} has {unwanted}"


@pytest.mark.parametrize(
    "name", rest_at_night(["receive fp8", "move", "hybrid combine", "hybrid combine without signals"], BY_DAY)
)
def test_what_peers_write_is_never_read_through_the_non_coherent_path(ptx, name):
    assert ".nc" not in ptx[name]
