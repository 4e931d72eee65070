"""The kernels' encoders, run by dispatch in the simulator, against whole-number arithmetic.

EPMOE_ALL_PATTERNS=1 sends all 65536 bf16 patterns through every format; CI sends a sample of them and every edge.
"""

import os

import numpy as np
import pytest
import record_model
from exact_formats import FACTS
from random_worlds import bits_of
from simulator_runs import simulator_difference
from test_formats_against_rationals import ABSMAX_PATTERNS, INPUT_SCALES

ALL = os.environ.get("EPMOE_ALL_PATTERNS") == "1"
SCALED = [name for name in FACTS if name != "bf16"]


def check_rows(token_format, rows, input_scale=None):
    """Dispatch the rows (uint16 [n, hidden]) on one rank to one expert, combine zeros."""
    rows = np.asarray(rows).tolist()
    world = record_model.World(
        1,
        1,
        1,
        len(rows[0]),
        len(rows),
        token_format,
        tokens=[rows],
        topk_ids=[[[0]] * len(rows)],
        input_scale=None if input_scale is None else [input_scale],
        routed_outputs=[[[[0] * len(rows[0])]] * len(rows)],
        name=f"{token_format} rows",
    )
    difference = simulator_difference(world, fused=True, seed=None)
    assert difference is None, difference


def edge_groups(group):
    """Groups of every special absmax, with values on either side of ties, and special values."""
    rng = np.random.default_rng(group)
    groups = []
    for absmax in ABSMAX_PATTERNS:
        values = rng.integers(0, max(absmax, 1) + 1, group) | rng.integers(0, 2, group) << 15
        values[0] = absmax
        values[1] = 0x8000
        values[2] = rng.choice([0x7FC0, 0xFFC0, 0x0001, 0x8001, absmax | 0x8000])
        groups.append(values)
    return np.array(groups)


@pytest.mark.parametrize("token_format", SCALED)
def test_groups_at_the_edges(token_format):
    facts = FACTS[token_format]
    groups = edge_groups(facts.group)
    short = -len(groups) % (facts.hidden_unit // facts.group)
    check_rows(
        token_format, np.concatenate([groups, groups[:short]]).reshape(-1, facts.hidden_unit)
    )


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.timeout(0)
def test_bf16_patterns_among_others(token_format):
    width = max(FACTS[token_format].hidden_unit, 128)
    order = np.random.default_rng(1).permutation(1 << 16).reshape(-1, width)
    check_rows(token_format, order if ALL else order[:8])


@pytest.mark.parametrize("token_format", SCALED)
@pytest.mark.timeout(0)
def test_finite_patterns_among_numbers_of_their_size(token_format):
    width = max(FACTS[token_format].hidden_unit, 128)
    magnitudes = np.arange(0x7F80).repeat(2)
    magnitudes[1::2] |= 0x8000
    rows = magnitudes[: len(magnitudes) // width * width].reshape(-1, width)
    check_rows(token_format, rows if ALL else rows[::60])


@pytest.mark.parametrize(
    "scale_bits", INPUT_SCALES if ALL else INPUT_SCALES[2::3], ids=lambda b: f"0x{b:08x}"
)
def test_nvfp4_under_an_input_scale(scale_bits):
    rng = np.random.default_rng(scale_bits)
    rows = [
        bits_of(rng, kind, (1, 64), 8, 7)[0]
        for kind in ("ordinary", "anything", "tiny", "huge", "salted")
    ]
    check_rows("nvfp4", rows, scale_bits)
