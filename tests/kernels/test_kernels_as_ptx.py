"""The kernels compiled for sm_90, without a GPU: the accesses and orders that the protocol needs are in the PTX."""

import re
from pathlib import Path

import pytest
from covering import rest_at_night

pytestmark = pytest.mark.timeout(900)  # one compilation for all, on a busy machine
HERE = Path(__file__).parent
SIGNALS = r"st\.release\.sys\.\S*u64"
WAITS = r"ld\.acquire\.sys\.\S*u64"
COUNTED = r"atom\.acq_rel\.gpu\.\S*add"  # finished, and region D
LOAD16, STORE16, INPUT16 = r"ld\.global\.v4", r"st\.global\S*\.v4", r"ld\.global\.nc\S*\.v4"
SENDS, RECEIVES = [INPUT16, STORE16, COUNTED, SIGNALS], [WAITS, LOAD16, STORE16, COUNTED]
RETURNS = [r"ld\.global\.L1::no_allocate\.v4", STORE16, COUNTED, SIGNALS]
# combine: parts sent, signals seen
IN_BLOCK = [r"fence\.acq_rel\.cta", r"atom\.relaxed\.cta\.shared\.add"]
LAMPORT = [r"st\.relaxed\.sys\.\S*v4", r"ld\.relaxed\.sys\.\S*v4"]

NEEDED = {
    "dispatch_async": SENDS,
    "dispatch_wait": RECEIVES,
    "dispatch": SENDS + RECEIVES,
    "combine_async": RETURNS + IN_BLOCK,
    "combine_wait": RECEIVES + IN_BLOCK,
    "combine": RETURNS + RECEIVES + IN_BLOCK,
    "combine without signals": [RETURNS[0], *LAMPORT, STORE16, COUNTED, SIGNALS, WAITS],
    "dispatch with options": [STORE16, COUNTED, SIGNALS, r"ld\.acquire\.gpu\.\S*[su]32", *RECEIVES],
    "combine with options": RETURNS + RECEIVES + IN_BLOCK + [r"fma\.rn\.f32"],
    "combine with an output lambda": RETURNS + RECEIVES + IN_BLOCK + [r"\bst\.(global\.)?f32\b"],
}


BY_DAY = ("combine_async", "combine_wait")  # what is sent and what is received; at night all


@pytest.fixture(scope="module")
def ptx(gpu_side, tonight):
    """{kernel: its PTX}"""
    return gpu_side(HERE / "kernel_ptx.py", *(NEEDED if tonight else BY_DAY))


@pytest.mark.parametrize("name", rest_at_night(NEEDED, BY_DAY))
def test_accesses_and_orders_are_in_the_ptx(ptx, name):
    text = ptx[name]
    assert ".target sm_90" in text
    for pattern in NEEDED[name]:
        assert re.search(pattern, text), f"{name} has no {pattern}"


@pytest.mark.parametrize("name", rest_at_night(NEEDED, BY_DAY))
def test_no_local_memory_no_calls_no_double(ptx, name):
    for unwanted in (r"\.local", r"\bcall\b", r"\.f64", r"\bvolatile\b", r"\.func\b"):
        assert not re.search(unwanted, ptx[name]), f"{name} has {unwanted}"


@pytest.mark.nightly
def test_a_combine_without_signals_has_no_release_behind_its_rows(ptx):
    """But for region A, and for the word that it has begun."""
    text = ptx["combine without signals"]
    assert len(re.findall(SIGNALS, text)) == 1 and len(re.findall(COUNTED, text)) == 1
    assert "fence.acq_rel" not in text and not re.search(r"st\.release\.sys", text[text.rindex("st.relaxed.sys") :])


@pytest.mark.parametrize("name", rest_at_night(["dispatch_wait", "combine_wait"], BY_DAY))
def test_what_peers_write_is_never_read_through_the_non_coherent_path(ptx, name):
    assert ".nc" not in ptx[name]
