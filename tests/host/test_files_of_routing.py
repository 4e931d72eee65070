"""Routing in files: what verify dumps and reads again, a user's own file, and what does not fit in one."""

import json

import ml_dtypes
import numpy as np
import pytest
from commands_shown import SMALL, shown
from epmoe import routing
from epmoe_ref.errors import EPValueError


def saved(tmp_path, **changes):
    """A file of 7 tokens of 16 float32 elements, top-2 of 6 experts."""
    rng = np.random.default_rng(0)
    arrays = dict(x=rng.standard_normal((7, 16)).astype(np.float32), topk_ids=np.tile([0, 5], (7, 1)),
                  topk_weights=np.full((7, 2), 0.5)) | changes
    path = tmp_path / "mine.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_dump_and_input_are_a_round_trip(capsys, tmp_path):
    file = tmp_path / "routing.npz"
    status, first = shown(capsys, *SMALL, "--rounds", "1", "--dump", str(file), "--json")
    assert status == 0
    status, second = shown(capsys, "--ranks", "2", "--input", str(file), "--json")
    assert status == 0
    a, b = (json.loads(out.out) for out in (first, second))
    assert a["seeds"][0]["rounds"][0]["routing"] == b["seeds"][0]["rounds"][0]["routing"]
    assert b["config"]["n_experts"] == 4 and b["config"]["top_k"] == 2 and b["config"]["hidden"] == 16
    batch = routing.load(file)
    assert batch.x.dtype == ml_dtypes.bfloat16 and batch.notes == [] and len(batch.rank_offsets) == 3


def test_a_users_file_is_split_evenly_and_converted_with_a_note(capsys, tmp_path):
    status, out = shown(capsys, "--ranks", "3", "--input", str(saved(tmp_path)))
    assert status == 0 and "(3 tokens)" in out.out and out.out.count("(2 tokens)") == 2, out.out
    assert "x: float32 rounded to bfloat16" in out.out and "topk_weights: float64 converted to float32" in out.out


def test_bf16_saved_by_numpy_is_read(tmp_path):
    x = np.arange(112).reshape(7, 16).astype(ml_dtypes.bfloat16)
    for form in (x, x.view(np.uint16)):
        batch = routing.load(saved(tmp_path, x=form))
        assert batch.x.dtype == ml_dtypes.bfloat16 and np.array_equal(batch.x.astype(float), x.astype(float))


@pytest.mark.parametrize("changes, said", [
    (dict(topk_weights=None), "no topk_weights"), (dict(x=np.zeros((6, 16))), "topk_ids in the file has shape (7, 2)"),
    (dict(topk_ids=np.zeros((7, 2))), "float64; integers"), (dict(topk_weights=np.zeros((7, 3))), "(7, 3)"),
    (dict(x=np.zeros((7, 16), int)), "int64; floats"), (dict(rank_offsets=[0, 4, 3, 7]), "never fall"),
    (dict(rank_offsets=[0, 2, 5]), "end at N=7"), (dict(rank_offsets=[0, 3, 5, 7]), "for 3 ranks"),
    (dict(topk_ids=np.full((7, 2), 3)), "row 0 holds [3, 3]; the ids of a token must be distinct"),
    (dict(topk_ids=np.tile([0, -2], (7, 1))), "holds -2"),
    (dict(n_experts=4), "row 0, slot 1 holds 5, outside [0, n_experts=4)"),
    (dict(x=np.zeros((7, 12))), "hidden=12")], ids=lambda c: next(iter(c)) if isinstance(c, dict) else c)
def test_what_does_not_fit_in_a_file_is_explained(capsys, tmp_path, changes, said):
    status, out = shown(capsys, "--ranks", "2", "--input", str(saved(tmp_path, **changes)))
    assert status == 2 and said in out.err and len(out.err.splitlines()) == 1, out.err


def test_a_file_that_is_no_npz_is_explained(capsys, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("hello")
    status, out = shown(capsys, "--input", str(path))
    assert status == 2 and "cannot be read as an .npz" in out.err


def test_the_least_number_of_experts_that_holds_the_ids(tmp_path):
    batch = routing.load(saved(tmp_path))
    assert [batch.experts_for(n) for n in (1, 2, 3, 4, 5)] == [6, 6, 6, 8, 10]


def test_rank_offsets_must_match_the_ranks(tmp_path):
    batch = routing.load(saved(tmp_path, rank_offsets=[0, 3, 7]))
    assert batch.split(2).num_tokens == [3, 4]
    with pytest.raises(EPValueError, match="--ranks 2"):
        batch.split(3)
