"""Runs code that may never end: a module in a separate process, which reports in JSON lines.

The code may hang, crash, end its process or print what it likes; it is killed, with all that it started, when the
context of `process` ends, and ends by itself if this process is killed.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback

# `python -m` without the working directory in the path, where a numpy.py may lie; as -P, which Python 3.10 lacks
START = (
    "import sys; sys.path[:] = filter(None, sys.path); from runpy import run_module; "
    "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@contextlib.contextmanager
def process(module, task, output=None, before=(), folder=None):
    """Run `python -m module`, which calls `child`: (process, lines). task: any value that JSON can hold.

    lines(limit) yields its reports; after limit() seconds without one, process.late is True and lines ends. output:
    where its prints go, as for subprocess; default: this process's stdout. before: words before the command, such as
    unshare's. folder: its working directory, the first in its path if this process has "" there, else the last.
    """
    ours, theirs = os.pipe()
    paths = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path if path))
    words = module, str(theirs), json.dumps(task), "first" if "" in sys.path else "last"
    running = subprocess.Popen(
        [*before, sys.executable, "-c", START, *words],
        stdin=subprocess.PIPE,
        stdout=output,
        pass_fds=(theirs,),
        start_new_session=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
    )
    os.close(theirs)
    running.late = False

    def lines(limit):
        rest = b""
        while True:
            end = time.monotonic() + limit()
            while b"\n" not in rest:
                if not select.select([ours], [], [], max(0, end - time.monotonic()))[0]:
                    running.late = True
                    return
                raw = os.read(ours, 1 << 16)
                if not raw:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.wait(max(0, end - time.monotonic()))
                    return
                rest += raw
            line, _, rest = rest.partition(b"\n")
            yield json.loads(line)

    try:
        yield running, lines
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        running.stdin.close()
        os.close(ours)


def how_it_ended(running):
    """How a process ended, in words, if it stopped reporting."""
    status = running.returncode
    if status is None:
        return "closed the pipe that it reports through"
    if status < 0:
        return f"crashed the process: signal {-status} ({signal.Signals(-status).name})"
    return f"ended the process with exit status {status} (sys.exit, os._exit?)"


def child(run):
    """For the module that `process` starts: run(task, say), where say(value) reports to the waiting process."""
    fd, task = int(sys.argv[1]), json.loads(sys.argv[2])

    def say(value):
        os.write(fd, (json.dumps(value, default=int) + "\n").encode())

    guard = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the code's input() finds an end
    threading.Thread(target=_listen, args=(guard, say), daemon=True).start()
    sys.path.insert(0 if sys.argv[3] == "first" else len(sys.path), "")
    run(task, say)


def _listen(guard, say):
    """Say where the main thread is at each byte from the guard. End this process when the guard ends for any reason."""
    while os.read(guard, 1):
        frame = sys._current_frames()[threading.main_thread().ident]
        say(["at", [[f.f_code.co_filename, line] for f, line in traceback.walk_stack(frame)]])
    os._exit(3)
