"""Exercises of lesson 2: whose recv_buf, and where in it."""

from itertools import product

from epmoe.lessons.answers import Wrong, call, whole_numbers
from epmoe.lessons.number_questions import Number

STUB = '''
def place(n_ranks, n_experts, top_k, hidden, max_tokens, expert, src_rank, slot):
    """(owner of the expert, byte offset of the message in the owner's recv_buf)."""
    ...
'''

WARM_UP = Number(
    208 + 16 + 32,
    "208 for the payload, 16 for src_info, 32 for nine ids of 2 bytes.",
    (
        (200 + 4 + 18, "each of the three parts is filled up to a multiple of 16."),
        (224, "each part is padded, not their sum."),
        (208 + 16 + 16, "nine ids take 18 bytes, which become 32."),
        (200 + 16 + 32, "the payload is padded too: 200 bytes become 208."),
        (208 + 4 + 32, "src_info takes 16 bytes."),
        (112 + 16 + 32, "a bf16 number takes 2 bytes."),
        (400 + 16 + 32, "a bf16 number takes 2 bytes, not 4."),
    ),
    "add payload, src_info and topk_info, each a multiple of 16.",
)
STRETCH = Number(
    256 // 8 * 8 * (4096 - 128) * 14368,
    "32 local experts x 8 src_ranks x 3968 more slots x 14368 bytes: 14.6 GB. That is why ranks exchange sizes before a large batch.",
    (
        (32 * 8 * 4096 * 14368, "this is the whole size. The question asks how much it grows."),
        (
            256 * 8 * (4096 - 128) * 14368,
            "that is what 8 ranks need. One rank has recv_buf for its 32 LOCAL experts only.",
        ),
        (32 * (4096 - 128) * 14368, "each of the 8 src_ranks has its own slots."),
        (32 * 8 * (4096 - 128) * 14336, "a message has 32 bytes beside its payload."),
        (14.6, "the answer is in bytes."),
    ),
    "multiply local experts, src_ranks, the slots added, and the bytes of a message (problem 1).",
)

#        n_ranks, n_experts, top_k, hidden, max_tokens
WORLDS = (
    (2, 4, 2, 8, 3),
    (4, 12, 3, 24, 5),
    (3, 9, 9, 16, 2),
    (8, 256, 8, 7168, 128),
    (1, 6, 6, 64, 7),
    (8, 256, 8, 7168, 4096),  # byte offsets beyond 32 bits
)


def judge(answer):
    """What was right; raises Wrong."""
    tried = 0
    for n_ranks, n_experts, top_k, hidden, max_tokens in WORLDS:
        experts = {0, 1, n_experts // n_ranks - 1, n_experts // n_ranks % n_experts, n_experts - 1}
        for expert, src, slot in product(sorted(experts), {0, n_ranks - 1}, {0, max_tokens - 1}):
            _one(answer, n_ranks, n_experts, top_k, hidden, max_tokens, expert, src, slot)
            tried += 1
    return (
        f"owner and offset are right in all {tried} places tried, among them messages with 9 experts, whose "
        "topk_info takes 32 bytes."
    )


def _align(n):
    return (n + 15) // 16 * 16


def _one(answer, n_ranks, n_experts, top_k, hidden, max_tokens, expert, src, slot):
    local = n_experts // n_ranks
    owner, le = expert // local, expert % local
    message = _align(2 * hidden) + 16 + _align(2 * top_k)

    def at(e=le, size=message):
        return ((e * n_ranks + src) * max_tokens + slot) * size

    right = at()
    arguments = n_ranks, n_experts, top_k, hidden, max_tokens, expert, src, slot
    got = call(answer, "place", *arguments)
    numbers = whole_numbers(got, "place")
    if numbers.shape != (2,):
        raise Wrong(f"place must return two numbers, (owner, offset), not {got!r}")
    got_owner, got_offset = numbers
    if got_owner == owner and got_offset == right:
        return
    names = ("n_ranks", "n_experts", "top_k", "hidden", "max_tokens", "expert", "src_rank", "slot")
    shown = f"place({', '.join(f'{n}={v}' for n, v in zip(names, arguments))}) gave {got_owner, got_offset}"
    if got_owner != owner:
        if got_owner == expert % n_ranks:
            raise Wrong(
                f"{shown}: experts are not assigned in turn (expert % n_ranks); the first "
                f"{local} are on rank 0, the next {local} on rank 1, and so on."
            )
        raise Wrong(f"{shown}: expert {expert} is on rank {owner}; each rank has {local} consecutive experts.")
    if (got_offset - right) % (1 << 32) == 0:
        raise Wrong(f"{shown}: the offset must be {right}; it has wrapped, since 32 bits do not hold it.")
    payload, ids = _align(2 * hidden), _align(2 * top_k)
    for looks, says in (
        (
            at(e=expert),
            "recv_buf has an axis of LOCAL experts, and this counts all experts; this one is local expert "
            f"{le} of its owner",
        ),
        (at(size=2 * hidden), "a message is more than its payload: src_info and topk_info follow"),
        (at(size=payload + 4 + 2 * top_k), "src_info and topk_info are padded to 16 bytes too"),
        (at(size=payload + 32), f"topk_info is as long as top_k={top_k} ids of 2 bytes need: {ids} bytes"),
        (at(size=_align(2 * hidden + 4 + 2 * top_k)), "each of the three parts is padded, not their sum"),
        (at(size=payload + 4 + ids), "src_info takes 16 bytes, though only 4 are used"),
        (at(size=payload + 16 + 2 * top_k), f"topk_info is padded too: {2 * top_k} bytes become {ids}"),
        (at(size=hidden + 16 + ids), "a bf16 number takes 2 bytes"),
        (at(size=_align(4 * hidden) + 16 + ids), "a bf16 number takes 2 bytes, not 4"),
        (at(size=1), "this counts messages; the question asks for bytes"),
        (
            ((src * local + le) * max_tokens + slot) * message,
            "the order of the axes is local expert, src_rank, slot: the local expert comes first",
        ),
        (
            ((le * max_tokens + slot) * n_ranks + src) * message,
            "the order of the axes is local expert, src_rank, slot: the slot is the last",
        ),
    ):
        if got_offset == looks:
            raise Wrong(f"{shown}: {says}.")
    raise Wrong(f"{shown}: the offset must be {right}, which is place {right // message} x {message} bytes a message.")
