"""Compiled kernels on disk, so that only the first start on a host compiles, and of several ranks only one.

EPMOE_CACHE_DIR names the folder (default ~/.cache/epmoe/kernels), EPMOE_CACHE=0 turns the cache off. A file is found by
the kernel's fingerprint and is written under another name first; one that is damaged counts as missing. Beside them lie
lists of the fingerprints of all kernels that a run needs, because to work them out takes seconds.
"""
import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from .fingerprint import package_digest, versions

MAGIC = b"epmoe kernel 1\n"
WAIT_S = 120            # for another process that compiles the same kernel
NAP_S = 0.02
MAX_FILES = 2000        # of each kind


def folder(environ=os.environ):
    """The folder, made if it is missing; None if the cache is off or cannot be had."""
    if environ.get("EPMOE_CACHE", "1").strip().lower() in ("0", "no", "off", "false"):
        return None
    chosen = environ.get("EPMOE_CACHE_DIR")
    try:
        home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        path = Path(chosen) if chosen else home / "epmoe" / "kernels"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):     # a read-only or missing home
        return None
    return path if os.access(path, os.W_OK | os.X_OK) else None


def read(path):
    """(name of the entry point, cubin) out of a file, or None if there is none or it is damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    head, digest, body = raw[:len(MAGIC)], raw[len(MAGIC):len(MAGIC) + 32], raw[len(MAGIC) + 32:]
    if head != MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    name, _, cubin = body.partition(b"\0")
    return name.decode(), cubin


def write(path, name, cubin):
    """Put a compiled kernel there; what cannot be written is compiled again next time."""
    body = name.encode() + b"\0" + cubin
    _put(path, MAGIC + hashlib.sha256(body).digest() + body)


def _put(path, raw):
    """Write a file whole or not at all, and make room for it."""
    try:
        handle, other = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
            os.replace(other, path)
        except BaseException:
            os.unlink(other)
            raise
        _drop_oldest(path.parent, path.suffix)
    except OSError:
        pass


def _drop_oldest(directory, suffix):
    files = sorted(directory.glob(f"*{suffix}"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path, wait_s=WAIT_S):
    """Context of compiling what belongs to `path`: one process at a time, as long as the others have patience.

    The lock is the operating system's: it ends with the process that holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            file = stack.enter_context(open(path.with_suffix(".lock"), "wb"))
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(NAP_S)
        except (OSError, ImportError):      # a file system without locks: everybody compiles for himself
            pass
        yield


def has(key):
    """Whether the cache has a kernel of this key."""
    directory = folder() if key is not None else None
    return directory is not None and (directory / f"{key}.cubin").exists()


def keys_of(run, make):
    """The keys that make() gives, a list: remembered under the name of a run as long as the package's source is this.

    run: any value whose repr tells one run from another.
    """
    directory = folder()
    if directory is None:
        return make()
    name = hashlib.sha256(repr((versions(), package_digest(), run)).encode()).hexdigest()
    path = directory / f"{name}.keys"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        keys = make()
        _put(path, json.dumps(keys).encode())
        return keys


def find_or_make(key, make, wait_s=WAIT_S):
    """(name, cubin) of the kernel with this key: out of the cache, or made by make() and put there."""
    directory = folder() if key is not None else None
    if directory is None:
        return make()
    path = directory / f"{key}.cubin"
    found = read(path)
    if found is None:
        with alone(path, wait_s):
            found = read(path)      # another process may have made it meanwhile
            if found is None:
                found = make()
                write(path, *found)
    return found
