"""Signals of two handles in the same words.

A low-latency call signals in one of two words, and clears the other one for the next call. The parity that picks the
word was kept by each handle, but the words belong to the group. With two handles in turn, a call finds the signal of the
other handle's last call, which looks exactly like its own, and goes on before its data are there. Then the handles clear
each other's signals, and ranks time out: 64 times in the dispatches of one run, never with a single handle. The fix that
was proposed tags each signal with the number of the call; one parity for the whole group does it here.
"""

from epmoe.device import (
    kernel,
    ld_acquire_sys_i32,
    load_i32,
    load_u64,
    st_relaxed_sys_i32,
    st_release_sys_i32,
    store_i32,
    thread_idx,
    u64,
)

BLOCKS, WARPS = 1, 1
LINKS = ("https://github.com/NVIDIA/nccl/issues/2303", "https://github.com/NVIDIA/nccl/pull/2306")
ROUNDS = 5
MESSAGE, SIGNAL, RESULT = 0, 16, 64
REGIONS = (  # name, place, words
    ("message", MESSAGE, 2),
    ("signal", SIGNAL, 2),
    ("result", RESULT, ROUNDS),
)
EXPECTED = {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4, 5]}
WHY = "The words belong to the group, and with this parity two handles use the same word in turn."
REPAIR = (
    ("parity = n // 2 % 2  # call n // 2 of handle n % 2", "parity = n % 2  # call n of the group"),
)


@kernel
def two_handles_in_turn(params, call, my_rank):
    """Call n: clear the next word, send message n + 1, wait for one."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if thread_idx() > 0:
        return
    for n in range(ROUNDS):
        parity = n // 2 % 2  # call n // 2 of handle n % 2
        st_relaxed_sys_i32(own + u64(SIGNAL + 4 * (1 - parity)), 0)
        store_i32(peer + u64(MESSAGE + 4 * parity), n + 1)
        st_release_sys_i32(peer + u64(SIGNAL + 4 * parity), 1)
        while ld_acquire_sys_i32(own + u64(SIGNAL + 4 * parity)) == 0:
            pass
        value = load_i32(own + u64(MESSAGE + 4 * parity))
        store_i32(own + u64(RESULT + 4 * n), value)
