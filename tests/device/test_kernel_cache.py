"""Compiled kernels on disk: found by content, made once a host, and never wrong if files or folders are damaged."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from epmoe.device import kernel_cache
from epmoe.device.fingerprint import fingerprint
from epmoe.kernels.params import namespace

KERNEL = ("entry", b"\x7fELF\0\1\2" * 9)
STEP = 1
ROOT = str(Path(__file__).resolve().parents[2])


def called(x):
    return x + 1


def calls_what(inner, constant):
    def outer(x):
        return inner(x) * constant + STEP

    return outer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EPMOE_CACHE", raising=False)
    return tmp_path


class Maker:
    """Counts how often it is asked."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return KERNEL


def test_a_kernel_is_made_once_and_then_found(cache):
    make = Maker()
    for _ in range(3):
        assert kernel_cache.find_or_make("k", make) == KERNEL
    assert make.count == 1 and [f.name for f in cache.glob("*.cubin")] == ["k.cubin"] and not list(cache.glob("*.part"))


def test_the_keys_of_a_run_are_worked_out_once_for_a_source(cache, monkeypatch):
    made = []

    def keys(run):
        return kernel_cache.keys_of(run, lambda: [made.append(run), *"ab"])

    assert keys(("run", 1)) == keys(("run", 1)) == [None, "a", "b"] and len(made) == 1
    keys(("run", 2))
    assert len(made) == 2 == len(list(cache.glob("*.keys")))
    for file in cache.glob("*.keys"):
        file.write_text("[")  # damaged
    assert keys(("run", 2)) == [None, "a", "b"] and len(made) == 3
    monkeypatch.setattr(kernel_cache, "package_digest", lambda: "another source")
    assert keys(("run", 2)) == [None, "a", "b"] and len(made) == 4
    monkeypatch.setenv("EPMOE_CACHE", "0")
    keys(("run", 2))
    assert len(made) == 5


def damaged(change):
    return lambda file: file.write_bytes(change(file.read_bytes()))


SPOILED = {
    "cut short": damaged(lambda raw: raw[:-1]),
    "empty": damaged(lambda raw: b""),
    "a byte changed": damaged(lambda raw: raw[:40] + b"?" + raw[41:]),
    "something else": damaged(lambda raw: b"something else"),
    "written by all": lambda file: file.chmod(0o666),
    "written by the group": lambda file: file.chmod(0o660),
    "of another user": lambda file: os.chown(file, 12345, -1),
    "a link": lambda file: (file.rename(file.with_name("other")), file.symlink_to(file.with_name("other"))),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_kernel_that_is_damaged_or_that_others_could_have_written_is_made_again(cache, how):
    make = Maker()
    kernel_cache.find_or_make("k", make)
    try:
        SPOILED[how](cache / "k.cubin")
    except PermissionError:
        pytest.skip("only root gives files away")
    assert kernel_cache.read(cache / "k.cubin") is None
    for _ in range(2):
        assert kernel_cache.find_or_make("k", make) == KERNEL and make.count == 2


def test_without_a_cache_a_key_or_a_folder_everything_is_made(cache, monkeypatch):
    make = Maker()
    kernel_cache.find_or_make(None, make)
    monkeypatch.setenv("EPMOE_CACHE_DIR", "/dev/null/no/folder")
    assert kernel_cache.find_or_make("k", make) == KERNEL
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(cache))
    monkeypatch.setenv("EPMOE_CACHE", "0")
    assert kernel_cache.find_or_make("k", make) == KERNEL
    assert make.count == 3 and not list(cache.iterdir())


def test_the_folder_does_not_grow_without_end(cache, monkeypatch):
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 3)
    for i in range(6):
        kernel_cache.find_or_make(f"k{i}", Maker())
        os.utime(cache / f"k{i}.cubin", (i, i))
    assert {f.name for f in cache.glob("*.cubin")} == {"k3.cubin", "k4.cubin", "k5.cubin"}


def test_of_several_processes_one_makes_and_the_others_wait(cache):
    program = (
        "import os, sys, time; from epmoe.device import kernel_cache as c\n"
        "def make():\n"
        f"    open({str(cache / 'made')!r}, 'a').write('x'); time.sleep(0.5); return 'entry', b'code'\n"
        "assert c.find_or_make('k', make) == ('entry', b'code')"
    )
    env = {**os.environ, "PYTHONPATH": ROOT}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(3)]
    assert [p.wait(60) for p in processes] == [0, 0, 0]
    assert (cache / "made").read_text() == "x"


