"""The vectors are the same bytes everywhere, obey the laws, and can be read without Python."""

import hashlib
import json
import re
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from epmoe.__main__ import main
from epmoe.check import random_bits
from epmoe.vectors import command, experts, files, fused_a2a

C_SOURCE = Path(__file__).with_name("read_vector.c")
FORMATS = {"bf16", "fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors")
    path.joinpath("sums").write_bytes(command.as_text(command.write_all(path)))
    return path


@pytest.fixture(scope="module")
def manifests(folder):
    return [json.loads(path.read_text("ascii")) for path in sorted(folder.glob("*.json"))]


def test_files_have_the_recorded_hashes(folder):
    assert (folder / "sums").read_bytes() == command.SUMS.read_bytes()


def test_manifest_binary_and_npz_hold_the_same_arrays(folder, manifests):
    for manifest in manifests:
        blob = (folder / manifest["file"]).read_bytes()
        assert hashlib.sha256(blob).hexdigest() == manifest["sha256"] and len(blob) == manifest["nbytes"]
        _, arrays = files.read(folder, manifest["name"])
        with np.load(folder / f"{manifest['name']}.npz") as npz:
            assert set(npz.files) == set(arrays)
            for entry, (key, array) in zip(manifest["arrays"], arrays.items(), strict=True):
                data = blob[entry["offset"] : entry["offset"] + entry["nbytes"]]
                assert hashlib.sha256(data).hexdigest() == entry["sha256"]
                assert entry["offset"] % files.ALIGNMENT == 0
                assert npz[key].tobytes() == array.tobytes() == data
                assert npz[key].shape == array.shape


def test_zip_members_carry_no_date_and_no_system(folder):
    with zipfile.ZipFile(next(iter(sorted(folder.glob("*.npz"))))) as archive:
        for member in archive.infolist():
            assert member.date_time == (1980, 1, 1, 0, 0, 0)
            assert (member.create_system, member.compress_type) == (3, zipfile.ZIP_STORED)


def test_every_format_option_and_corner_is_covered(manifests, folder):
    configs = [m["config"] for m in manifests if "config" in m]
    assert {c["token_format"] for c in configs} == FORMATS
    assert {c["combine_dtype"] for c in configs} == {"bf16", "fp16", "fp32"}
    for option in ("fuse_a_scale_preshuffle", "fused_shared_expert", "skip_a2a", "use_shmem"):
        assert {c[option] for c in configs} == {False, True}
    assert {c["alignment"] for c in configs} == {16, 64}
    assert {m["weighted"] for m in manifests if "weighted" in m} == {False, True}
    assert any(m.get("epilogue") for m in manifests)
    assert any(0 in m["n_tokens"] and any(m["n_tokens"]) for m in manifests if "config" in m)
    assert any((a == -1).any() for m in manifests for k, a in files.read(folder, m["name"])[1].items() if "topk" in k)
    options = [m["options"] for m in manifests if "options" in m]
    assert {key for o in options for key in o} == {
        "num_permuted_tokens",
        "pad_multiple",
        "fp8_dispatch",
        "p2p_world_size",
    }
    overflow = {
        int(a[0])
        for m in manifests
        for key, a in files.read(folder, m["name"])[1].items()
        if key.startswith("overflow")
    }
    assert overflow == {0, 1}


@pytest.fixture(scope="module")
def read_vector(tmp_path_factory):
    """Runs the C program, built with sanitizers, on a vector."""
    compiler, program = shutil.which("cc"), tmp_path_factory.mktemp("program") / "read_vector"
    assert compiler, "no C compiler: install one (apt-get install gcc)"
    flags = "-std=c99 -Wall -Wextra -Werror -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -o"
    subprocess.run([compiler, *flags.split(), program, C_SOURCE], check=True)
    return lambda at: subprocess.run([program, at], capture_output=True, text=True)


def test_a_c_program_reads_and_checks_a_vector(folder, read_vector, tmp_path):
    assert len(C_SOURCE.read_text().splitlines()) <= 100
    name = "dispatch_combine_slots_without_an_expert"
    good = read_vector(folder / name)
    assert (good.returncode, good.stdout) == (0, "ok: 40 arrays, 53 rows of dispatch\n"), good.stderr
    # CRC-32 only
    assert read_vector(folder / "dispatch_combine_nvfp4").stdout == "ok: 48 arrays, 0 rows of dispatch\n"
    for vector in sorted(folder.glob("*.json")):  # some arrays have no rows
        assert read_vector(vector.with_suffix("")).stderr == "", vector
    for suffix in (".json", ".bin"):
        shutil.copy(folder / (name + suffix), tmp_path)
    damaged = bytearray((tmp_path / f"{name}.bin").read_bytes())
    damaged[100] ^= 1
    (tmp_path / f"{name}.bin").write_bytes(damaged)
    bad = read_vector(tmp_path / name)
    assert bad.returncode == 1 and "CRC-32" in bad.stderr
    missing = read_vector(tmp_path / "nothing")
    assert missing.returncode == 1 and "usage" in missing.stderr


