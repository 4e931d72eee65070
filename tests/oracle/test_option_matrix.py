"""Combinations of options in the simulator: kernels = reference = record model, to the bit.

formats x {split, fused} x shared expert x {a2a, skip_a2a} x {weights array, function, none} x {epilogue, none}: some by
day, more at night. EPMOE_ALL_OPTIONS=1 with `-m nightly` runs all of them; EPMOE_OPTIONS_SEED=N draws other worlds.
"""

import itertools
import os
import zlib
from typing import NamedTuple

import pytest
from covering import covering
from exact_formats import FACTS
from random_worlds import Limits, random_world
from runs import reference_difference, simulator_difference

FORMATS = (*FACTS, "mxfp4_rows/slots")  # the last with fuse_a_scale_preshuffle
LIMITS = Limits(ranks=3, local_experts=3, top_k=3, hidden=1, tokens=6, large_share=0, work=2000)


class Case(NamedTuple):
    token_format: str
    launches: str  # "split" or "fused"
    shared_expert: bool
    skip_a2a: bool
    weights: str  # "array", "function" or "none"
    epilogue: bool

    def __str__(self):
        return "-".join(
            [
                self.token_format,
                self.launches,
                "skip_a2a" if self.skip_a2a else "a2a",
                f"weights_{self.weights}",
                *(["shared"] if self.shared_expert else []),
                *(["epilogue"] if self.epilogue else []),
            ]
        )


CASES = [
    case
    for case in itertools.starmap(
        Case,
        itertools.product(
            FORMATS, ("split", "fused"), (False, True), (False, True), ("array", "function", "none"), (False, True)
        ),
    )
    # a shared expert and an epilogue need the weighted sum
    if case.weights != "none" or not (case.shared_expert or case.epilogue)
]
SEED = int(os.environ.get("EPMOE_OPTIONS_SEED", "0"))


def sample():
    """The same few cases every time, in which every format meets every option."""
    for token_format in FORMATS:
        own = [case for case in CASES if case.token_format == token_format]
        options = [set(enumerate(case)) for case in own]
        yield from (own[i] for i in covering(options, len(own)))


def world_of(case, seed):
    """A small world with the options of the case; combine_dtype comes from the seed."""
    name, _, layout = case.token_format.partition("/")
    for attempt in itertools.count():
        world = random_world(
            zlib.crc32(f"{seed} {case} {attempt}".encode()),
            LIMITS,
            token_format=name,
            fuse_a_scale_preshuffle=bool(layout),
            fused_shared_expert=case.shared_expert,
            skip_a2a=case.skip_a2a,
            weights="none" if case.weights == "none" else "array",
            epilogue=case.epilogue,
        )
        if sum(len(t) for t in world.tokens) >= 4:
            return world


def test_the_matrix_is_whole():
    assert len(set(map(str, CASES))) == len(CASES) == 7 * 2 * 2 * 9


def with_kernels():
    """Every case with one kind of kernels, in turn; at night with the other as well."""
    for number, case in enumerate(CASES if "EPMOE_ALL_OPTIONS" in os.environ else sample()):
        for kernels in ("plain", "fast"):
            at_night = [] if (kernels == "fast") == number % 2 else [pytest.mark.nightly]
            yield pytest.param(case, kernels, id=f"{case}-{kernels}", marks=at_night)


@pytest.mark.parametrize("case, kernels", list(with_kernels()))
@pytest.mark.by_day(8)
def test_kernels_reference_and_records_agree(case, kernels):
    world, as_function = world_of(case, SEED), case.weights == "function"
    difference = reference_difference(world, weights_as_function=as_function)
    assert difference is None, f"reference: {difference}"
    fused = case.launches == "fused"
    difference = simulator_difference(world, fused=fused, seed=SEED, weights_as_function=as_function, kernels=kernels)
    assert difference is None, f"kernels: {difference}"
