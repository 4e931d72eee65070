"""Bounded waits: every spin of every kernel is one of these, and each ends after the timeout by the device's clock.

A wait returns False when it gave up: its own time was over, which it records in the status region, or another wait of
this rank had failed. FAILED is the one abort flag: it releases all waits of the rank, in this launch and in later ones.
A ready flag is raised by a block that waits itself, with the same timeout; who waits for a flag has more patience, so
that the cause is recorded and not its effect.
"""

from epmoe.device import device_fn, globaltimer, ld_acquire_gpu_i32, ld_acquire_sys_u64, u64
from epmoe.layout import MAX_FINITE
from epmoe_ref.config import READY

from .status import FOR_READY, FOR_RECV_COUNT, has_failed, record_expired

POLLS_PER_LOOK = 32     # polls between two looks at the clock and at FAILED
PATIENCE = 8            # timeouts that a wait for a ready flag lasts, unless FAILED ends it


@device_fn
def gives_up(status, since, timeout_ns):
    """Whether a wait that began at `since` has to end without success."""
    if has_failed(status):
        return True
    return u64(globaltimer()) - u64(since) > u64(timeout_ns)


@device_fn
def wait_for_signal(word, status, timeout_ns, phase, index):
    """Waits until a recv_count word has arrived and returns it, acquired at system scope; MAX_FINITE if it gave up."""
    count = u64(ld_acquire_sys_u64(word))
    if count != u64(MAX_FINITE):
        return count
    since = u64(globaltimer())
    polls = 0
    while count == u64(MAX_FINITE):
        polls += 1
        if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
            record_expired(status, phase, FOR_RECV_COUNT, index, 0, -1)
            break
        count = u64(ld_acquire_sys_u64(word))
    return count


@device_fn
def wait_for_own_blocks(word, wanted, status, timeout_ns, phase, waited_for, index):
    """Waits until an int32 word that blocks of this device write equals `wanted`, acquired at device scope."""
    seen = ld_acquire_gpu_i32(word)
    if seen == wanted:
        return True
    since = u64(globaltimer())
    polls = 0
    while seen != wanted:
        polls += 1
        if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
            record_expired(status, phase, waited_for, index, wanted, seen)
            return False
        seen = ld_acquire_gpu_i32(word)
    return True


@device_fn
def wait_for_flag(flag, status, timeout_ns, phase, index):
    """Waits until this device's waiting block has raised a ready flag, acquired at device scope."""
    return wait_for_own_blocks(flag, READY, status, u64(PATIENCE) * u64(timeout_ns), phase, FOR_READY, index)
