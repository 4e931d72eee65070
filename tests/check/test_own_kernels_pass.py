"""Kernels behind the public interface: ours pass, in a few cases that cover every adapter, and a race is reported."""

import re

import pytest

from epmoe import device
from epmoe.check import check
from epmoe.check.adapters.reference import Reference
from epmoe.check.implementation import load

pytestmark = pytest.mark.usefixtures("each_case_once")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("rows", "as many slots"),
        ("rows", "slots without an expert"),
        ("hybrid", "overflow by padding"),
        ("hybrid", "fp8"),
        ("hybrid", "two p2p worlds"),
        ("hybrid", "without probs"),
        ("fused_kernels", "two p2p worlds"),
    ],
)
def test_own_fused_a2a_and_p2p_worlds_pass(name, case):
    report = check(load(name), n_ranks=2, only=case)
    assert report.passed, str(report)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", ["kernels", "fused_kernels", "plain_kernels"])
@pytest.mark.parametrize(
    "case",
    [
        "slots without an expert",
        "without router weights",
        "an epilogue",
        "nvfp4 with an input scale",
        "fp8_blockwise with a shared expert",
    ],
)
def test_own_kernels_pass(name, case):
    report = check(load(name), n_ranks=2, only=case)
    assert report.passed, str(report)


def test_a_race_in_a_kernel_is_the_cause_and_names_its_line_once():
    @device.kernel()
    def races(params, num_tokens, my_rank):
        device.store_i32(params, num_tokens)

    class Launches(Reference):
        def dispatch(self, input_tokens, topk_ids, **options):
            machine = device.machine(2, racecheck=True)
            word = machine.alloc(4, "word")
            for rank in (0, 1):
                machine.launch(races, 1, 1, (word.address, 0, rank), stream=machine.stream(rank))
            try:
                machine.synchronize()
            finally:
                word.free()

    text = str(check(Launches, n_ranks=2, only="uneven"))
    assert "dispatch raised RaceError: data race on word + 0 bytes of rank 0" in text
    assert not re.search(r"\(/.*\.py:\d+\)", text), text
