"""ExpertParallel(kernels=...): fast kernels where the GPU has what they need, plain ones elsewhere, or as asked."""

from types import SimpleNamespace

import pytest
from worlds_at_hand import config, parallel

from epmoe import LaunchConfig
from epmoe.host import engine
from epmoe_ref.errors import EPValueError, UnavailableError


def gpu(*capability):
    return SimpleNamespace(compute_capability=capability)


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(engine.device, "SIM", False)


@pytest.mark.parametrize(
    "capability, chosen", [((7, 5), "plain"), ((8, 9), "plain"), ((9, 0), "fast"), ((12, 0), "fast")]
)
def test_the_gpu_decides_unless_it_is_said(with_gpu, capability, chosen):
    assert engine.kernels_named(None, gpu(*capability)) == chosen
    assert engine.kernels_named("plain", gpu(*capability)) == "plain"


def test_fast_kernels_on_an_older_gpu_are_refused_with_the_remedy(with_gpu):
    with pytest.raises(UnavailableError, match=r"9\.0 or newer, this one has 8\.6: leave it out"):
        engine.kernels_named("fast", gpu(8, 6))


@pytest.mark.parametrize("asked, has", [(None, "plain"), ("plain", "plain"), ("fast", "fast")])
def test_the_simulator_runs_both_and_plain_ones_unless_it_is_said(asked, has):
    with parallel(config(), kernels=asked) as ep:
        assert ep.kernels == has


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(kernels="quick"), "kernels='quick' must be 'plain' or 'fast'"),
        (dict(kernels=["plain"]), r"kernels=\['plain'\] must be 'plain' or 'fast'"),
        (dict(launch=LaunchConfig(trace=True)), "only the fast kernels write stamps"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    with pytest.raises(EPValueError, match=told):
        parallel(config(), **options)
