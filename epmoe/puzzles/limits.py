"""What a student's file may do while it is judged: compute, read files, print. Nothing else.

Everywhere: at most 1 GiB more memory, 60 s of CPU time and files of 1 MiB (resource limits), and no process, no
connection, no signal, no library and no file outside its own folder (an audit hook, which sees what Python code asks
for). On Linux with `unshare`, grading adds what the kernel enforces: no network, every file system read-only but the
folder, no capabilities, and every process that is left over ends.

The hook stops mistakes and mischief, not an attack on the interpreter itself. For files of people you do not trust use
a machine of its own.
"""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from epmoe_ref.errors import EPError

MEMORY, FILE, CPU_S = 1 << 30, 1 << 20, 60
REFUSED = {
    "socket": "opens a network connection",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.spawn": "starts a process",
    "os.system": "starts a process",
    "os.exec": "starts a process",
    "os.startfile": "starts a process",
    "subprocess.Popen": "starts a process",
    "pty.spawn": "starts a process",
    "_thread.start_new_thread": "starts a thread",
    "os.kill": "sends a signal",
    "os.killpg": "sends a signal",
    "signal.pthread_kill": "sends a signal",
    "sqlite3.connect": "opens a database",
    "ctypes.dlopen": "loads a library",
    "ctypes.dlsym": "calls a library",
    "resource.setrlimit": "changes its limits",
}
WRITING = {"remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod", "chown", "utime"}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(EPError):
    """The answer did what no answer needs."""


def apply(folder):
    """Limit this process from now on; files may be written in `folder` only. Returns what was refused, as it comes."""
    sys.dont_write_bytecode = True
    _limit_resources()
    folder, refused = os.path.realpath(folder), []

    def refuse(what):
        refused.append(what)
        raise Refused(f"it {what}, which no answer needs")

    def outside(path):
        if isinstance(path, int):
            return False
        real = os.path.realpath(os.fsdecode(path))
        return real != os.devnull and not (real + os.sep).startswith(folder + os.sep)

    def hook(event, args):
        what = REFUSED.get(event) or REFUSED.get(event.partition(".")[0])
        if what:
            refuse(what)
        if event == "open":
            path, mode, flags = args
            if path is not None and flags & WRITE_FLAGS and outside(path):
                refuse(f"writes {os.fsdecode(path)}, outside its folder")
        elif event.startswith("os.") and event[3:] in WRITING:
            for path in args[:2] if event[3:] in ("rename", "link", "symlink") else args[:1]:
                if outside(path):
                    refuse(f"changes {os.fsdecode(path)}, outside its folder")

    sys.addaudithook(hook)
    return refused


def _limit_resources():
    held = 0
    status = Path("/proc/self/statm")
    if status.exists():
        held = int(status.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, held + MEMORY)
    _lower(resource.RLIMIT_FSIZE, FILE)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, CPU_S)


def _lower(what, limit):
    _, hard = resource.getrlimit(what)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (limit, limit))


# ---------------------------------------------------------------- what the kernel enforces, for grading
CLONE = ["--user", "--map-root-user", "--net", "--pid", "--mount", "--ipc", "--fork", "--kill-child"]
MOUNT_SETATTR, RECURSIVE, READ_ONLY, BIND, AT_FDCWD = 442, 0x8000, 1, 4096, -100
CAPSET_VERSION, NO_NEW_PRIVS = 0x20080522, 38
CAPSET = {"x86_64": 126, "aarch64": 91}


def namespaces():
    """The words to put before a command that is to have namespaces of its own; [] where that cannot be had."""
    unshare = shutil.which("unshare")
    if not unshare or os.uname().machine not in CAPSET:
        return []
    words = [unshare, *CLONE, "--"]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*words, sys.executable, "-c", "from epmoe.puzzles import limits; limits.seal('.')"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
        )
    return words if done.returncode == 0 else []


def seal(folder):
    """In a mount namespace of its own: all file systems become read-only but this folder, and no capability is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.fsencode(os.path.realpath(folder))

    def attributes(path, flags, set_, clear):
        words = (ctypes.c_uint64 * 4)(set_, clear, 0, 0)
        return libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, words, ctypes.sizeof(words))

    header, nothing = (ctypes.c_uint32 * 2)(CAPSET_VERSION, 0), (ctypes.c_uint32 * 6)()
    for call in (
        lambda: libc.mount(folder, folder, None, BIND, None),
        lambda: attributes(b"/", RECURSIVE, READ_ONLY, 0),
        lambda: attributes(folder, 0, 0, READ_ONLY),
        lambda: libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0),
        lambda: libc.syscall(CAPSET[os.uname().machine], header, nothing),
    ):
        if call() != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.chdir(folder)  # the folder as it was bound, which can be written
