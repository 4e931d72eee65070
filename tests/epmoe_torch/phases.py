"""When the phases of a program of several ranks have ended: one that is stopped has told how far it was."""

import time

START = time.perf_counter()


def say(rank, what):
    """One line of rank 0."""
    if rank == 0:
        print(f"{time.perf_counter() - START:.1f} s: {what}", flush=True)