ODD = (-7, -1, 0, 3, 63, 64, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 62, -(1 << 63), 1 << 70)


def changed_manifest(text, rng):
    """A manifest with a number, a word or a line changed, as in a damaged file."""
    lines = text.splitlines()
    at = int(rng.choice([i for i, line in enumerate(lines) if '"rank": ' in line]))
    keys = [*re.finditer(r'"(rank|offset|nbytes|crc32)": (-?\d+)|(?<=[\[ ])(\d+)(?=[,\]])', lines[at])]
    found = keys[rng.integers(len(keys))]
    group = 2 if found[2] else 3
    kind = rng.integers(6)
    if kind < 4:
        new = str(int(rng.choice(np.array(ODD, object))))
        lines[at] = lines[at][: found.start(group)] + new + lines[at][found.end(group) :]
    elif kind == 4:
        lines[at] = lines[at].replace(str(rng.choice(["shape", "rank", "offset", "crc32", "nbytes"])), "else")
    else:
        del lines[at]
    return "\n".join(lines) + "\n"


def changed_arrays(blob, text, rng):
    """(binary, manifest) with another number in an array of integers, and the CRC-32 of that."""
    blob, manifest = bytearray(blob), json.loads(text)
    entry = rng.choice([a for a in manifest["arrays"] if a["dtype"].endswith("int32") and a["nbytes"]])
    at = entry["offset"] + 4 * int(rng.integers(entry["nbytes"] // 4))
    blob[at : at + 4] = (int(rng.choice(np.array(ODD, object))) & 0xFFFFFFFF).to_bytes(4, "little")
    crc = zlib.crc32(blob[entry["offset"] : entry["offset"] + entry["nbytes"]])
    return blob, text.replace(f'"crc32": {entry["crc32"]}', f'"crc32": {crc}')


def test_the_c_program_trusts_nothing_in_a_manifest_or_an_array(folder, read_vector, tmp_path, tonight):
    source = folder / "dispatch_combine_slots_without_an_expert"
    rng, refused = np.random.default_rng(0), 0
    text, blob = source.with_suffix(".json").read_text(), source.with_suffix(".bin").read_bytes()
    tries = 120 if tonight else 30
    for i in range(tries):
        changed = (blob, changed_manifest(text, rng)) if i % 2 else changed_arrays(blob, text, rng)
        (tmp_path / "odd.bin").write_bytes(changed[0])
        (tmp_path / "odd.json").write_text(changed[1])
        done = read_vector(tmp_path / "odd")
        refused += done.returncode == 1
        assert done.returncode in (0, 1) and "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, (
            done.stderr[:2000]
        )
        assert done.returncode == 0 or done.stderr.startswith("read_vector: ")
    assert refused > tries * 2 // 3


def test_random_words_are_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as its authors' reference code prints them."""
    words = random_bits.words(np.uint64(1234567), 5)
    assert words.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_random_floats_stay_in_their_powers_of_two():
    for dtype, kind in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp32", np.float32)):
        values = random_bits.floats(dtype, random_bits.stream(1, 2), 5000, exponents=(-4, 3))
        assert values.dtype == kind
        size = np.abs(values.astype(np.float64))
        assert size.min() >= 2.0**-4 and size.max() < 2.0**4
        assert (values.astype(np.float64) < 0).mean() == pytest.approx(0.5, abs=0.05)
        assert len({int(e) for e in np.floor(np.log2(size))}) == 8


def test_only_the_chosen_vectors_are_computed(tmp_path, monkeypatch):
    made = []
    for module, name in ((experts, "_arrays"), (fused_a2a, "_rows_arrays"), (fused_a2a, "_hybrid_arrays")):
        monkeypatch.setattr(module, name, lambda case, make=getattr(module, name): made.append(case.name) or make(case))
    assert len(command.write_all(tmp_path, only="overflow_by_padding")) == 3 and made == ["overflow by padding"]


def test_the_command_says_when_files_are_not_this_versions(tmp_path, capsys, monkeypatch):
    argv = ["vectors", str(tmp_path), "--only", "overflow_by_padding"]
    assert main(argv) == 0 and len(list(tmp_path.iterdir())) == 3
    assert "hashes equal this version's" in capsys.readouterr().out
    other = tmp_path / "SHA256SUMS"
    other.write_bytes(command.SUMS.read_bytes().replace(b"a", b"b"))
    monkeypatch.setattr(command, "SUMS", other)
    assert main(argv) == 1
    assert "hashes differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["new", "--only", "zzz"], "no vector's name contains 'zzz'"),
        (["new", "--only", "nvfp4", "--update"], "leave --only out"),
        (["mine.py"], "mine.py is a file: give a folder"),
    ],
)
def test_the_command_refuses_to_do_nothing_to_forget_hashes_or_to_replace_a_file(tmp_path, capsys, words, said):
    before, (name, *options) = command.SUMS.read_bytes(), words
    (tmp_path / "mine.py").touch()
    assert main(["vectors", str(tmp_path / name), *options]) == 2
    assert said in capsys.readouterr().err and command.SUMS.read_bytes() == before
