"""Few tokens and enough blocks: a block for each destination, beside the way that many tokens take."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from kernel_world import FastWorld
from rounds import run_round

from epmoe import layout
from epmoe.kernels import LaunchConfig
from epmoe.kernels.pairs import dispatch, few_tokens, message
from epmoe.kernels.pairs.tuning import TUNING
from epmoe_ref.config import EPConfig

SMALL = dict(n_ranks=2, n_experts=6, top_k=4, hidden=16, max_tokens_per_rank=6)
ENOUGH = LaunchConfig(n_sms=6, num_threads=64)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed, stale", [(None, False), (1, False), (2, True), (3, True)])
def test_beside_ranks_with_many_tokens(seed, stale):
    """Of the two ranks one or the other has too many tokens, in turn."""
    cfg, tuning = EPConfig(**SMALL | dict(hidden=24)), dict(few_tokens=3)
    world = FastWorld(cfg, fused=True, launch=ENOUGH, seed=seed, racecheck=True, stale=stale, tuning=tuning)
    for tokens in ([3, 6], [4, 2]):
        run_round(world, np.random.default_rng(5), tokens)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("n_sms, num_threads", [(2, 32), (2, 96), (3, 64), (5, 32), (12, 64)])
def test_kernels_for_few_tokens_alone_are_right_with_any_blocks(n_sms, num_threads):
    """One block may send to several ranks, receive by itself, and have one warp for everything."""
    launch, tuning = LaunchConfig(n_sms=n_sms, num_threads=num_threads), dict(few_blocks_a_rank=0)
    cfg = EPConfig(**SMALL | dict(n_ranks=3, hidden=40))
    world = FastWorld(cfg, fused=True, launch=launch, seed=3, racecheck=True, tuning=tuning)
    run_round(world, np.random.default_rng(5), [3, 6, 0])


def test_few_tokens_have_a_kernel_of_their_own_where_blocks_are_enough():
    few, many = (EPConfig(**SMALL | dict(max_tokens_per_rank=n)) for n in (8, 9))
    whole = EPConfig(**SMALL | dict(max_tokens_per_rank=8, skip_a2a=True))
    assert dispatch.build_of(few, ENOUGH, TUNING).are_few
    assert not dispatch.build_of(many, ENOUGH, TUNING).are_few
    assert not dispatch.build_of(whole, ENOUGH, TUNING).are_few
    assert not dispatch.build_of(few, LaunchConfig(n_sms=3), TUNING).are_few


def test_counters_are_not_used(monkeypatch):
    """What a block does alone needs neither slots in `reserved` nor parts in `finished`: their words stay unread."""

    def unused(*args):
        raise AssertionError("counted in device memory")

    monkeypatch.setattr("epmoe.kernels.pairs.send.atomic_add_relaxed_gpu_i32", unused)
    monkeypatch.setattr("epmoe.kernels.pairs.signal.load_i32", unused)
    world = FastWorld(EPConfig(**SMALL), fused=True, launch=ENOUGH, seed=0)
    run_round(world, np.random.default_rng(5), [6, 5])


def test_a_word_says_all_about_its_messages():
    for tokens in [t for n in (1, 2, 3, 8) for t in itertools.combinations(range(8), n)]:
        slots = {t: (31, 0, 17, 5, 30, 9, 31, 1)[t] for t in tokens}
        halves = [message.bits_of(t, k) for t, k in slots.items()]
        low, high = (sum(column) for column in zip(*halves))
        word = message.word_of(low, high)
        assert low < 2**31 and high < 2**31  # sums of int32
        assert layout.DESCRIBED <= word < layout.ANNOUNCED < layout.MAX_FINITE
        assert message.count_of(word) == len(tokens)
        assert [message.message_of(word, s) for s in range(len(tokens))] == sorted(slots.items())


def test_other_words_say_how_many():
    assert message.word_of(0, 0) == message.count_of(0) == 0
    assert [message.count_of(start + 4096) for start in (0, layout.ANNOUNCED)] == [4096, 4096]


def test_a_launch_has_no_more_blocks_than_may_have_work():
    cfg = EPConfig(n_ranks=4, n_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=8)
    one, many, whole = (
        replace(cfg, **changed)
        for changed in (
            dict(max_tokens_per_rank=1),
            dict(max_tokens_per_rank=128),
            dict(max_tokens_per_rank=128, skip_a2a=True),
        )
    )
    of = partial(few_tokens.size, tuning=TUNING, blocks=132, threads=1024)
    assert of(one, halves="both", num_tokens=1) == (20, 256)
    assert of(cfg, halves="both", num_tokens=8) == (36, 512)
    assert few_tokens.size(cfg, TUNING, "both", 12, 64, 0) == (12, 64)
    assert of(many, halves="both", num_tokens=9) == of(whole, halves="both", num_tokens=1) == (132, 1024)
    assert of(many, halves="sends", num_tokens=1) == (4, 256)
    assert few_tokens.size(many, TUNING, "sends", 7, 1024, 1) == (7, 256)
    # others may have 128
    assert of(many, halves="both", num_tokens=1) == (132, 256)
    assert of(many, halves="receives", num_tokens=1) == (132, 1024)
    assert of(replace(cfg, max_tokens_per_rank=2), halves="receives", num_tokens=0) == (32, 512)
