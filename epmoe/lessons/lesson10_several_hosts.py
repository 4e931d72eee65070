"""Lesson 10: Several hosts: p2p worlds, puts, fences, one copy per host."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Until now every GPU could store into the memory of every other. That holds
# inside one host (or one NVLink domain): a p2p world. Between hosts there is
# a network. It is slower, it moves bytes by itself, and it keeps them in no
# order unless told to. This lesson is about what changes.
#
# ## Puts
#
# A GPU cannot store to a GPU of another host. It can ask its network card to
# copy bytes there: a put. The project uses NVSHMEM, whose four operations are
# enough for dispatch and combine:
#
#   shmem_put_nbi_warp(dst, src, nbytes, pe)   start to copy to rank pe
#   shmem_signal_set(word, value, pe)          set a word there
#   shmem_fence()     what I sent before arrives before what I send after
#   shmem_quiet()     wait until all I sent has arrived
#
# "nbi" says non-blocking: the call returns before anything has been copied.
# Memory must be symmetric, that is, allocated by all ranks together. Then an
# address of my own names the same place at every rank.
#
# The simulator has a network too. It delivers puts and signals at some later
# step, and in any order that NVSHMEM allows. Here rank 0 puts a message of 64
# bytes to rank 1 and signals it:

import numpy as np
from epmoe import RaceError, device
from epmoe.device import (kernel, lane_id, ld_acquire_sys_u64, load_i32,
                          load_u64, store_i32, u64)
from epmoe.device.shmem import (shmem_fence, shmem_put_nbi_warp,
                                shmem_quiet, shmem_signal_set)
from epmoe.lessons.telling import wrapped

OUTBOX, INBOX, FLAG, SEEN, BYTES = 0, 64, 128, 192, 64


def sending(between, after):
    """A kernel; between: put and signal, after: the signal."""
    @kernel
    def send(params, num_tokens, my_rank):
        own = load_u64(params + u64(8 * my_rank))
        inbox, outbox = own + u64(INBOX), own + u64(OUTBOX)
        if my_rank == 0:
            shmem_put_nbi_warp(inbox, outbox, BYTES, 1)
            between()
            if lane_id() == 0:
                shmem_signal_set(own + u64(FLAG), u64(1), 1)
            after(own)
        elif lane_id() == 0:
            while ld_acquire_sys_u64(own + u64(FLAG)) == 0:
                pass
            for i in range(BYTES // 4):
                seen = load_i32(inbox + u64(4 * i))
                store_i32(own + u64(SEEN + 4 * i), seen)

    return send


def nothing(*_):
    """In the place of an operation."""


def run(kern, seed, **options):
    """The 16 numbers that rank 1 has read; each should be 7."""
    machine = device.machine(2, seed=seed, **options)
    regions = [("outbox", OUTBOX, (16,), np.int32, ("number",)),
               ("inbox", INBOX, (16,), np.int32, ("number",)),
               ("flag", FLAG, (8,), np.uint64, ("word",)),
               ("seen", SEEN, (16,), np.int32, ("number",))]
    heap = [machine.alloc(256, "memory", r, regions=regions)
            for r in (0, 1)]
    places = machine.alloc(16, "addresses")
    machine.network.connect([b.address for b in heap], 256)
    try:
        for buffer in heap:
            buffer.fill(0)
        heap[0].write(np.full(16, 7, np.int32), OUTBOX)
        places.write(np.array([b.address for b in heap], np.uint64))
        for rank in (0, 1):
            machine.launch(kern, 1, 32, (places.address, 0, rank),
                           stream=machine.stream(rank))
        machine.synchronize()
        return heap[1].read(np.int32, 16, SEEN)
    finally:
        machine.network.disconnect([b.address for b in heap])
        for buffer in (*heap, places):
            buffer.free()


def wrong(kern):
    """After how many of 40 schedules rank 1 has read another number."""
    return sum((run(kern, seed) != 7).any() for seed in range(40))

# Predict: 40 schedules, nothing between put and signal. How often is the
# message incomplete when the signal has come?

late = wrong(sending(nothing, nothing))
print(f"{late} of 40 messages were read before they were there")
assert late > 0

# On NVLink the flag of lesson 4 could not overtake the message, once it was a
# release. The network does not order them: put and signal are two separate
# requests to a network card.
#
# ## Fence and quiet
#
# shmem_fence orders what this THREAD has sent to a rank. A put of a warp is
# done by its 32 lanes, each of which sends a part. If lane 0 alone fences, it
# orders its own part:

def fence_of_lane_0():
    """Only the lane that signals."""
    if lane_id() == 0:
        shmem_fence()


def quiet_of_all():
    """Each lane waits for its part, then all meet."""
    shmem_quiet()
    device.syncwarp()


for name, between in (("fence of lane 0", fence_of_lane_0),
                      ("quiet of all lanes", quiet_of_all)):
    late = wrong(sending(between, nothing))
    print(f"{name}: {late} of 40 incomplete")
    assert (late == 0) == (between is quiet_of_all)

# The race detector sees it under every schedule, harmful or not:

try:
    run(sending(fence_of_lane_0, nothing), seed=0, racecheck=True)
    raise AssertionError("no race?")
except RaceError as race:
    print(wrapped(race))

# The kernels of this project do both. A warp calls quiet after its puts, and
# only then counts its messages as finished. The thread that signals acquires
# this count, calls shmem_fence, and sends one signal for each segment.
#
# ## The outbox
#
# Quiet does a second thing. A put reads its source when the card gets to it.
# Whoever writes there too early sends something else:

def overwrite(own):
    """The next message, written into the same outbox."""
    if lane_id() == 0:
        store_i32(own + u64(OUTBOX), 8)


def fence_and_overwrite():
    """The order of put and signal only, by all lanes."""
    shmem_fence()
    device.syncwarp()


spoilt = wrong(sending(fence_and_overwrite, overwrite))
print(f"outbox written again at once: {spoilt} of 40 wrong")
assert spoilt > 0
assert wrong(sending(quiet_of_all, overwrite)) == 0
print("the same after a quiet: 0 of 40 wrong")

# ## The whole layer across two p2p worlds
#
# Four ranks, two on each host. Messages inside a host are stores, the others
# are puts. The results are the same to the bit:

import ml_dtypes
from epmoe import EPConfig, ExpertParallel, LocalWorld

rng = np.random.default_rng(10)
sizes = dict(n_ranks=4, n_experts=8, top_k=3, hidden=16,
             max_tokens_per_rank=4)
x = [rng.integers(-3, 4, (4, 16)).astype(ml_dtypes.bfloat16)
     for _ in range(4)]
ids = [np.array([rng.permutation(8)[:3] for _ in range(4)])
       for _ in range(4)]
ones = [np.ones((4, 3), np.float32)] * 4
outs = []
for more in ({}, dict(p2p_world_size=2, use_shmem=True)):
    cfg = EPConfig(**sizes, **more)
    with ExpertParallel(cfg, LocalWorld(4, seed=0)) as ep:
        d = ep.dispatch(x, ids)
        outs.append(ep.combine([r.output_tokens for r in d], d, ones))
assert all((a == b).all() for a, b in zip(*outs))
print("one p2p world and two: the same bytes")

# ## Bytes
#
# A GPU has about 360 GB/s of NVLink on the machine of lesson 6, and a network
# card of 400 Gbit/s, that is 50 GB/s. So across hosts a byte costs 7 times as
# much. What crosses the network decides, and there are three ways to count:
#
#   pairs        one copy for each (token, k) on another host
#   rows         one copy for each (token, rank) on another host
#   per host     one copy for each (token, host); a GPU of that host passes it
#                on to the others over NVLink
#
# Predict: 4 hosts of 8 GPUs, 256 experts, top 8, all alike. How many copies
# of a token cross the network in each of the three ways?

from math import comb


def copies(n_groups, groups_away, top_k=8, n_experts=256):
    """How many of the groups that are away a token visits on average."""
    each = n_experts // n_groups
    missed = comb(n_experts - each, top_k) / comb(n_experts, top_k)
    return groups_away * (1 - missed)


for hosts in (2, 4, 8):
    gpus = 8 * hosts
    pairs = 8 * (hosts - 1) / hosts
    rows = copies(gpus, gpus - 8)
    per_host = copies(hosts, hosts - 1)
    print(f"{hosts} hosts: pairs {pairs:.2f}, rows {rows:.2f}, "
          f"per host {per_host:.2f}")
    assert per_host < rows < pairs

# One copy per host saves a factor of 1.5 to 4. It costs a forwarding step on
# the GPU that receives, with its own buffers and signals. This project sends
# messages to each rank. Its kernels have no forwarding.
#
# Routers can help. DeepSeek-V3 lets a token choose experts on at most 4 of
# its 8 hosts, so at most 4 copies cross.

TOKENS, ROW = 4096, 14336
for name, n in (("pairs", 8 * 3 / 4), ("rows", copies(32, 24)),
                ("per host", copies(4, 3))):
    us = TOKENS * n * ROW / 50e3
    print(f"4 hosts, 4096 tokens, {name:8}: network floor {us:6.0f} us")

# For 4096 tokens on one host of 4 GPUs the floor of pairs in lesson 6 was 983
# microseconds.
#
# ## A host may be slow
#
# With more hosts, more can fail. A rank that never sends would let all
# others wait for ever, so here as everywhere each wait has a time limit, and
# `PeerTimeout` names the rank that is missing (lesson 5).
#
# ## Worked problems
#
# 1. A token of rank 0 has experts on ranks 1, 8, 8, 9 and 20 (two of them on
#    rank 8). A host has 8 ranks. How many copies cross the network as pairs,
#    as rows, and one per host?
#
# Answer: Ranks 8 and 9 are on host 1, rank 20 is on host 2. Pairs: 4. Rows:
# 3, for ranks 8, 9 and 20. Per host: 2.

away = [r for r in (1, 8, 8, 9, 20) if r // 8 != 0]
assert [len(away), len(set(away)), len({r // 8 for r in away})] == [4, 3, 2]

# 2. A message of 14336 bytes crosses the network at 50 GB/s after 2 us. When
#    does a signal arrive that is sent after a quiet?
#
# Answer: The message needs 2 + 0.29 us, its confirmation 2 us more, then the
# signal 2 us: 6.3 us. With a fence it would arrive right after the message.

assert round(2 + 14336 / 50e3 + 2 + 2, 1) == 6.3

# 3. 32 segments of 4 messages go to another host. Compare a quiet for each
#    segment with one quiet for all, 4 us each.
#
# Answer: 128 us against 4 us. The first way signals the first segments
# earlier, but the receiver waits for all of them anyway.

assert 32 * 4 == 128

# 4. 2 hosts, 4096 tokens a rank, top 8, one copy per host, 14336 bytes a row,
#    50 GB/s. What is the floor of the network?
#
# Answer: A token misses the other host with probability C(128, 8) / C(256, 8)
# = 0.003, so nearly every token crosses once: 4096 x 0.997 x 14336 / 50 GB/s
# = 1170 us.

assert round(4096 * copies(2, 1) * 14336 / 50e3) == 1170

# ## Exercises
#
# WARM-UP. Hosts of 8 ranks. A token of rank 2 has experts on ranks 0, 5, 9,
# 11, 11, 12, 30 and 31 (two of them on rank 11). How many copies cross the
# network with one copy per host? Set WARM_UP.
#
# CORE. Write the floors of the network, in microseconds:
#
#   network_floors(topk_ids, n_ranks, n_experts, ranks_per_host, row_bytes,
#                  net_gbps)
#
# Return three numbers: for pairs, for rows, and for one copy per host. Each
# rank has a network card of its own, net_gbps 10**9 bytes a second out and as
# much in, at the same time. The busiest way of any card counts. topk_ids is a
# list over ranks of integer arrays (tokens, top_k); -1 means no expert. The
# rank with local number i on its host sends its copy per host to the rank
# with local number i on the other host. NVLink is not counted.
#
# STRETCH. 4 hosts of 8 GPUs, 256 experts, top 8. The router first picks 2 of
# the 4 hosts, all alike; the token's own host may be one of them. Then it
# picks 8 different experts on these two hosts, all alike. How many copies of
# a token cross the network on average, one per host? Set STRETCH, to 4 digits
# at least.
