"""A disk cache of compiled kernels. Only the first start on a host compiles, and only one of several ranks does.

EPMOE_CACHE_DIR names the folder (default ~/.cache/epmoe/kernels), and EPMOE_CACHE=0 turns the cache off. A file's name
is the kernel's fingerprint. It is written under another name first, and a damaged file counts as missing. The folder
also holds lists of the fingerprints of all kernels that a run needs, because computing them takes seconds.

A user who can write to the folder decides what runs on your GPU. So a folder that others can write to is not used. A
file is used only if you own it, it is not a link, and others cannot write it.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

from .fingerprint import package_digest, versions

MAGIC = b"epmoe kernel 1\n"
WAIT_S = 120  # for another process that is compiling the same kernel
NAP_S = 0.02
MAX_FILES = 2000  # of each kind
LEFT_S = 86400  # older locks and partial files belong to killed processes
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder(environ=os.environ):
    """The folder, created if missing; None if the cache is off or the folder cannot be used."""
    return folder_or_reason(environ)[0]


def folder_or_reason(environ=os.environ):
    """(the folder, created if missing, or None; why there is none, or "")."""
    if environ.get("EPMOE_CACHE", "1").strip().lower() in ("0", "no", "off", "false"):
        return None, f"off (EPMOE_CACHE={environ['EPMOE_CACHE']})"
    chosen = environ.get("EPMOE_CACHE_DIR")
    try:
        home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        path = Path(chosen) if chosen else home / "epmoe" / "kernels"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        reason = _unsafe(path)
    except (OSError, RuntimeError) as error:  # a read-only or missing home
        return None, f"no folder can be made: {error}"
    if reason:
        return None, reason
    return (path, "") if os.access(path, os.W_OK | os.X_OK) else (None, f"{path} cannot be written to")


def _unsafe(path):
    """Why others could write to a folder, or replace it; "" if they cannot."""
    if not hasattr(os, "getuid"):
        return ""
    for one in (path, *path.parents):
        seen = os.stat(one)
        if seen.st_uid not in (0, os.getuid()) or one == path and seen.st_uid != os.getuid():
            return f"{one} belongs to another user (number {seen.st_uid})"
        if seen.st_mode & OTHERS_WRITE and (one == path or not seen.st_mode & stat.S_ISVTX):
            return f"others can write to {one}: chmod go-w {one}"
    return ""


def _opened(path, flags):
    """A file descriptor of this user's own file. OSError if it is a link, another user's, or others can write it."""
    file = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)
    seen = os.fstat(file)
    is_own = not hasattr(os, "getuid") or seen.st_uid == os.getuid() and not seen.st_mode & OTHERS_WRITE
    if not (is_own and stat.S_ISREG(seen.st_mode)):
        os.close(file)
        raise PermissionError(f"{path} is not this user's own file")
    return file


def _bytes_of(path):
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read(path):
    """(name of the entry point, cubin) from a file; None if it is missing, damaged or another user's."""
    try:
        raw = _bytes_of(path)
    except OSError:
        return None
    head, digest = raw[: len(MAGIC)], raw[len(MAGIC) : len(MAGIC) + 32]
    body = raw[len(MAGIC) + 32 :]
    if head != MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    name, _, cubin = body.partition(b"\0")
    return name.decode(), cubin


def write(path, name, cubin):
    """Store a compiled kernel. If that fails, it is compiled again next time."""
    body = name.encode() + b"\0" + cubin
    _put(path, MAGIC + hashlib.sha256(body).digest() + body)


def _put(path, raw):
    """Write a file completely or not at all, and make room for it."""
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
        _drop_what_was_left(path.parent)
    except OSError:
        pass


def _drop_what_was_left(directory):
    """Remove locks and partial files of killed processes."""
    for file in (*directory.glob("*.lock"), *directory.glob(".*.part")):
        if time.time() - file.lstat().st_mtime > LEFT_S:
            file.unlink(missing_ok=True)


def _drop_oldest(directory, suffix):
    files = sorted(directory.glob(f"*{suffix}"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path, wait_s=WAIT_S):
    """Context for compiling the kernel for `path`: one process at a time; others stop waiting after wait_s.

    The operating system releases the lock when the process that holds it ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            lock = path.with_suffix(".lock")
            file = stack.enter_context(os.fdopen(_opened(lock, os.O_RDWR | os.O_CREAT), "r+b"))
            # a process that waited then gets the lock, finds the kernel, and has nothing to remove
            stack.callback(lock.unlink, missing_ok=True)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(NAP_S)
        except (OSError, ImportError):  # the file system has no locks, so every process compiles
            pass
        yield


def has(key):
    """True if the cache has a kernel with this key."""
    directory = folder() if key is not None else None
    return directory is not None and (directory / f"{key}.cubin").exists()


def keys_of(run, make):
    """The list of keys that make() returns, cached under the name of a run until the package's source changes.

    run: any value with a different repr for each run.
    """
    directory = folder()
    if directory is None:
        return make()
    name = hashlib.sha256(repr((versions(), package_digest(), run)).encode()).hexdigest()
    path = directory / f"{name}.keys"
    try:
        return json.loads(_bytes_of(path))
    except (OSError, ValueError):
        keys = make()
        _put(path, json.dumps(keys).encode())
        return keys


def find_or_make(key, make, wait_s=WAIT_S):
    """(name, cubin) of the kernel with this key, from the cache, or from make() and then stored."""
    directory = folder() if key is not None else None
    if directory is None:
        return make()
    path = directory / f"{key}.cubin"
    found = read(path)
    if found is None:
        with alone(path, wait_s):
            found = read(path)  # another process may have compiled it meanwhile
            if found is None:
                found = make()
                write(path, *found)
    return found
