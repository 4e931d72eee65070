"""A soak's checks on the device report nothing if all is right, and name one wrong byte, count or place."""

import json

import numpy as np
import pytest

from epmoe import DeadlockError, EPConfig, EPValueError, LocalWorld
from epmoe.__main__ import main
from epmoe.soak import hashing
from epmoe.soak.soak import Soak
from epmoe_ref.format_names import TOKEN_FORMATS

CFG = EPConfig(2, 6, 2, 16, 5)
ROUNDS = range(100)


def plain(cfg, seed=0):
    return hashing.make(cfg, seed, hashing.plain)


@pytest.mark.parametrize(
    "cfg",
    [EPConfig(4, 256, 8, 64, 20), EPConfig(1, 1, 1, 8, 3), EPConfig(3, 9, 5, 8, 20)],
    ids=lambda cfg: f"{cfg.n_ranks} ranks",
)
def test_ids_of_a_token_are_distinct_experts_and_some_slots_are_empty(cfg):
    of, seen, empty = plain(cfg), set(), 0
    for number in range(40):
        for rank in range(cfg.n_ranks):
            for token in range(of.tokens(number, rank)):
                key = of.token_key(number, rank, token)
                ids = [of.expert(number, key, k) for k in range(cfg.top_k)]
                chosen = [e for e in ids if e != -1]
                assert len(set(chosen)) == len(chosen) and all(0 <= e < cfg.n_experts for e in chosen)
                seen.update(chosen)
                empty += len(ids) - len(chosen)
    assert seen == set(range(cfg.n_experts)) and empty


def test_ranks_are_uneven_sometimes_empty_and_sometimes_full():
    of = plain(CFG)
    counts = [[of.tokens(number, rank) for rank in range(2)] for number in ROUNDS]
    assert {n for pair in counts for n in pair} == set(range(CFG.max_tokens_per_rank + 1))
    assert any(a != b for a, b in counts)


def test_experts_do_different_things():
    of = plain(EPConfig(4, 256, 8, 64, 8))
    assert len({of.mask(e) for e in range(256)}) == 256


def busy_round(of):
    """A round in which every rank has several tokens and rank 0's first one has an expert at k = 0."""
    return next(
        n for n in ROUNDS if min(of.tokens(n, 0), of.tokens(n, 1)) >= 4 and of.expert(n, of.token_key(n, 0, 0), 0) >= 0
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [True, False])
def test_right_kernels_pass_and_every_row_was_looked_at(fused):
    of, numbers = plain(CFG), range(2)
    with Soak(CFG, LocalWorld(2, racecheck=True), fused=fused, poison=True) as soak:
        for number in numbers:
            soak.round(number)
        found = soak.found()
    assert [f.errors for f in found] == [0, 0]
    ranks = [(n, rank) for n in numbers for rank in range(2)]
    sent = [(*where, token) for where in ranks for token in range(of.tokens(*where))]
    keys = [(n, of.token_key(n, rank, token)) for n, rank, token in sent]
    pairs = sum(of.expert(*key, k) >= 0 for key in keys for k in range(CFG.top_k))
    assert sum(f.rows for f in found) == pairs > 0 and sum(f.tokens for f in found) == len(sent)


def change(name, index, value):
    def spoil(soak):
        array = soak.ranks[0].array(name)
        view = array.view(np.uint16) if name in ("output_tokens", "combined") else array
        view[index] = value(view[index]) if callable(value) else value

    return spoil


def two_rows(soak):
    """(src_info, the first of two rows of one segment)."""
    counts = soak.ranks[0].array("recv_count").ravel()
    segment = int(np.argmax(counts))
    assert counts[segment] >= 2
    return soak.ranks[0].array("src_info"), int(counts[:segment].sum())


def swap_tokens(soak):
    """Two rows of one segment keep their payloads and swap their src_info."""
    info, row = two_rows(soak)
    info[[row, row + 1]] = info[[row + 1, row]]


def repeat_row(soak):
    """One row of a segment comes twice, instead of its neighbour."""
    (info, row), x = two_rows(soak), soak.ranks[0].array("output_tokens")
    info[row + 1], x[row + 1] = info[row], x[row]


AFTER_DISPATCH = {
    "a bit of a token": (change("output_tokens", (0, 13), lambda v: v ^ 1), "bits of the token"),
    "a count": (change("recv_count", (0, 1), lambda v: v + 1), "recv_count[local_expert 0, src_rank 1]"),
    "an offset": (change("row_offsets", -1, lambda v: v + 1), "row_offsets[3]"),
    "an expert id": (change("expert_ids", 1, 0), "expert_ids[1]"),
    "a token number": (change("src_info", (0, 0), 99), "outside the src_rank's tokens"),
    "a k": (change("src_info", (0, 1), lambda k: 1 - k), "the expert that its (token, k) selects"),
    "src_info of two rows": (swap_tokens, "bits of the token"),
    "a row twice": (repeat_row, "came twice"),
}


