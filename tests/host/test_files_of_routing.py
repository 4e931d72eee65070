"""Routing in files: what verify dumps and reads again, a user's own file, and what does not fit in one."""

import io
import json
import os
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
from commands_shown import SMALL, refused_in_a_line, shown

from epmoe import routing
from epmoe.routing_report import dump
from epmoe_ref.errors import EPValueError


def saved(tmp_path, **changes):
    """A file of 7 tokens of 16 float32 elements, top-2 of 6 experts."""
    x = np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32)
    arrays = dict(x=x, topk_ids=np.tile([0, 5], (7, 1)), topk_weights=np.full((7, 2), 0.5))
    path = tmp_path / "mine.npz"
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path


def of(file):
    """Words that have a file's routing verified by two ranks."""
    return "--ranks", "2", "--input", str(file)


def test_dump_and_input_are_a_round_trip(capsys, tmp_path):
    file = tmp_path / "routing.npz"
    status, first = shown(capsys, *SMALL, "--rounds", "1", "--dump", str(file), "--json")
    assert status == 0
    status, second = shown(capsys, *of(file), "--json")
    assert status == 0
    a, b = (json.loads(out.out) for out in (first, second))
    assert a["seeds"][0]["rounds"][0]["routing"] == b["seeds"][0]["rounds"][0]["routing"]
    assert [b["config"][name] for name in ("n_experts", "top_k", "hidden")] == [4, 2, 16]
    batch = routing.load(file)
    assert batch.x.dtype == ml_dtypes.bfloat16
    assert batch.notes == [] and len(batch.rank_offsets) == 3


def test_a_users_file_is_split_evenly_and_converted_with_a_note(capsys, tmp_path):
    status, out = shown(capsys, "--ranks", "3", "--input", str(saved(tmp_path)))
    assert status == 0 and "(3 tokens)" in out.out and out.out.count("(2 tokens)") == 2, out.out
    assert "x: float32 rounded to bfloat16" in out.out
    assert "topk_weights: float64 converted to float32" in out.out


def test_bf16_saved_by_numpy_is_read(tmp_path):
    x = np.arange(112).reshape(7, 16).astype(ml_dtypes.bfloat16)
    for form in (x, x.view(np.uint16)):
        batch = routing.load(saved(tmp_path, x=form))
        assert batch.x.dtype == ml_dtypes.bfloat16 and np.array_equal(batch.x.astype(float), x.astype(float))


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(topk_ids=None), "no topk_ids"),
        (dict(x=np.zeros((6, 16))), "x in the file has shape (6, 16)"),
        (dict(topk_ids=np.zeros((7, 2))), "float64; integers"),
        (dict(topk_weights=np.zeros((7, 3))), "(7, 3)"),
        (dict(x=np.zeros((7, 16), int)), "int64; floats"),
        (dict(rank_offsets=[0, 4, 3, 7]), "never fall"),
        (dict(rank_offsets=[0, 2, 5]), "end at N=7"),
        (dict(rank_offsets=[0, 3, 5, 7]), "for 3 ranks"),
        (dict(topk_ids=np.full((7, 2), 3)), "token 0 has experts [3, 3]: the experts of a token must be distinct"),
        (dict(topk_ids=np.tile([0, -2], (7, 1))), "has expert -2 (7 such ids): an id must be in [0, 65535), or -1"),
        (dict(n_experts=4), "token 0, k 1 has expert 5 (7 such ids): an id must be in [0, n_experts=4)"),
        (dict(topk_ids=np.tile([0, 1 << 40], (7, 1))), "token 0, k 1 has expert 1099511627776"),
        (dict(topk_ids=np.tile(np.uint64([0, (1 << 64) - 1]), (7, 1))), "token 0, k 1 has expert 18446744073709551615"),
        (dict(topk_ids=np.zeros((0, 2), int), x=None, topk_weights=None), "has 0 tokens"),
        (dict(topk_ids=np.zeros((7, 0), int)), "has shape (7, 0)"),
        (dict(topk_ids=np.int64(3)), "has shape ()"),
        (dict(topk_ids=np.zeros((7, 2), bool)), "bool; integers"),
        (dict(topk_weights=np.full((7, 2), "much")), "<U4; floats"),
        (dict(topk_weights=np.zeros((7, 2), complex)), "complex128; floats"),
        (dict(n_experts="many"), "many of dtype <U4; integers"),
        (dict(n_experts=float("nan")), "nan of dtype float64"),
        (dict(n_experts=[6, 8]), "[6, 8]; one number"),
        (dict(n_experts=1 << 62), "n_experts=4611686018427387904"),
        (dict(n_experts=0), "n_experts=0"),
        (dict(rank_offsets=["0", "7"]), "integers are needed"),
        (dict(rank_offsets=[0, 3.5, 7]), "integers are needed"),
        (dict(rank_offsets=7), "rank_offsets in the file is 7;"),
        (dict(x=np.array("x")), "<U1; floats"),
        (dict(x=np.array([object()])), "Object arrays"),
        (dict(x=np.zeros((7, 12))), "hidden=12"),
    ],
    ids=lambda c: next(iter(c)) if isinstance(c, dict) else c,
)
def test_what_does_not_fit_in_a_file_is_explained(capsys, tmp_path, changes, said):
    refused_in_a_line(capsys, said, *of(saved(tmp_path, **changes)))


