"""Memory that processes can share on this host: /dev/shm, which containers keep small (64 MB by default).

MPI makes a window of any size there. A process that touches a part that does not fit dies with a bus error.
"""

import os

from epmoe_ref.errors import UnavailableError

FOLDER = "/dev/shm"
LEFT_FREE = 1 << 20  # bytes: MPI's own use


def room():
    """(bytes left, bytes in all) of the folder; None if there is no such folder."""
    try:
        seen = os.statvfs(FOLDER)
    except OSError:
        return None
    return seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize


def remedy(nbytes):
    """How to get this much room."""
    size = -(-nbytes // (1 << 30))
    return (
        f"start the container with --shm-size={size}g (Kubernetes: an emptyDir of medium Memory at {FOLDER}), or "
        f"mount -o remount,size={size}g {FOLDER}; a LocalWorld, with all ranks in one process, needs none"
    )


def expect_room(needed, left_and_total, what):
    """Raise UnavailableError unless `needed` bytes are left. left_and_total: result of room()."""
    if left_and_total is None:
        return
    left, total = left_and_total
    if needed + LEFT_FREE > left:
        raise UnavailableError(
            f"{what} needs {needed} bytes of {FOLDER}, which has {left} left of {total}: "
            f"{remedy(needed + LEFT_FREE + total - left)}"
        )
