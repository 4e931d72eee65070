"""The plain kernels compiled without a GPU, for devices from 7.5 on: what they use is what these devices have.

One of them for some devices; at night two for every device, and all kernels for all formats, which takes minutes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
PROGRAM = Path(__file__).parent / "plain_ptx.py"
ONLY_NEWER = {  # the first device that has an instruction -> the instruction
    90: r"griddepcontrol|cp\.async\.bulk|mbarrier|elect\.sync|fence\.proxy",
    89: r"e4m3x2",
    80: r"redux|bf16x2|cvt\.rn\.f16x2|L2::256B",
}
NEEDED = {
    "dispatch_kernel": [
        r"atom\.relaxed\.gpu\.\S*add",
        r"red\.release\.gpu\.\S*add",
        r"ld\.acquire\.gpu\.\S*[su]32",
        r"st\.release\.sys\.\S*u64",
        r"ld\.acquire\.sys\.\S*u64",
        r"atom\.acq_rel\.gpu\.\S*add",
        r"ld\.global\.v4",
        r"st\.global\.v4",
    ],
    "combine_kernel": [
        r"st\.release\.sys\.\S*u64",
        r"ld\.acquire\.sys\.\S*u64",
        r"st\.release\.gpu\.\S*[su]32",
        r"fma\.rn\.f32",
        r"ld\.global\.v4",
        r"st\.global\.v4",
    ],
}


@pytest.fixture(scope="module")
def ptx(gpu_side, tonight):
    """{"kernel format sm": PTX}"""
    return gpu_side(PROGRAM, "night" if tonight else "day")


def device_of(name):
    return int(name.rpartition("sm_")[2])


def test_no_instruction_is_newer_than_the_device(ptx):
    for name, text in ptx.items():
        for first, instruction in ONLY_NEWER.items():
            if device_of(name) < first or first == 90:
                assert not re.search(instruction, text), f"{name}: {re.search(instruction, text)[0]}"
        assert "__nvvm_reflect" not in text, name


def test_newer_devices_use_their_casts(ptx, tonight):
    by_device = {device_of(name): text for name, text in ptx.items() if name.startswith("dispatch_kernel fp8")}
    assert ({75, 80, 89} if tonight else {75, 89}) <= set(by_device)
    for device, text in by_device.items():
        assert ("satfinite.e4m3x2" in text) == (device >= 89), device
        assert ("redux.sync.add" in text) == (device >= 80), device


@pytest.mark.parametrize("kernel", ["dispatch_kernel", pytest.param("combine_kernel", marks=pytest.mark.nightly)])
def test_accesses_and_orders_are_in_the_ptx(ptx, kernel):
    for name, text in ptx.items():
        if name.startswith(kernel):
            assert not [p for p in NEEDED[kernel] if not re.search(p, text)], name


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_for_every_format_and_device():
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "all"],
        env=os.environ | {"EPMOE_DEVICE": "gpu"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(json.loads(done.stdout)) == 6 * 6 * 5


def test_machine_code_out_of_the_disk_cache_is_the_kernel_that_numba_made(gpu_side):
    assert all(gpu_side(PROGRAM.parent / "cached_program.py").values())