def damaged(whole, rng):
    """Bytes of a file with some bits flipped, and perhaps cut short."""
    raw = bytearray(whole)
    for at in rng.integers(0, len(raw), rng.integers(0, 4)):
        raw[at] ^= 1 << int(rng.integers(8))
    return bytes(raw[: rng.integers(len(raw)) if rng.random() < 0.3 else None])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_read_or_refused_in_a_line(tmp_path, save):
    rng, path = np.random.default_rng(1), tmp_path / "whole.npz"
    save(path, x=np.ones((3, 16), np.float32), topk_ids=np.tile([0, 5], (3, 1)), n_experts=6)
    whole, refused = path.read_bytes(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            path.write_bytes(damaged(whole, rng))
            for read in (routing.load, dump.read):
                try:
                    read(path)
                except EPValueError as error:
                    refused += 1
                    assert len(str(error).splitlines()) == 1
    assert refused > 130


def test_a_file_that_says_it_is_larger_than_any_memory_is_refused(capsys, tmp_path):
    path, header = tmp_path / "x.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, dict(descr="<i8", fortran_order=False, shape=(1 << 44, 2)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("topk_ids.npy", header.getvalue() + bytes(64))
    refused_in_a_line(capsys, "cannot be read as an .npz", *of(path))


def test_the_number_of_experts_is_given_or_a_guess_that_the_first_line_announces(capsys, tmp_path):
    status, out = shown(capsys, *of(saved(tmp_path)))
    guess = "note: n_experts=6, a guess: the largest id is 5; --experts and --ranks change it"
    assert status == 0 and out.out.startswith(guess)
    assert "2 ranks x 3 experts" in out.out
    for given, argv in ((dict(n_experts=8), ()), ({}, ("--experts", "8")), (dict(n_experts=7), ("--experts", "8"))):
        status, out = shown(capsys, *of(saved(tmp_path, **given)), *argv, "--json")
        record = json.loads(out.out)
        assert status == 0 and record["config"]["n_experts"] == 8
        said = " ".join(record["notes"])
        assert "guess" not in said and ("the file says 7" in said) == (7 in given.values())


def test_numbers_that_are_not_finite_are_counted_and_placed(capsys, tmp_path):
    x, weights = np.ones((7, 16)), np.full((7, 2), 0.5)
    x[2, 5], x[3, 1], x[3, 2], weights[6, 1] = float("nan"), float("inf"), 1e39, float("nan")
    status, out = shown(capsys, *of(saved(tmp_path, x=x, topk_weights=weights, n_experts=6)))
    assert status == 0, out.err
    assert "note: x: 1 NaN and 2 infinite of 112 numbers, the first at token 2, column 5" in out.out
    assert "note: topk_weights: 1 NaN and 0 infinite of 14 numbers, the first at token 6, k 1" in out.out


def test_ids_alone_are_enough(capsys, tmp_path):
    status, out = shown(capsys, *of(saved(tmp_path, x=None, topk_weights=None, n_experts=6)))
    assert status == 0 and "note: x: not in the file" in out.out
    assert "note: topk_weights: not in the file" in out.out
    batch = routing.load(saved(tmp_path, topk_weights=None))
    assert batch.topk_weights.tolist() == [[0.5, 0.5]] * 7


def test_other_byte_orders_and_bf16_weights_are_read(tmp_path):
    plain = routing.load(saved(tmp_path))
    bits = plain.topk_weights.astype(ml_dtypes.bfloat16).view(np.uint16)
    x, ids = plain.x.view(np.uint16).astype(">u2"), plain.topk_ids.astype(">i4")
    file = saved(tmp_path, x=x, topk_weights=bits.astype(">u2"), topk_ids=ids)
    other = routing.load(file)
    assert np.array_equal(other.x.view(np.uint16), plain.x.view(np.uint16))
    assert np.array_equal(other.topk_weights, plain.topk_weights)
    assert np.array_equal(other.topk_ids, plain.topk_ids)
    assert all(ids.dtype == np.int32 and ids.dtype.isnative for ids in other.split(2).topk_ids)


def test_a_dump_is_written_to_the_path_that_was_given_and_never_over_the_input(capsys, tmp_path):
    file = saved(tmp_path, n_experts=6)
    before = file.read_bytes()
    (tmp_path / "link.npz").symlink_to(file)
    for same in (file, tmp_path / "link.npz"):
        status, out = shown(capsys, *of(file), "--dump", str(same))
        assert status == 2 and "would be overwritten" in out.err and file.read_bytes() == before
    status, out = shown(capsys, *of(file), "--dump", str(tmp_path / "NAME"))
    assert status == 0 and (tmp_path / "NAME").exists() and not (tmp_path / "NAME.npz").exists()
    assert routing.load(tmp_path / "NAME").n_experts == 6
    status, out = shown(capsys, *of(file), "--dump", os.devnull)
    assert status == 0 and not os.path.exists(f"{os.devnull}.npz")


def test_a_file_that_is_no_npz_is_explained(capsys, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    for file, said in (
        (path, "cannot be read as an .npz"),
        (tmp_path, "is not a file"),
        ("/dev/zero", "is not a file"),
        (tmp_path / "pipe", "is not a file"),
        (tmp_path / "nothing", "No such file"),
    ):
        refused_in_a_line(capsys, said, *of(file))


def test_the_least_number_of_experts_that_holds_the_ids(tmp_path):
    batch = routing.load(saved(tmp_path))
    assert [batch.experts_for(n)[0] for n in (1, 2, 3, 4, 5)] == [6, 6, 6, 8, 10]


def test_rank_offsets_must_match_the_ranks(tmp_path):
    batch = routing.load(saved(tmp_path, rank_offsets=[0, 3, 7]))
    assert batch.split(2).num_tokens == [3, 4]
    said = r"for 2 ranks, and this run has 3: start 2 \(--ranks, or the -n of mpirun\)"
    with pytest.raises(EPValueError, match=said):
        batch.split(3)
