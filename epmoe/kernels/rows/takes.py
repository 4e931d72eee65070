"""Polling data that carries its own ready flag: Lamport rows (lamport.py), and their words (lamport_words.py)."""

from epmoe.device import any_lane, device_fn, globaltimer, i32, ld_relaxed_sys_u64, u32, u64

from ..spin import POLLS_PER_LOOK, gives_up
from ..status import record_expired
from . import control
from .status import FOR_WINDOW


def of_four(block, phase, empty, look, is_late):
    """Device function take(params, epoch, source, step, word, p, q, r, s) -> (whether all arrived, data of word, four).

    By a whole warp: each lane waits for what lies at its own four addresses, 0 for none, asked for together. word:
    address of a word of a call that all lanes wait for besides, 0 for none. source: the rank that writes what the first
    address is of; each further one is that of the rank `step` behind. empty(at, tag): what is known before the first
    look. look(at, known, tag): what lies there now. is_late(known, tag): whether it has not come; never true without an
    address. tag: this call's, as u64 above 32 zeros.
    """
    p_words, p_timeout = block.index("words"), block.index("timeout_ns")

    @device_fn
    def first_late(a, b, c, tag):
        n = i32(3)
        if is_late(c, tag):
            n = i32(2)
        if is_late(b, tag):
            n = i32(1)
        if is_late(a, tag):
            n = i32(0)
        return n

    @device_fn
    def take(params, epoch, source, step, word, p, q, r, s):
        tag, ok, are_late, polls, since = u64(u64(epoch) << u64(32)), True, True, 0, u64(0)
        a, b, c, d, w = empty(p, tag), empty(q, tag), empty(r, tag), empty(s, tag), u64(tag)
        while ok and are_late:
            if word != u64(0):
                w = u64(ld_relaxed_sys_u64(word))
            a, b, c, d = look(p, a, tag), look(q, b, tag), look(r, c, tag), look(s, d, tag)
            are_late = (is_late(a, tag) or is_late(b, tag) or is_late(c, tag) or is_late(d, tag)
                        or u32(w >> u64(32)) != u32(epoch))
            polls += 1
            if are_late and polls % POLLS_PER_LOOK == 0:
                status = u64(params[p_words] + u64(control.STATUS))
                if since == u64(0):
                    since = u64(globaltimer())
                elif gives_up(status, since, params[p_timeout]):
                    record_expired(status, phase, FOR_WINDOW, i32(source + step * first_late(a, b, c, tag)), i32(epoch),
                                   -1)
                    ok = False
        failed = any_lane(not ok)
        return failed == 0, u32(w), a, b, c, d

    return take