@pytest.mark.parametrize("what", AFTER_DISPATCH)
def test_a_wrong_dispatch_is_found(what):
    spoil, says = AFTER_DISPATCH[what]
    number = busy_round(plain(CFG))
    # two tokens in one place are a race as well
    with Soak(CFG, LocalWorld(2, racecheck=False)) as soak:
        soak.fill(number)
        d = soak.dispatch(number)
        spoil(soak)
        soak.check_dispatch(number)
        found = soak.found()
        soak.combine(number, d)
    assert found[0].errors > 0 and found[1].errors == 0
    assert found[0].first.startswith(f"rank 0, round {number + 1}: ") and says in found[0].first


@pytest.mark.parametrize("what", ["a k", "a row twice"])
def test_a_combine_without_signals_waits_for_the_row_that_such_a_dispatch_loses(what):
    with Soak(CFG, LocalWorld(2, racecheck=False), kernels="fast") as soak:
        number = busy_round(plain(CFG))
        soak.fill(number)
        d = soak.dispatch(number)
        AFTER_DISPATCH[what][0](soak)
        says = r"spins on combine_lamport_buf\[token \d, k \d, word \d\] of rank"
        with pytest.raises(DeadlockError, match=says):
            soak.combine(number, d)


def forget_experts(soak):
    for r in soak.ranks:
        r.array("y")[:] = r.array("output_tokens")


def nothing(soak):
    pass


@pytest.mark.parametrize(
    "before, after, errors, says",
    [
        (nothing, change("combined", (0, 6), lambda v: v ^ 1), 1, "token 0, elements from 6 on"),
        (forget_experts, nothing, None, "bits of the weighted sum"),
    ],
    ids=["a bit of a result", "experts are not applied"],
)
def test_a_wrong_combine_is_found(before, after, errors, says):
    number = busy_round(plain(CFG))
    with Soak(CFG, LocalWorld(2)) as soak:
        soak.fill(number)
        d = soak.dispatch(number)
        soak.check_dispatch(number)
        before(soak)
        soak.combine(number, d)
        after(soak)
        soak.check_combine(number)
        found = soak.found()
    assert says in found[0].first
    if errors is None:
        assert all(f.errors for f in found)
    else:
        assert [f.errors for f in found] == [errors, 0]


@pytest.mark.parametrize("token_format", ["fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"])
@pytest.mark.by_day(1)
def test_formats_that_round_are_encoded_again_and_compared(token_format):
    hidden = TOKEN_FORMATS[token_format].hidden_multiple
    cfg = EPConfig(2, 4, 2, hidden, 4, token_format=token_format)
    number = busy_round(plain(cfg))
    with Soak(cfg, LocalWorld(2, racecheck=False)) as soak:
        soak.round(number)
        assert [(f.errors, f.first) for f in soak.found()] == [(0, None)] * 2
        number += 1
        soak.fill(number)
        soak.dispatch(number)
        soak.ranks[1].array("output_scales").view(np.uint8).reshape(-1)[0] ^= 1
        soak.check_dispatch(number)
        found = soak.found()
    assert [f.errors for f in found] == [0, 1] and "encoded and decoded again" in found[1].first


def test_options_that_a_soak_does_not_check_are_refused():
    with pytest.raises(EPValueError, match="defaults"):
        Soak(EPConfig(2, 4, 1, 16, 2, fused_shared_expert=True), LocalWorld(2))


def test_command_writes_what_was_done(tmp_path, capsys):
    file = tmp_path / "soak.json"
    sizes = "--ranks 2 --experts 4 --top-k 2 --hidden 16 --tokens 3".split()
    argv = "soak --rounds 3 --look-every 2 --split --json".split()
    assert main([*argv, str(file), *sizes]) == 0
    said, record = capsys.readouterr().out, json.loads(file.read_text())
    assert "PASS  3 rounds, 0 errors" in said and "kernels ready" not in said  # the simulator compiles none
    assert record["rounds"] == 3 and record["errors"] == record["kernels"] == 0
    assert record["versions"]["numpy"] and record["date"]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_soak_on_a_gpu(fused):
    with Soak(EPConfig(4, 64, 8, 1024, 64), LocalWorld(4), fused=fused, poison=True) as soak:
        for number in range(50):
            soak.round(number)
        assert [f.first for f in soak.found()] == [None] * 4


def test_a_file_that_cannot_be_written_is_known_before_the_rounds(tmp_path, capsys):
    assert main(["soak", "--json", str(tmp_path / "no" / "such.json")]) == 2
    printed = capsys.readouterr()
    assert "rounds" not in printed.out and "such.json: No such file" in printed.err
