"""verify --all: the matrix of formats and options, a sample of it, and a case that differs."""

import json
from itertools import product

from commands_shown import shown

from epmoe.verify import matrix


def test_the_matrix_has_every_combination_once():
    cases = list(matrix.cases(n_ranks=2, hidden=256))
    assert len(cases) == len(set(map(str, cases))) == 7 * 2 * 2 * (5 + 4)
    for options in product((False, True), repeat=3):
        some = [c.cfg for c in cases if (c.fused, c.cfg.fused_shared_expert, c.cfg.skip_a2a) == options]
        assert len({(cfg.token_format, cfg.fuse_a_scale_preshuffle) for cfg in some}) == 7


def test_a_sample_of_the_matrix_passes(capsys):
    status, out = shown(capsys, "verify", "--all", "--sample", "2", "--ranks", "3")
    assert status == 0 and "PASS  2 cases" in out.out and "mxfp4_rows slots" in out.out, out.out
    assert "3 ranks x 2 experts" in out.out and max(len(line) for line in out.out.splitlines()) <= 80


def test_a_case_that_differs_fails_the_matrix(capsys, monkeypatch):
    monkeypatch.setattr(matrix, "check", lambda case, *_: "round 1: wrong" if case.fused else None)
    status, out = shown(capsys, "verify", "--all", "--sample", "9", "--json")
    record = json.loads(out.out)
    assert status == 1 and not record["passed"]
    assert {c["difference"] for c in record["cases"]} == {None, "round 1: wrong"}
    status, out = shown(capsys, "verify", "--all", "--sample", "9")
    assert status == 1 and "FAIL" in out.out and "round 1: wrong" in out.out