def test_who_waits_too_long_makes_it_himself(cache):
    make, begin = Maker(), time.monotonic()
    with kernel_cache.alone(cache / "k.cubin"):
        assert kernel_cache.find_or_make("k", make, wait_s=0.2) == KERNEL
    assert make.count == 1 and 0.2 <= time.monotonic() - begin < 5


def test_the_fingerprint_follows_closures_called_functions_and_globals(monkeypatch):
    same = [fingerprint(calls_what(called, 2), 512) for _ in range(2)]
    assert same[0] == same[1] and same[0] is not None

    def called_otherwise(x):
        return x + 2

    called_otherwise.__name__ = "called"
    others = [
        fingerprint(calls_what(called, 3), 512),
        fingerprint(calls_what(called, 2.0), 512),
        fingerprint(calls_what(called_otherwise, 2), 512),
        fingerprint(calls_what(called, 2), 256),
    ]
    monkeypatch.setattr(sys.modules[__name__], "STEP", 5)
    others.append(fingerprint(calls_what(called, 2), 512))
    assert len({same[0], *others}) == 6 and None not in others


def test_the_fingerprint_follows_the_functions_of_a_namespace():
    def kernel_with(function):
        steps = namespace("steps", step=function)

        def kernel_function(x):
            return steps.step(x)

        return fingerprint(kernel_function)

    one, two = kernel_with(lambda x: x + 1), kernel_with(lambda x: x + 2)
    assert one == kernel_with(lambda x: x + 1) and None not in (one, two) and one != two


def test_a_name_of_a_branch_not_taken_is_no_obstacle():
    def made(with_extra):
        if with_extra:

            def extra(x):
                return x

        def kernel_function(x):
            return extra(x) if with_extra else x

        return kernel_function

    without, with_it = fingerprint(made(False), 512), fingerprint(made(True), 512)
    assert None not in (without, with_it) and without == fingerprint(made(False), 512) != with_it


@pytest.mark.parametrize(
    "unknown", [object(), np.zeros(3), functools.partial(called, 1)], ids=lambda a: type(a).__name__
)
def test_what_cannot_be_compared_is_not_cached(unknown):
    assert fingerprint(calls_what(unknown, 2)) is None
    assert fingerprint(calls_what(abs, 2)) is not None  # known by its name


def test_fingerprints_of_kernels_are_the_same_in_every_process_and_tell_kernels_apart(tmp_path):
    program = [sys.executable, Path(__file__).with_name("kernel_keys.py")]
    for package in ("epmoe", "epmoe_ref"):  # the second run finds .pyc files there
        shutil.copytree(Path(ROOT, package), tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "EPMOE_DEVICE": "gpu"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    first, second = (json.loads(subprocess.check_output(program, env=env, timeout=100)) for _ in range(2))
    assert first == second and list(tmp_path.rglob("*.pyc"))
    assert None not in first.values() and len(set(first.values())) == len(first)


def test_a_link_in_place_of_a_lock_empties_nothing(cache, tmp_path_factory):
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("keep me")
    (cache / "k.lock").symlink_to(precious)
    assert kernel_cache.find_or_make("k", Maker()) == KERNEL
    assert precious.read_text() == "keep me"


def test_no_lock_stays_behind_and_old_ones_go(cache):
    for name in ("dead.lock", ".half.part"):
        (cache / name).write_bytes(b"")
        os.utime(cache / name, (1, 1))
    (cache / "of_now.lock").write_bytes(b"")
    kernel_cache.find_or_make("k", Maker())
    assert {f.name for f in cache.iterdir()} == {"k.cubin", "of_now.lock"}


@pytest.mark.parametrize("mode, safe", [(0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, False)])
def test_a_folder_that_others_can_write_to_is_not_used_and_doctor_says_so(cache, mode, safe):
    from epmoe import doctor

    cache.chmod(mode)
    make = Maker()
    for _ in range(2):
        assert kernel_cache.find_or_make("k", make) == KERNEL
    assert make.count == (1 if safe else 2) and bool(list(cache.iterdir())) == safe
    finding = doctor.kernel_cache()
    assert (finding.state == doctor.OK) == safe and str(cache) in finding.saw
    assert safe or f"chmod go-w {cache}" in finding.saw + finding.remedy
    cache.chmod(0o700)


def test_a_folder_in_a_place_that_others_can_write_to_is_not_used(cache, monkeypatch):
    (cache / "open").mkdir()
    (cache / "open").chmod(0o777)
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(cache / "open" / "kernels"))
    assert kernel_cache.folder() is None
    (cache / "open").chmod(0o1777)  # like /tmp: a name belongs to the user who made it
    assert kernel_cache.folder() == cache / "open" / "kernels"
