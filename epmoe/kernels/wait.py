"""Bounded waits: each ends after the timeout, by the device's clock. Spins elsewhere end by gives_up, too.

A wait gives up when its own time is over, which it records in the status region, or when another wait of this rank has
failed. FAILED is the only abort flag: it ends all waits of the rank, in this launch and in later ones.

wait_below polls a word of recv_count with acquire, so the data that it guards can be read at once. wait_for_own_blocks
polls a word of this device relaxed, since many threads wait for the same one, and acquires it when the poll succeeds.
"""

from epmoe.device import device_fn, globaltimer, i32, ld_acquire_gpu_i32, ld_acquire_sys_u64, ld_relaxed_gpu_i32, u64
from epmoe.layout import MAX_FINITE

from .status import has_failed, record_expired

POLLS_PER_LOOK = 32     # polls between two looks at the clock and at FAILED


@device_fn
def gives_up(status, since, timeout_ns):
    """Whether a wait that began at `since` must give up."""
    if has_failed(status):
        return True
    return u64(globaltimer()) - u64(since) > u64(timeout_ns)


def until(load, has_come, number):
    """Device function wait(address, wanted, status, timeout_ns, what, index) -> (whether it came, last word loaded).

    has_come(word, wanted): whether the wait is over. If it expires, it records what (phase, FOR_...), index and
    number(word) in the status region.
    """
    @device_fn
    def wait(address, wanted, status, timeout_ns, what, index):
        seen = load(address)
        if has_come(seen, wanted):
            return True, seen
        since, polls = u64(globaltimer()), 0
        while not has_come(seen, wanted):
            polls += 1
            if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
                record_expired(status, what[0], what[1], index, i32(wanted), number(seen))
                return False, seen
            seen = load(address)
        return True, seen

    return wait


_until_below = until(device_fn(lambda word: u64(ld_acquire_sys_u64(word))),
                     device_fn(lambda seen, below: seen < u64(below)), device_fn(lambda word: i32(-1)))
_until_equal = until(device_fn(lambda word: ld_relaxed_gpu_i32(word)), device_fn(lambda seen, wanted: seen == wanted),
                     device_fn(lambda word: word))


@device_fn
def wait_below(word, below, call, phase, waited_for, index):
    """Waits until a recv_count word is below a number. Returns it, acquired at system scope; MAX_FINITE if it gave up.

    below: ANNOUNCED, to wait until the messages have arrived, or MAX_FINITE, to wait for their number. call: a record
    with status and timeout_ns.
    """
    came, seen = _until_below(word, below, call.status, call.timeout_ns, (phase, waited_for), index)
    return seen if came else u64(MAX_FINITE)


@device_fn
def wait_for_own_blocks(word, wanted, status, timeout_ns, phase, waited_for, index):
    """Waits until an int32 word that blocks of this device write equals `wanted`, acquired at device scope."""
    came, _ = _until_equal(word, wanted, status, timeout_ns, (phase, waited_for), index)
    if came:
        ld_acquire_gpu_i32(word)
    return came
