"""Bits of a routing map, in few loads that are all issued together: an expert's tokens, a token's ranks."""

from epmoe.device import device_fn, i32, load_u8, u32, u64


def of_tokens(n, n_experts):
    """Device function (at, last) -> an expert's bits of n tokens from an address of the map on, all asked for first.

    Bits behind that of token `last` are not cleared.
    """
    @device_fn
    def nothing(at, last):
        return u32(0)

    if n == 0:
        return nothing
    of_the_rest, token = of_tokens(n - 1, n_experts), n - 1

    @device_fn
    def bits(at, last):
        value = load_u8(at + u64(n_experts) * u64(min(i32(token), last)))
        mask = u32(of_the_rest(at, last))
        if value != 0:
            mask = u32(mask | u32(u32(1) << u32(token)))
        return mask

    return bits


def ranks_of_token(shape):
    """Device function (routing_map, token, lane) -> a lane's part of the mask of a token's ranks, by a warp.

    The mask itself is or_of_warp of these (routing.py), for which the loads are waited for.
    """
    n_experts, local = shape.n_experts, shape.n_local_experts

    def looking(n):
        @device_fn
        def nothing(row, lane):
            return u32(0)

        if n == 0:
            return nothing
        at_the_rest, first = looking(n - 1), 32 * (n - 1)

        @device_fn
        def look_at(row, lane):
            expert = i32(min(i32(first + lane), n_experts - 1))
            value = load_u8(row + u64(expert))
            mask = u32(at_the_rest(row, lane))
            if value != 0:
                mask = u32(mask | u32(u32(1) << u32(u32(expert) // u32(local))))
            return mask

        return look_at

    look_at_all = looking(-(-n_experts // 32))

    @device_fn
    def look(routing_map, token, lane):
        return look_at_all(u64(routing_map) + u64(token) * u64(n_experts), lane)

    return look
