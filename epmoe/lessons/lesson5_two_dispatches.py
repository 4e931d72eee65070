"""Lesson 5: Why two dispatches in a row break, and what a hang is."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# With the signals of lesson 4 one exchange is right. But a model has a
# hundred layers, and runs for days on the same buffers. This lesson is about
# the second exchange.
#
# ## A round
#
# There are two ranks, and each has one mailbox: a message, and a word that is
# 0 until something has arrived. (In dispatch the word is recv_count, and "not
# arrived" is 2**64 - 1, because 0 is a possible count.) In a round, each rank
# writes to its peer's mailbox and sets the peer's word with release. Then it
# polls its own word with acquire, reads the message, and resets its own word
# to 0 for the next round. The second half, `answers`, is for later.

from collections import Counter

import numpy as np
from epmoe import DeadlockError, device
from epmoe.device import (block_idx, kernel, ld_acquire_sys_i32, load_i32,
                          load_u64, st_relaxed_sys_i32, st_release_sys_i32,
                          store_i32, u64)
from epmoe.lessons.telling import wrapped

MESSAGE, WORD, ANSWER, GOT = 0, 4, 8, 64        # in a rank's memory


def rounds(n_rounds, answers):
    """A kernel of dispatches; answers: with a combine after each."""
    @kernel
    def exchange(params, num_tokens, my_rank):
        own = load_u64(params + u64(8 * my_rank))
        peer = load_u64(params + u64(8 * (1 - my_rank)))
        for i in range(1, n_rounds + 1):
            store_i32(peer + u64(MESSAGE), i)               # dispatch_async
            st_release_sys_i32(peer + u64(WORD), 1)
            while ld_acquire_sys_i32(own + u64(WORD)) == 0:  # dispatch_wait
                pass
            store_i32(own + u64(GOT + 4 * i), load_i32(own + u64(MESSAGE)))
            st_relaxed_sys_i32(own + u64(WORD), 0)
            if answers:
                st_release_sys_i32(peer + u64(ANSWER), 1)   # combine_async
                while ld_acquire_sys_i32(own + u64(ANSWER)) == 0:
                    pass                                    # combine_wait
                st_relaxed_sys_i32(own + u64(ANSWER), 0)

    return exchange


def run(kern, n_rounds, seed, **options):
    """The messages that ranks 0 and 1 got, in order, under one schedule."""
    machine = device.machine(2, seed=seed, **options)
    regions = [("mailbox", 0, (3,), np.int32, ("word",)),
               ("got", GOT, (16,), np.int32, ("round",))]
    boxes = [machine.alloc(128, "memory", r, regions=regions)
             for r in (0, 1)]
    addresses = machine.alloc(16, "addresses")
    try:
        addresses.write(np.array([b.address for b in boxes], np.uint64))
        for box in boxes:
            box.fill(0)
        for rank in (0, 1):
            machine.launch(kern, 1, 1, (addresses.address, 0, rank),
                           stream=machine.stream(rank))
        machine.synchronize()
        return [b.read(np.int32, n_rounds, GOT + 4).tolist() for b in boxes]
    finally:
        for b in (*boxes, addresses):
            b.free()


# One round, under 20 schedules:

one = rounds(1, answers=False)
assert all(run(one, 1, seed) == [[1], [1]] for seed in range(20))
assert all(run(one, 1, seed, racecheck=True) for seed in range(10))
print("one round: both got message 1, 20 times; no race")

# ## Two rounds in a row
#
# Round i carries the number i, so each rank should get [1, 2].
#
# Predict: 80 schedules. How many end right, how many wrong, how many hang?

two = rounds(2, answers=False)
outcomes, hang = Counter(), ""
for seed in range(80):
    try:
        got = run(two, 2, seed)
        right = got == [[1, 2], [1, 2]]
        outcomes["right" if right else f"wrong: {got}"] += 1
    except DeadlockError as error:
        outcomes["hang"] += 1
        hang = str(error)
for what, times in outcomes.most_common():
    print(f"{times:4} times {what}")
assert outcomes["right"] and outcomes["hang"] and len(outcomes) > 2

# One bug has three different outcomes. No rank is slower on purpose. The
# schedule alone decides.
#
# A wrong result, for instance [2, 2]: rank 0 was quick. It had received its
# message of round 1, so it went on. Its message of round 2 overwrote its
# message of round 1, which rank 1 had not read yet.
#
# A hang: one rank signalled round 2 before the other had reset its word of
# round 1. Then the other reset the word, and erased the new signal, which is
# never sent again:

print(wrapped(hang))

# In the simulator a hang is a report, which lists what each thread waits for.
# On a GPU nothing happens any more.
#
# ## The cure costs nothing
#
# The sender needs an answer from the receiver: "I have read it". In a
# Mixture-of-Experts layer this answer comes anyway, because combine follows
# dispatch. Rank 1 sends the expert's results back, and it cannot have them
# before it has read the message. Once you have everyone's combine i, everyone
# is finished with dispatch i. If the two strictly alternate, dispatch guards
# combine's buffer in the same way. No barrier (a place where each rank waits
# until all have come) is ever needed:

guarded = rounds(4, answers=True)
for seed in range(20):
    assert run(guarded, 4, seed) == [[1, 2, 3, 4]] * 2
    run(guarded, 4, seed, racecheck=True)
print("4 rounds with answers: right 20 times, and no race")

# ## The real kernels
#
# ExpertParallel enforces this rule. It refuses the second dispatch:

import ml_dtypes
from epmoe import EPConfig, EPStateError, ExpertParallel, LocalWorld

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8,
               max_tokens_per_rank=4)
x = [np.ones((4, 8), ml_dtypes.bfloat16)] * 2
ids = [np.array([[0, 2], [1, 3], [2, 1], [3, 0]])] * 2
with ExpertParallel(cfg, LocalWorld(2, seed=0), kernels="plain") as ep:
    before = {name: ep.region(name, 0) for name in
              ("dispatch_recv_count", "reserved", "finished", "A")}
    d = ep.dispatch(x, ids)
    try:
        ep.dispatch(x, ids)
        raise AssertionError("not refused")
    except EPStateError as error:
        print(wrapped(error))
    ep.combine([of_rank.output_tokens for of_rank in d], d,
               [np.ones((4, 2), np.float32)] * 2)
    for name, held in before.items():
        assert (ep.region(name, 0) == held).all()
print("after a round as before:", ", ".join(before))

# (The kernels reset the words themselves. If the host had to clear counters
# between two rounds, this would cost more than the round.)
#
# What would happen if it did not refuse? Here the same kernels are launched
# without ExpertParallel, and combine is left out:

from epmoe.lessons.two_dispatches import outcome

for n_dispatches in (1, 2):
    seen = Counter(outcome(n_dispatches, seed, racecheck=False)[0]
                   for seed in range(6))
    print(f"{n_dispatches} in a row, 6 schedules:", dict(seen))
assert seen["hang"] > 0

# Now under the race detector. It stops at the first race, before it can do
# harm, and finds it even in a schedule that would have ended well:

reports = [outcome(2, seed) for seed in range(4)]
print(dict(Counter(how for how, _ in reports)))
for how, text in reports:
    if how == "race":
        print(wrapped(text.partition("\n")[0]))

# ## When a peer never arrives
#
# Not every hang is a fault of the protocol. A rank may have died, or may run
# a different number of rounds. So no wait in this project is endless. Each
# has a time limit, measured by the device's clock. Here rank 1 never sends.

from epmoe import PeerTimeout
from epmoe.lessons.silent_rank import all_but

world = LocalWorld(2, seed=0, expire_waits=True)
with ExpertParallel(cfg, world, _factories=all_but(1), fused=False,
                    timeout=0.5) as ep:
    try:
        ep.dispatch(x, ids)
        raise AssertionError("no timeout")
    except PeerTimeout as error:
        print(wrapped(error))

# The error says which rank waits, for which rank, and for what. After it,
# reset() recovers.
#
# ## When a block never starts
#
# The last kind of hang needs only one GPU. Its multiprocessors run the blocks,
# and each holds only a few at a time. Blocks of a launch may wait for each
# other only if all of them are on the GPU at once: they are resident. If a
# launch has more blocks than fit, some start only when others end. But the
# others wait for them, and never end:
#
# Predict: Two blocks wait for block 1. What happens if the GPU has room for
# one block at a time?


@kernel
def wait_for_block_1(params, num_tokens, my_rank):
    """Block 1 raises a flag; all blocks wait until it is up."""
    if block_idx() == 1:
        st_release_sys_i32(params, 1)
    while ld_acquire_sys_i32(params) == 0:
        pass


def two_blocks(**options):
    """Launch the kernel with two blocks; returns when both have ended."""
    machine = device.machine(1, seed=0, **options)
    memory = machine.alloc(4, "flag")
    memory.fill(0)
    try:
        machine.launch(wait_for_block_1, 2, 1, (memory.address, 0, 0),
                       stream=machine.stream(0))
        machine.synchronize()
    finally:
        memory.free()


two_blocks()
print("room for both blocks: fine")
try:
    two_blocks(resident_limit=1)
    raise AssertionError("no hang")
except DeadlockError as error:
    print(wrapped(error))

# So no kernel here has more blocks than fit on the GPU at once. A larger grid
# is refused before it is launched.
#
# ## Worked problems
#
# 1. A word could count rounds instead of going back to 0. A round takes 20
#    us. After which time does a signed word of 32 bits overflow?
#
# Answer: After 2**31 x 20 us = 42950 s, 11.9 hours. A model that serves
# requests runs longer.

assert round(2**31 * 20e-6 / 3600, 1) == 11.9

# 2. 58 layers, one barrier after each dispatch and one after each combine, 10
#    us each. What do they add to a step of 20 ms?
#
# Answer: 116 barriers x 10 us = 1.16 ms, 5.8 % of the step.

assert 58 * 2 * 10 == 1160 and round(1160 / 20_000, 3) == 0.058

# 3. Rounds with answers, as in `guarded`. Rank 0 has just sent dispatch 7. By
#    how many dispatches can rank 1 be behind, at most?
#
# Answer: By one. Rank 0 has received combine 6 of rank 1, so rank 1 has
# finished waiting for dispatch 6.

assert 7 - 6 == 1

# 4. A wait polls every 0.5 us, and its time limit is 30 s. How many times
#    does it look before it gives up?
#
# Answer: 60 million times. The limit must be long: a peer that compiles is
# not dead.

assert round(30 / 0.5e-6) == 60_000_000

# ## Exercises
#
# WARM-UP. A GPU has 132 multiprocessors, and each holds 2 blocks of this
# kernel. Blocks wait for each other. There is work for 300 blocks. How many
# blocks may the grid have? Set WARM_UP.
#
# CORE. A program does ONLY dispatches, no combine, for `rounds` rounds. All
# ranks run the same list of steps, each at its own pace. Now every rank has
# TWO buffers, 0 and 1, each with a mailbox for every peer. These are the
# steps:
#
#   "send 0", "send 1"    write this round's message into that buffer of every
#                         peer, and signal it
#   "wait 0", "wait 1"    wait until all peers have signalled that buffer of
#                         this rank, read the messages, reset the words
#   "barrier"             wait until all ranks have reached this barrier
#
# Write program(rounds), which returns the list. Each round is sent once and
# waited for once, in order. No message may be overwritten before it is read,
# no signal may be lost, and no rank may wait for ever. Barriers are slow: can
# you do without them? The judge tries every order in which ranks can take
# their steps, and shows the shortest one that does harm.
#
# STRETCH. A program sends one round ahead: send 0, then for every round send
# i + 1 and wait i. It takes its buffers in turn and has no barrier. How many
# buffers does it need? Set STRETCH.
