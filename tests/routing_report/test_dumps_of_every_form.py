"""All forms of a routing dump give the same report. Errors name file, place, value and remedy."""

import json
import zipfile

import numpy as np
import pytest

from epmoe.routing_report import dump, report
from epmoe_ref.errors import EPValueError

IDS = np.array([[[0, 5], [2, -1], [7, 1]], [[3, 4], [5, 0], [1, 2]]])
TWO_STEPS = IDS.tolist()


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def refusal(path, **options):
    """The error that a file gets."""
    with pytest.raises(EPValueError) as error:
        report.report(dump.read(path), path.name, **options)
    return str(error.value)


def forms(tmp_path):
    """The same two steps in every form."""
    np.savez(tmp_path / "a.npz", topk_ids=IDS.astype(np.int16))
    np.savez_compressed(tmp_path / "b.npz", indices=IDS.astype(np.int64), weights=np.ones(IDS.shape))
    np.save(tmp_path / "c.npy", IDS.astype(np.int32))
    yield from (tmp_path / name for name in ("a.npz", "b.npz", "c.npy"))
    yield written(tmp_path, "d.jsonl", "\n".join(json.dumps(step) for step in TWO_STEPS))
    yield written(tmp_path, "e.json", json.dumps(TWO_STEPS, indent=2))
    yield written(
        tmp_path,
        "f.jsonl",
        "\n\n".join(
            json.dumps({"step": s, "topk_ids": [i for i in token if i >= 0]})
            for s, step in enumerate(TWO_STEPS)
            for token in step
        ),
    )
    yield written(tmp_path, "g.json", json.dumps({"topk_ids": TWO_STEPS, "n_experts": 8}))
    yield written(tmp_path, "h.json", json.dumps([{"step": s, "topk_ids": step} for s, step in enumerate(TWO_STEPS)]))


def test_all_forms_say_the_same(tmp_path):
    for path in forms(tmp_path):
        found = dump.read(path)
        assert [step.tolist() for step in found.steps] == TWO_STEPS, path.name


def test_tokens_one_a_line_are_one_step(tmp_path):
    found = dump.read(written(tmp_path, "tokens.jsonl", "[0, 5]\n[2]\n[]\n"))
    assert [step.tolist() for step in found.steps] == [[[0, 5], [2, -1], [-1, -1]]]
    assert "filled up with -1" in found.notes[0]


def test_an_empty_step_is_a_step(tmp_path):
    found = dump.read(written(tmp_path, "steps.jsonl", "[]\n[[1, 2]]\n"))
    assert [step.shape for step in found.steps] == [(0, 2), (1, 2)]


def test_the_files_own_numbers_are_used(tmp_path):
    np.savez(tmp_path / "a.npz", topk_ids=IDS[0], n_experts=64, rank_offsets=[0, 1, 3], x=np.zeros((3, 24)))
    found = report.report(dump.read(tmp_path / "a.npz"), "a")
    assert (found["n_experts"], found["n_ranks"], found["hidden"]) == (64, 2, 24)
    assert np.array(found["pairs"]).sum(axis=1).tolist() == [2, 3]
    assert len(found["assumed"]) == 1 and "link" in found["assumed"][0]
    other = report.report(dump.read(tmp_path / "a.npz"), "a", n_ranks=4)
    assert other["n_ranks"] == 4 and any("dealt evenly" in line for line in other["assumed"])


def test_what_is_guessed_is_said(tmp_path):
    np.save(tmp_path / "a.npy", IDS[0])
    found = report.report(dump.read(tmp_path / "a.npy"), "a", n_ranks=3)
    guess = "n_experts=9, a guess: the largest id is 7, rounded up to a multiple of 3 ranks; --experts and --ranks change it"
    assert found["n_experts"] == 9 and found["assumed"][0] == guess


@pytest.mark.parametrize("ids, said", [([[-1, -1], [-1, -1]], "every id is -1"), ([[7, -1]], "the largest id is 7")])
def test_a_guess_names_only_ids_of_the_file(tmp_path, ids, said):
    np.save(tmp_path / "a.npy", np.array(ids))
    found = report.report(dump.read(tmp_path / "a.npy"), "a")
    assert f"n_experts=8, a guess: {said};" in found["assumed"][0]


