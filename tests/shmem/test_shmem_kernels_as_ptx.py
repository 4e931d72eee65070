"""The kernels that cross worlds compiled for sm_90 if nvshmem4py is installed; otherwise the error names what is missing."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]  # one compilation for all
HERE = Path(__file__).parent
SENDERS = "dispatch_async", "dispatch", "combine_async", "combine", "plain dispatch", "plain combine"
WAITERS = "dispatch_wait", "combine_wait"
WORDS = ("nvshmemx_uint8_put_nbi_warp", "nvshmem_quiet", "nvshmem_fence", "nvshmemx_signal_op")


@pytest.fixture(scope="module")
def ptx(gpu_side):
    """{kernel: its PTX, or the missing package}"""
    return gpu_side(HERE / "shmem_ptx.py", *SENDERS, *WAITERS)


@pytest.mark.parametrize("name", SENDERS)
def test_senders_put_complete_and_signal_or_say_what_is_missing(ptx, name):
    text = ptx[name]
    if find_spec("nvshmem") is None:
        assert text.startswith("unavailable: ") and re.search(r"pip install -e '\S+\[shmem\]'", text)
        return
    for word in WORDS:
        assert re.search(r"call.*?%s" % word, text, re.S), f"{name} does not call {word}"
    assert re.search(r"st\.release\.sys\.\S*u64", text)
    assert name.startswith("plain") or re.search(r"atom\.acq_rel\.gpu\.\S*add", text)


@pytest.mark.parametrize("name", WAITERS)
def test_waiting_kernels_need_no_nvshmem(ptx, name):
    assert ".target sm_90" in ptx[name] and "nvshmem" not in ptx[name]


def test_nvshmem_s_own_code_is_compiled_once_a_host(gpu_side, tmp_path, monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EPMOE_CACHE", raising=False)
    found = gpu_side(HERE / "compiled_once.py")
    assert found["asked"] == [
        ["put", [9, 0], True],
        ["put, get", [9, 0], True],
        ["put", [10, 0], True],
        ["put", [9, 0], False],
    ]
    assert [text[:9] for text in found["got"]] == [f"code of {n}" for n in (1, 1, 1, 2, 3, 4)]
    assert found["restored"] and len(list(tmp_path.iterdir())) >= 3
