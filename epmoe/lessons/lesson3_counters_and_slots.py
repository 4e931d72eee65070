"""Lesson 3: Counters and slots, and why they must be atomic."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Rank 0 sends its tokens for one expert of rank 1. Their places on rank 1 are
# slots 0, 1, 2, ... of recv_buf[local_expert][0]. Which message gets which
# slot? A person with a pencil would keep a counter: read it, take that slot,
# write down one more. On a GPU thousands of threads do this at the same time.
#
# ## A kernel
#
# Kernels in this project are written in the intrinsics of epmoe.device.
# load_i32 loads 32 bits from an address, and store_i32 stores them. On a GPU
# each is one machine instruction. Here the same source runs under a
# simulator, which executes one intrinsic of one thread at a time. A seed
# determines this order, the schedule, so a failure with seed 3 comes again.
#
# A kernel runs in many threads. They form blocks. 32 threads of a block are a
# warp, and a thread's place in its warp is its lane. block_idx() is the number
# of a thread's block. Every kernel gets three arguments; here only the first
# matters, params, the address of the memory. (docs/glossary.md has all terms.)
#
# There are eight blocks of one thread each. Each claims four slots:

import numpy as np
from epmoe import device
from epmoe.device import (atomic_add_relaxed_gpu_i32, block_idx, kernel,
                          ld_acquire_gpu_i32, load_i32,
                          red_add_release_gpu_i32, store_i32, u64)

BLOCKS, CLAIMS = 8, 4
COUNTER, SLOTS = 0, 256             # bytes from `params`


@kernel
def with_a_pencil(params, num_tokens, my_rank):
    """Every block claims CLAIMS slots and writes down which ones it got."""
    for i in range(CLAIMS):
        slot = load_i32(params + u64(COUNTER))
        store_i32(params + u64(COUNTER), slot + 1)
        mine = params + u64(SLOTS + 4 * (block_idx() * CLAIMS + i))
        store_i32(mine, slot)


# The host needs a machine of one rank, some memory, and a launch. The list of
# regions names parts of the memory, for reports.


def run(kern, seed, blocks=BLOCKS, **options):
    """The slots that each block got, (BLOCKS, CLAIMS), in one schedule."""
    machine = device.machine(1, seed=seed, **options)
    memory = machine.alloc(2048, "memory", regions=[
        ("counter", COUNTER, (2,), np.int32, ("number",)),
        ("slots", SLOTS, (64,), np.int32, ("claim",))])
    memory.fill(0)
    try:
        machine.launch(kern, blocks, 1, (memory.address, 0, 0),
                       stream=machine.stream(0))
        machine.synchronize()
        return memory.read(np.int32, (BLOCKS, CLAIMS), SLOTS)
    finally:
        memory.free()

# Predict: 32 claims under each of 8 schedules. Will they ever get 32
# different slots?

lost = []
for seed in range(8):
    slots = run(with_a_pencil, seed)
    different = len(np.unique(slots))
    lost.append(slots.size - different)
    print(f"seed {seed}: {slots.size} claims, {different} different slots")
assert max(lost) > 0

# If two tokens get one slot, one of them is lost, and nothing crashes. Some
# schedules happen to interleave nothing, and then all is well. That is worse:
# the tests pass, and the bug waits.
#
# ## What happened
#
# Between one thread's load and its store another thread loaded the same
# number. The simulator can look for this, even if it did no harm in this run.
# It follows the rules of GPU memory (the PTX memory model), and reports two
# accesses if neither is ordered before the other:

from epmoe import RaceError
from epmoe.lessons.telling import wrapped

try:
    run(with_a_pencil, seed=0, racecheck=True)
    raise AssertionError("no race?")
except RaceError as race:
    print(wrapped(race))

# ## One instruction
#
# The cure is an instruction that does all three steps as one: an atomic add,
# which returns the old number.


@kernel
def with_an_atomic(params, num_tokens, my_rank):
    """The same, but reading and adding are one operation."""
    for i in range(CLAIMS):
        slot = atomic_add_relaxed_gpu_i32(params + u64(COUNTER), 1)
        mine = params + u64(SLOTS + 4 * (block_idx() * CLAIMS + i))
        store_i32(mine, slot)


for seed in range(20):
    slots = run(with_an_atomic, seed, racecheck=True)
    assert sorted(slots.flat) == list(range(BLOCKS * CLAIMS))
print("20 schedules: all slots different, no gap, no race")

# Its name says more. "relaxed" means that it promises nothing about other
# memory (see lesson 4). "gpu" means that it is atomic among the threads of
# this GPU. This is enough, because only this rank claims slots in its part of
# a peer's buffer. So the counter is in this rank's own memory, and no claim
# crosses a link.
#
# ## An atomic gives no order
#
# Here are the slots of the first blocks, under two schedules:

for seed in (0, 1):
    slots = run(with_an_atomic, seed).tolist()
    print(f"seed {seed}: block 0 got {slots[0]}, block 1 got {slots[1]}")
assert (run(with_an_atomic, 0) != run(with_an_atomic, 1)).any()

# So after dispatch, the rows from one rank for one expert may be in any
# order, and the order changes from run to run. The specification allows this:
# the order within an (expert, src_rank) segment is free. To compare two
# results, the project sorts both into one "canonical" order. Here are the
# real kernels:

import ml_dtypes
import epmoe_ref
from epmoe import EPConfig, ExpertParallel, LocalWorld

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8,
               max_tokens_per_rank=6)
x = [np.tile(np.arange(6)[:, None] + 10 * r, 8).astype(ml_dtypes.bfloat16)
     for r in (0, 1)]
ids = [np.array([[0, 2], [0, 1], [3, 0], [0, 2], [1, 0], [0, 3]])] * 2
held, canonical = [], []
for seed in (0, 1):
    world = LocalWorld(2, seed=seed)
    with ExpertParallel(cfg, world, kernels="plain") as ep:
        d = ep.dispatch(x, ids)[0].trimmed().numpy()
    held.append(d.src_info[:6, 0])
    print(f"seed {seed}: expert 0 of rank 0 holds {held[-1]} of rank 0")
    canonical.append(epmoe_ref.canonical(d))
assert (held[0] != held[1]).any()
assert (canonical[0].src_info == canonical[1].src_info).all()
assert (canonical[0].output_tokens == canonical[1].output_tokens).all()

# ## Claimed is not written
#
# There is a second trap. A block claims a slot and THEN writes its message.
# Suppose that another block waits until the counter says that all slots are
# claimed:

def messages(counts_claims):
    """A kernel that reads messages once all are claimed, or finished."""
    @kernel
    def send_and_look(params, num_tokens, my_rank):
        claimed, finished = params + u64(COUNTER), params + u64(COUNTER + 4)
        message = params + u64(SLOTS)
        if block_idx() > 0:
            slot = atomic_add_relaxed_gpu_i32(claimed, 1)
            store_i32(message + u64(4 * slot), 40 + slot)
            red_add_release_gpu_i32(finished, 1)
            return
        counter = claimed if counts_claims else finished
        while ld_acquire_gpu_i32(counter) < BLOCKS - 1:
            pass
        for slot in range(BLOCKS - 1):      # copy what is there
            seen = load_i32(message + u64(4 * slot))
            store_i32(message + u64(4 * (BLOCKS + slot)), seen)

    return send_and_look

# Predict: 7 messages under each of 100 schedules. How many of the 700 will be
# read too early when the reader waits for `claimed`?

for name, counts_claims in (("claimed", True), ("finished", False)):
    missing = 0
    for seed in range(100):
        seen = run(messages(counts_claims), seed).reshape(-1)
        missing += (seen[BLOCKS:2 * BLOCKS - 1] == 0).sum()
    print(f"waiting for {name}: {missing} messages read before written")
    assert (missing > 0) == counts_claims

# This is why the protocol has two counters for each (local expert, dst_rank).
# `reserved` hands out slots, and `finished` counts completely written
# messages. Only `finished` may be waited for. It uses "release" and
# "acquire", which lesson 4 explains.
#
# Here are both in the real kernels, between the halves of a dispatch. Rank 0
# has sent everything, so both counters hold the count of each (local expert,
# dst_rank). dispatch_wait resets them to 0 for the next round.

with ExpertParallel(cfg, LocalWorld(2, seed=0), kernels="plain") as ep:
    ep.dispatch_async(x, ids)
    sent = {name: ep.region(name, 0) for name in ("reserved", "finished")}
    ep.dispatch_wait()
    after = [ep.region(name, 0) for name in sent]
counts = np.bincount(ids[0].ravel(), minlength=4).reshape(2, 2).T
for name, held in sent.items():
    print(f"{name} of rank 0, local experts down, ranks across:\n{held}")
    assert (held.reshape(2, 2) == counts).all()
assert not np.any(after)
#
# ## Another way
#
# Slots can be found without atomics, by reading the ids twice:
#
#   1. Every block counts how many of its pairs go to each expert.
#   2. For each expert, a block's first slot is the sum of the counts of all
#      blocks before it (an "exclusive prefix sum").
#   3. Every block numbers its own pairs, starting at its first slot.
#
# All blocks must finish counting before any goes on, so they wait for each
# other in between. In return, every run gives the same slots.
#
# ## Worked problems
#
# 1. Two threads each claim once with the pencil: load, then store. In how
#    many of the possible orders of these four steps do both get the same
#    slot?
#
# Answer: There are 6 orders. In 2 of them one thread ends before the other
# begins. In the other 4 both load before either stores.

from itertools import permutations

orders = set(permutations("AABB"))
whole = [o for o in orders if o[0] == o[1]]
assert len(orders) == 6 and len(whole) == 2

# 2. Blocks 0 to 2 have 2, 5 and 1 pairs for an expert. At which slots do they
#    begin?
#
# Answer: At 0, 2 and 7: each begins after the pairs of the blocks before it.

assert (np.cumsum([2, 5, 1]) - [2, 5, 1]).tolist() == [0, 2, 7]

# 3. 128 tokens with 8 experts each out of 256. How many atomic additions does
#    dispatch make on `reserved`, and how many hit one counter on average?
#
# Answer: One for each pair, 1024. There are 256 counters, so each gets 4.
# That few threads meet at one counter is why atomics are affordable here.

assert 128 * 8 == 1024 and 1024 // 256 == 4

# 4. A segment has n = 4 messages. In how many orders may they lie in
#    recv_buf?
#
# Answer: In 4! = 24. All of them are right, and all have the same canonical
# form.

from math import factorial

assert factorial(4) == 24

# ## Exercises
#
# WARM-UP. Blocks 0 to 3 have 4, 0, 3 and 5 pairs for an expert. What is the
# first slot of block 3? Set WARM_UP.
#
# CORE. Write steps 2 and 3 in NumPy (loops are fine).
#
#   first_slots(counts)      counts[block][expert], a NumPy array. Returns an
#                            array of the same shape: the first slot of this
#                            block for this expert.
#   own_slots(experts, first)
#                            for one block. experts: a list of the expert ids
#                            of its pairs in order, -1 where there is no
#                            expert. first: its line of first_slots(counts).
#                            Returns a list: the slot of each pair, -1 for -1.
#
# Together they must number the pairs of each expert 0, 1, 2, ... in the order
# of blocks, and within a block in the order of its pairs.
#
# STRETCH. Two threads each claim 10 times with the pencil. All 20 loads and
# 20 stores may take turns in any order. The counter begins at 0. What is the
# smallest number that it can hold at the end? Set STRETCH.