@pytest.mark.parametrize(
    "ids, options, said",
    [
        (
            np.array([[0, 9]]),
            dict(n_experts=8),
            "token 0, k 1 has expert 9 (1 such id): an id must be in [0, n_experts=8)",
        ),
        (np.array([[0, -2]]), dict(n_experts=8), "has expert -2 (1 such id): an id must be in [0, 65535), or -1"),
        (np.array([[[0, 1]], [[2, -3]]]), dict(n_experts=8), "step 1, token 0, k 1 has expert -3"),
        (np.array([[0, 1], [4, 4]]), dict(n_experts=8), "token 1 has experts [4, 4]: the experts of a token must be"),
        (np.array([[0.0, 1.0]]), {}, "dtype float64; integers are needed"),
        (np.array([0, 1]), {}, "shape [2]"),
        (np.zeros((3, 0), int), {}, "shape [3, 0]"),
        (np.array([[0, 2**63]], np.uint64), {}, "token 0, k 1 has expert 9223372036854775808 (1 such id)"),
        (np.array([[0, 1]]), dict(n_experts=10, n_ranks=4), "10 experts cannot be dealt evenly to 4 ranks"),
        (np.array([[0, 1]]), dict(n_ranks=5000), "--ranks 5000 must be at most 1024"),
        (np.array([[0, 1]]), dict(hidden=12), "hidden=12 must be a multiple of 8"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_ids_that_do_not_fit_are_named(tmp_path, ids, options, said):
    np.save(tmp_path / "a.npy", ids)
    assert said in refusal(tmp_path / "a.npy", **options)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "names no expert"),
        ("hello", "line 1 is not JSON"),
        ("[1, 2]\n{", "line 2 is not JSON"),
        ("[1, 2]\n[[3, 4]]", "all alike"),
        ("3", "must hold the ids"),
        ('{"ids": [1]}', "has no topk_ids (it has ids)"),
        ("[1, true]", "where the ids of a token are needed"),
        ("[1.5, 2]", "where the ids of a token are needed"),
        ("[[[[1]]]]", "all alike"),
        ("[" * 100_000, "line 1 is not JSON (its lists or objects are nested too deeply)"),
        ('{"topk_ids": [1], "n_experts": 0}', "n_experts in"),
    ],
)
def test_json_that_does_not_fit_is_named(tmp_path, text, said):
    assert said in refusal(written(tmp_path, "a.json", text))


@pytest.mark.parametrize(
    "arrays, said",
    [
        (dict(x=np.zeros(3)), "has no topk_ids (it has x float64[3])"),
        ({}, "has no topk_ids (it has nothing)"),
        (dict(topk_ids=IDS[0], n_experts=[1, 2]), "one whole number from 1 to 65535"),
        (dict(topk_ids=IDS[0], rank_offsets=[0, 2]), "end at 3"),
        (dict(topk_ids=np.array([[None]])), "cannot be read"),
    ],
    ids=["no ids", "empty", "n_experts", "offsets", "objects"],
)
def test_npz_that_does_not_fit_is_named(tmp_path, arrays, said):
    np.savez(tmp_path / "a.npz", **arrays)
    assert said in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "array, remedy",
    [
        (np.array([[1.0, 2.0]]), "convert with .astype(np.int32)"),
        (np.array([[0.25, 0.75]]), "not scores of all experts"),
        (np.array([[1.0, np.nan]]), "not scores of all experts"),
        (np.array([[True, False]]), "or a map of them"),
    ],
    ids=["whole", "scores", "nan", "map"],
)
def test_ids_of_another_dtype_get_the_remedy_that_helps(tmp_path, array, remedy):
    np.save(tmp_path / "a.npy", array)
    assert remedy in refusal(tmp_path / "a.npy")


def test_a_file_of_torch_save_gets_the_call_that_writes_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", b"")
    assert "a.pt is made by torch.save: numpy.save('ids.npy'" in refusal(tmp_path / "a.pt")


def test_a_file_cut_short_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", topk_ids=IDS[0])
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-30])
    assert "a.npz cannot be read (File is not a zip file)" in refusal(tmp_path / "a.npz")
    assert "cannot be read: No such file" in refusal(tmp_path / "none.npz")
