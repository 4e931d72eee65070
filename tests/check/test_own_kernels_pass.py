"""This project's kernels pass through the public interface: a few cases that cover every adapter."""

import pytest

from epmoe.check import check
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
