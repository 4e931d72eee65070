"""Messages of dispatch for ranks of other p2p worlds: staged once in send_buf, then put to each of them."""

from typing import NamedTuple

from epmoe.device import ballot, device_fn, ffs, i32, syncwarp, u32, u64, warp_broadcast_i32, warp_broadcast_u64

from . import transport


class Crossing(NamedTuple):
    """Device functions of a warp; lane k holds slot k's place (0: nothing is sent) and the owner of its expert.

    needed: whether there are other worlds; without them neither function is called.
    stored_at(place, owner, my_rank, staged, lane): where the warp stores this lane's message: at its place, if the
        owner is near; the first lane with a far owner has `staged`, the other ones 0.
    put_staged(place, owner, my_rank, staged, n_bytes): the staged message to the far places; returns when they have it.
    """

    needed: bool
    stored_at: callable
    put_staged: callable


def make(cfg, block) -> Crossing:
    """The functions for one parameter block of the dispatch kernels."""
    peers, top_k = transport.make(cfg, block), cfg.top_k
    is_far, put, complete = peers.is_far, peers.put, peers.complete

    @device_fn
    def stored_at(place, owner, my_rank, staged, lane):
        far = place != u64(0) and is_far(owner, my_rank)
        first = i32(ffs(ballot(far)) - 1)
        at = u64(place)
        if far:
            at = u64(0)
            if lane == first:
                at = u64(staged)
        return at

    @device_fn
    def put_staged(place, owner, my_rank, staged, n_bytes):
        far = u32(ballot(place != u64(0) and is_far(owner, my_rank)))
        if far != u32(0):
            syncwarp()                  # the staged message by all lanes, before the network reads it
            k = i32(0)
            while k < top_k:
                to, rank = u64(warp_broadcast_u64(place, k)), i32(warp_broadcast_i32(owner, k))
                if u32(far >> u32(k)) & u32(1) != u32(0):
                    put(to, staged, n_bytes, rank)
                k = i32(k + 1)
            complete()

    return Crossing(peers.crosses, stored_at, put_staged)
