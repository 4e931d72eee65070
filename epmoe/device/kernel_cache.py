"""Compiled kernels on disk, so that only the first start on a host compiles, and of several ranks only one.

EPMOE_CACHE_DIR names the folder (default ~/.cache/epmoe/kernels), EPMOE_CACHE=0 turns the cache off. A file is found by
the kernel's fingerprint and is written under another name first; one that is damaged counts as missing. Beside them lie
lists of the fingerprints of all kernels that a run needs, because to work them out takes seconds.

Whoever can write there decides what runs on this user's GPU. So a folder that others can write to is not used, and a
file counts only if it is this user's, not a link, and not writable by others.
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
WAIT_S = 120  # for another process that compiles the same kernel
NAP_S = 0.02
MAX_FILES = 2000  # of each kind
LEFT_S = 86400  # after which a lock, or half of a file, is of a process that was killed
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder(environ=os.environ):
    """The folder, made if it is missing; None if the cache is off or cannot be had."""
    return folder_or_reason(environ)[0]


def folder_or_reason(environ=os.environ):
    """(the folder, made if it is missing, or None; why there is none, or "")."""
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
    return (
        (path, "") if os.access(path, os.W_OK | os.X_OK) else (None, f"{path} cannot be written to")
    )


def _unsafe(path):
    """Why others could put something into a folder, or another one into its place; "" if they cannot."""
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
    """A file descriptor of this user's own file; OSError if it is a link, of another user, or others can write it."""
    file = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)
    seen = os.fstat(file)
    is_own = (
        not hasattr(os, "getuid") or seen.st_uid == os.getuid() and not seen.st_mode & OTHERS_WRITE
    )
    if not (is_own and stat.S_ISREG(seen.st_mode)):
        os.close(file)
        raise PermissionError(f"{path} is not this user's own file")
    return file


def _bytes_of(path):
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read(path):
    """(name of the entry point, cubin) out of a file, or None if there is none, or it is damaged or not our own."""
    try:
        raw = _bytes_of(path)
    except OSError:
        return None
    head, digest, body = (
        raw[: len(MAGIC)],
        raw[len(MAGIC) : len(MAGIC) + 32],
        raw[len(MAGIC) + 32 :],
    )
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
        _drop_what_was_left(path.parent)
    except OSError:
        pass


def _drop_what_was_left(directory):
    """Remove locks and halves of files of processes that were killed."""
    for file in (*directory.glob("*.lock"), *directory.glob(".*.part")):
        if time.time() - file.lstat().st_mtime > LEFT_S:
            file.unlink(missing_ok=True)


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

            lock = path.with_suffix(".lock")
            file = stack.enter_context(os.fdopen(_opened(lock, os.O_RDWR | os.O_CREAT), "r+b"))
            # who waits for it then gets it, finds the kernel, and finds nothing to remove
            stack.callback(lock.unlink, missing_ok=True)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(NAP_S)
        except (
            OSError,
            ImportError,
        ):  # a file system without locks: everybody compiles for himself
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
        return json.loads(_bytes_of(path))
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
            found = read(path)  # another process may have made it meanwhile
            if found is None:
                found = make()
                write(path, *found)
    return found
