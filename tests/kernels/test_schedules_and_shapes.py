"""The fast kernels under many schedules, and in shapes that take the branches which small worlds do not."""

import numpy as np
import pytest
from kernel_world import FastWorld
from rounds import run_round
from test_rounds import CASES, case

from epmoe.kernels import LaunchConfig
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SMALL = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)
IS_FUSED = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])


def exact_rounds(cfg, *tokens, **options):
    """Rounds of one world, with these tokens of each rank."""
    world, rng = FastWorld(cfg, racecheck=True, **options), np.random.default_rng(1)
    for of_ranks in tokens:
        run_round(world, rng, of_ranks)


@pytest.mark.by_day(4)
@IS_FUSED
@pytest.mark.parametrize("stale, seed", [(False, seed) for seed in (None, 11, 12, 13, 14)] + [(True, 21), (True, 22)])
def test_any_schedule_and_stale_values_that_the_memory_model_permits_change_nothing(seed, stale, fused):
    exact_rounds(SMALL, [4, 3], [0, 4], fused=fused, seed=seed, stale=stale)


def launch(n_sms, num_threads):
    return dict(launch=LaunchConfig(n_sms, num_threads))


# Shared memory holds a window of the experts. Here the windows are tiny, so that several are needed.
WINDOWS = dict(tuning=dict(counted_experts=3, counts=5, returned_segments=4))
OF_WINDOWS = dict(n_experts=14, max_tokens_per_rank=7, alignment=32)
# Combine deals its rows out in runs, however uneven the segments are: 4 to 21 rows of a rank are on their way at once.
RUNS, OF_RUNS = launch(3, 224), dict(n_experts=6, max_tokens_per_rank=8)
# If blocks have several batches of tokens to send, all of them send first, then all receive; a batch is a token or two.
IN_TURNS = dict(tuning=dict(batch_messages=4, turns_from=1), stale=True)
OF_TURNS = dict(n_experts=34, hidden=40, max_tokens_per_rank=10)
SHAPES = {
    "windows": (case([7, 5], 3, **OF_WINDOWS), WINDOWS),
    "windows, tiles and shared expert": (
        case([7, 5], 3, **OF_WINDOWS, token_format="nvfp4", hidden=64, fused_shared_expert=True),
        WINDOWS,
    ),
    "windows, padded rows": (
        case([7, 5], 3, **OF_WINDOWS, token_format="fp8_blockwise", hidden=128, combine_dtype="fp32"),
        WINDOWS,
    ),
    "runs": (case([6, 5], **OF_RUNS, hidden=264), RUNS),
    "runs, three ranks, one without tokens": (case([7, 0, 6], **OF_RUNS), RUNS),
    "runs, one rank": (case([7], **OF_RUNS | dict(n_experts=4)), RUNS),
    "runs, skip_a2a": (case([5, 5], 3, **OF_RUNS, skip_a2a=True, p2p_world_size=1), RUNS),
    "runs, padded rows": (case([5, 6], **OF_RUNS, hidden=128, token_format="fp8_blockwise"), RUNS),
    **{
        f"turns, {name}": (CASES[name], IN_TURNS)
        for name in ("plain", "empty rank, three ranks", "nobody has a token", "shared expert", "top 32")
    },
    "turns, fewer threads than experts": (case([10, 2], 4, **OF_TURNS), IN_TURNS | launch(3, 32)),
    "turns, beside few tokens": (case([10, 2], 4, **OF_TURNS), IN_TURNS | launch(6, 96)),
    **{
        f"few tokens, {name}": (CASES[name], launch(6, 64))
        for name in ("empty rank, three ranks", "nobody has a token", "one rank", "top 32", "shared expert")
        + ("fp8 rows padded to 4", "nvfp4")
    },
    "claims of whole tiles, the last of them short": (case([33, 17], hidden=8, max_tokens_per_rank=33), {}),
    **{f"a grid of {shape}": (case([4, 3]), launch(*shape)) for shape in ((2, 32), (5, 32), (2, 128))},
    # the kernels need no ready flag a block: a grid beyond 2n blocks writes nothing behind ep_counters
    "more blocks than combine_wait has flags": (case([4], 1, n_experts=1, hidden=8), launch(7, 32)),
    # half of the receivers' rows are copies of payloads under another signal
    "all tokens want all experts": (case([4, 4], 6, n_experts=6), dict(stale=True)),
}


@pytest.mark.by_day(17)
@pytest.mark.parametrize("name", SHAPES)
@IS_FUSED
def test_rounds_are_exact(name, fused):
    (cfg, tokens, _), options = SHAPES[name]
    exact_rounds(cfg, tokens, fused=fused, seed=3, **options)


def test_launches_that_cannot_work_are_refused():
    with pytest.raises(EPValueError, match="n_sms=1 must be at least 2"):
        LaunchConfig(n_sms=1)
    for threads in (16, 48, 2048):
        with pytest.raises(EPValueError, match=f"num_threads={threads} must be a multiple of 32"):
            LaunchConfig(num_threads=threads)
    world = FastWorld(SMALL)
    with pytest.raises(EPValueError, match="5 tokens are more than max_tokens_per_rank=4"):
        world.dispatch([np.zeros((5, 16), np.uint16)] * 2, [np.zeros((5, 2), int)] * 2)
