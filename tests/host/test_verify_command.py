"""verify: the main job, what it shows and decides, each option, and a wrong kernel or a race noticed."""

import argparse
import functools
import io
import json
import re

import numpy as np
import pytest
from commands_shown import SMALL, SMALL_BUT_EXPERTS, shown
from rich.console import Console
from worlds_at_hand import OtherStart, config

from epmoe import LocalWorld, kernels, routing
from epmoe.kernels.pairs import peers
from epmoe.verify import command as verify
from epmoe.verify import one_token, pictures
from epmoe.verify.checked_rounds import rounds_of


def options(argv):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_main_job_passes_and_shows_what_it_did(capsys):
    """The very command, with its own defaults, in an 80-column terminal."""
    status, out = shown(capsys)
    text = out.out
    assert status == 0, text + out.err
    for part in (
        "4 ranks x 4 experts, top-4",
        "(0 tokens)",
        "each expert (column)",
        "│ rank 3",
        "Intended: rank 2 has no tokens, and 14 of 140",
        "One token.",
        "round 3:",
        "PASS",
    ):
        assert part in text
    assert text.splitlines()[-1] == "Next: epmoe lesson 1, epmoe explain, epmoe routing FILE"
    assert "dispatch_recv_count" not in text and len(text.splitlines()) <= 40
    assert text.count("dispatch equal   combine equal") == 3
    assert max(len(line) for line in text.splitlines()) <= 80


def test_counters_are_shown_with_their_names_if_asked_for(capsys):
    status, out = shown(capsys, *SMALL, "--counters")
    assert status == 0 and "combine_recv_count" in out.out
    assert "reserved counts" in " ".join(out.out.split())


def test_the_token_shown_is_one_of_the_round():
    """Its rows are found again in what the ranks hold, and its products give the sum that combine returned."""
    args = options([*SMALL, "--top-k", "4", "--rounds", "1", "--combine-dtype", "fp32"])
    case = verify.case_of(args)
    batch = verify.batches(case, 1, None)
    (r,) = rounds_of(case, LocalWorld(2), batch)
    way = one_token.of_round(case, r)
    ids = r.routed.topk_ids[way.src_rank][way.token]
    assert [pair[0] if pair else -1 for pair in way.pairs] == ids.tolist() and -1 in ids
    total = 0.0
    for k, pair in enumerate(way.pairs):
        if pair is not None:
            expert, rank, row, weight, result = pair
            d = r.seen[rank]
            assert (d.src_info[row] == (way.token, k)).all() and case.cfg.owner(expert) == rank
            assert (d.output_tokens[row] == r.routed.x[way.src_rank][way.token]).all()
            total += weight * result
    assert way.combined == r.combined[way.src_rank][way.token, 0] and abs(total - way.combined) < 1e-5


def test_the_products_and_their_sum_are_those_of_the_numbers_shown(capsys):
    text = shown(capsys, "--rounds", "1")[1].out
    rows = re.findall(r"^\d +\d+ +\d +\d+ +(\S+) +(\S+) +(\S+) *$", text, re.M)
    weights, results, products = np.array(rows, float).T
    assert len(rows) == 3 and (np.round(weights * results, 5) == products).all()
    assert f"The products add up to {products.sum():.4f}; " in text


def test_a_terminal_shows_the_routing_at_once_and_the_rounds_as_they_end(monkeypatch):
    out, seen = io.StringIO(), []

    def rounds(*given, **options):
        for r in rounds_of(*given, **options):
            seen.append(out.getvalue())
            yield r

    monkeypatch.setattr(verify, "rounds_of", rounds)
    assert verify.run(options(SMALL), Console(file=out, force_terminal=True, width=80)) == 0
    assert "Routing." in seen[0] and "Dispatch." not in seen[0] and "Dispatch." in seen[1]
    assert "rounds " in seen[0] and "0/2" in seen[0]


def test_the_default_batch_is_uneven_with_an_empty_rank_and_empty_slots():
    args = options(["--ranks", "4"])
    case = verify.case_of(args)
    for batch in verify.batches(case, 0, None):
        assert {0, case.cfg.max_tokens_per_rank} < set(batch.num_tokens)
        ids = np.concatenate(batch.topk_ids)
        assert (ids == -1).any() and (ids >= 0).any()


def test_json_says_the_same(capsys):
    status, out = shown(capsys, *SMALL, "--json", "--fused", "--seed", "3")
    record = json.loads(out.out)
    assert status == 0 and record["passed"] and record["config"]["hidden"] == 16
    assert "simulator, seed 3" in record["machine"]
    rounds = record["seeds"][0]["rounds"]
    assert [r["round"] for r in rounds] == [1, 2] and all(r["dispatch"] == r["combine"] == "equal" for r in rounds)
    for r in rounds:
        assert np.array(r["routing"]).shape == (2, 4) and not r["differences"]
        assert not np.any(r["counters"]["combined"]["reserved"])


