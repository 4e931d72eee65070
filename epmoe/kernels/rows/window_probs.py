"""Probs of rows by expert: in words that name the call (expert_bits.py), one for each token and expert."""

from epmoe.device import (any_lane, device_fn, i32, ld_relaxed_sys_u64, load_u8, load_u32, st_relaxed_sys_u64, store_u32, u32, u64)

from . import control, waits
from .status import FOR_WINDOW, ROWS_DISPATCH


def make(shape, block, bits, places):
    """Device functions (send, receive) of a token's probs for the experts of one rank, by a warp.

    send(params, epoch, my_rank, routing_map, token, rank, lane). receive(params, epoch, my_rank, known, source, token,
    limit, lane): to the token's output rows; whether they came. A rank's own are where they are.
    """
    local, n_experts, target, prob_at = shape.n_local_experts, shape.n_experts, places.target, bits.prob_at
    p_probs, p_out_probs = block.index("probs"), block.index("out_probs")
    p_words, p_timeout = block.index("words"), block.index("timeout_ns")

    @device_fn
    def routed(row, expert):
        value = i32(0)
        if expert < local:
            value = i32(load_u8(row + u64(expert)))
        return value

    @device_fn
    def prob_of(probs, expert, is_routed):
        prob = u32(0)
        if is_routed != 0:
            prob = u32(load_u32(probs + u64(4) * u64(expert)))
        return prob

    @device_fn
    def put(to, epoch, expert, is_routed, prob):
        if is_routed != 0:
            st_relaxed_sys_u64(to + u64(8) * u64(expert), waits.told(epoch, prob))

    @device_fn
    def send(params, epoch, my_rank, routing_map, token, rank, lane):
        first = u64(u64(token) * u64(n_experts) + u64(i32(rank * local)))
        row, probs = u64(routing_map) + first, params[p_probs] + u64(4) * first
        to, expert = u64(prob_at(params, epoch, rank, my_rank, token, i32(0))), i32(lane)
        while expert - lane < local:            # four windows of experts in flight
            a, b = routed(row, expert), routed(row, i32(expert + 32))
            c, d = routed(row, i32(expert + 64)), routed(row, i32(expert + 96))
            p, q = prob_of(probs, expert, a), prob_of(probs, i32(expert + 32), b)
            r, s = prob_of(probs, i32(expert + 64), c), prob_of(probs, i32(expert + 96), d)
            put(to, epoch, expert, a, p)
            put(to, epoch, i32(expert + 32), b, q)
            put(to, epoch, i32(expert + 64), c, r)
            put(to, epoch, i32(expert + 96), d, s)
            expert = i32(expert + 128)

    @device_fn
    def take(params, epoch, my_rank, source, token, expert):
        """(whether it arrived, the prob)"""
        ok, prob = True, u32(0)
        if source == my_rank:
            at = u64(u64(token) * u64(n_experts) + u64(i32(my_rank * local + expert)))
            prob = u32(load_u32(params[p_probs] + u64(4) * at))
        else:
            at = u64(prob_at(params, epoch, my_rank, source, token, expert))
            status = u64(params[p_words] + u64(control.STATUS))
            word = u64(waits.wait_for_tagged_word(at, u64(ld_relaxed_sys_u64(at)), epoch, status,
                                                  params[p_timeout], ROWS_DISPATCH, FOR_WINDOW,
                                                  source))
            ok, prob = word != u64(0), u32(word)
        return ok, prob

    @device_fn
    def receive(params, epoch, my_rank, known, source, token, limit, lane):
        ok, expert = True, i32(lane)
        while expert < local:
            row = i32(target(known, source, token, expert, limit))
            if ok and row >= 0:
                ok, prob = take(params, epoch, my_rank, source, token, expert)
                store_u32(params[p_out_probs] + u64(4) * u64(row), prob)
            expert = i32(expert + 32)
        return any_lane(not ok) == 0

    return send, receive
