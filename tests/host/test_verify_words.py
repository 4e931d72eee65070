"""verify --words: the plain kernels' memory is as the model has it, and words that a broken kernel leaves are named."""

import json

import pytest
from commands_shown import shown

from epmoe.kernels.plain import combine, waits
from epmoe.verify import words
from epmoe_ref.config import TOKEN_FORMATS

SPLIT_SEED = 7  # of a world whose kernels are split, with an exchange


def test_random_worlds_have_all_formats_and_options():
    worlds = [words.random_world(seed) for seed in range(140)]
    assert {cfg.token_format for cfg, *_ in worlds} == set(TOKEN_FORMATS)
    for name in ("fused_shared_expert", "skip_a2a", "use_shmem", "fuse_a_scale_preshuffle"):
        assert {getattr(cfg, name) for cfg, *_ in worlds} == {False, True}, name
    assert {cfg.n_ranks for cfg, *_ in worlds} == {1, 2, 3, 4} and {fused for *_, fused in worlds} == {False, True}


def test_every_word_of_the_plain_kernels_is_as_the_model_has_it(capsys, tonight):
    number = [] if tonight else ["2"]
    status, out = shown(capsys, "verify", "--words", *number, "--rounds", "2")
    assert status == 0 and f"PASS  {(number or [14])[0]} worlds of 2 rounds" in out.out, out.out


@pytest.mark.parametrize(
    "module, store, region, cause",
    [
        (
            waits,
            "store_u64",
            "dispatch_recv_count [local_expert 0, src_rank 0] after dispatch_wait",
            "not put back to MAX_FINITE",
        ),
        (combine, "store_i32", "A [local_expert 0, src_rank 0, READY + end row] after combine_wait", "it is not reset"),
    ],
)
def test_a_broken_kernel_is_named_by_the_words_that_it_leaves(capsys, monkeypatch, module, store, region, cause):
    monkeypatch.setattr(module, store, lambda address, value: None)
    words_of_seed = "verify", "--words", "1", "--seed", str(SPLIT_SEED)
    status, out = shown(capsys, *words_of_seed)
    text = " ".join(out.out.split())
    assert status == 1 and region in text and "rule:" in text and cause in text, out.out
    assert f"--words 1 --seed {SPLIT_SEED} runs this world again" in text
    status, out = shown(capsys, *words_of_seed, "--json")
    record = json.loads(out.out)
    assert status == 1 and not record["passed"] and cause in record["worlds"][0]["differences"][0]["cause"]