@pytest.mark.parametrize(
    "argv",
    [
        ["--format", "fp8_blockwise", "--hidden", "128"],
        ["--shared-expert", "--epilogue"],
        ["--skip-a2a", "--shared-expert", "--fused"],
        ["--weights", "none"],
        ["--weights", "function", "--combine-dtype", "fp32"],
        ["--racecheck", "--rounds", "1"],
        ["--format", "mxfp4_rows", "--preshuffle", "--hidden", "256", "--fused"],
        ["--seeds", "2", "--experts", "6", "--ranks", "3"],
    ],
    ids=" ".join,
)
def test_every_option_verifies(capsys, argv):
    small = SMALL_BUT_EXPERTS if "--experts" in argv else SMALL
    status, out = shown(capsys, *small, *argv)
    assert status == 0 and "PASS" in out.out, out.out + out.err


def with_wrong_weights(launch, cfg, wanted, words):
    """Start a combine_wait with router weights of 2."""
    weights = np.full((wanted.num_tokens, cfg.top_k), 2, np.float32)
    launch.start(*words[:5], wanted.machine.adopt(weights, "wrong weights", wanted.my_rank))


def test_a_wrong_kernel_fails_with_the_first_difference(capsys, monkeypatch):
    wrong = OtherStart(kernels, "combine_wait_kernel", with_wrong_weights)
    monkeypatch.setattr(verify, "rounds_of", functools.partial(verify.rounds_of, _factories=wrong))
    status, out = shown(capsys, *SMALL)
    assert status == 1 and "FAIL" in out.out
    assert "combine DIFFERS" in out.out and "dispatch equal" in out.out
    text = " ".join(out.out.split())
    for part in ("rank ", "token ", "column ", "reference", "rule:"):
        assert part in text[text.index("FAIL") :], out.out
    assert "round 2" not in out.out
    status, out = shown(capsys, *SMALL, "--json")
    record = json.loads(out.out)
    first = record["seeds"][0]["rounds"][0]["differences"][0]
    assert status == 1 and not record["passed"]
    assert first["what"] == "output" and first["column"] is not None


@pytest.mark.parametrize("fused", [[], ["--fused"]], ids=["split", "fused"])
def test_a_race_is_reported_with_the_seed_that_shows_it_again(capsys, monkeypatch, fused):
    """Signals that release nothing: the messages behind them race, between the halves of a split dispatch too."""
    monkeypatch.setattr(peers, "st_release_sys_u64", peers.st_relaxed_sys_u64)
    argv = *SMALL, "--kernels", "fast", "--racecheck", "--seed", "5", *fused
    status, out = shown(capsys, *argv, "--seeds", "2")
    text = out.out[out.out.index("FAIL") :]
    again = "FAIL (seed 5: --seed 5 instead of --seeds runs it again)"
    assert status == 1 and text.startswith(again), text
    assert "RaceError in round 1: data race on dispatch_recv_buf[" in text
    assert "st_relaxed_sys_u64" in text
    status, out = shown(capsys, *argv, "--json")
    record = json.loads(out.out)
    assert status == 1 and not record["passed"]
    assert text.rstrip().endswith(record["seeds"][0]["reported"])


def test_the_pictures_of_a_large_world_fit(capsys):
    cfg = config(n_ranks=8, n_experts=256, top_k=8, max_tokens_per_rank=64)
    routed = routing.make(cfg, 0)
    out = io.StringIO()
    shows, matrix = pictures.routing(cfg, routed)
    Console(file=out, width=80).print(matrix)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and sum("rank" in line for line in lines) == 9
    assert "busiest experts" in lines[-1] and "to each rank (column)" in shows
    totals = pictures.counts(cfg, routed.topk_ids)
    assert totals.sum() == sum(int((a >= 0).sum()) for a in routed.topk_ids)


@pytest.mark.parametrize("n_ranks, n_experts", [(3, 3), (7, 7), (6, 12)])
def test_narrow_columns_name_their_rank(n_ranks, n_experts):
    cfg = config(n_ranks=n_ranks, n_experts=n_experts, top_k=1, max_tokens_per_rank=1)
    heading, experts, *_ = pictures.routing(cfg, routing.make(cfg, 0))[1].plain.splitlines()
    assert all(f"│ rank {rank}" in heading for rank in range(n_ranks)) and len(experts) <= 80


def test_a_batch_for_skip_a2a_is_the_same_on_all_ranks():
    routed = routing.make(config(skip_a2a=True), 0)
    assert all(np.array_equal(routed.topk_ids[0], a) for a in routed.topk_ids)
