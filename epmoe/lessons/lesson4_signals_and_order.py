"""Lesson 4: Signals and memory order: remove a fence, read the report."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Rank 0 stores a message into the memory of rank 1, and then a flag next to
# it: "ready". Rank 1 polls the flag, then reads the message. It looks as if
# nothing could go wrong. Almost everything can, and this is the heart of the
# matter.
#
# ## The message and the flag
#
# This lesson runs many versions of one small program. `write` and `flag_up`
# are the two stores of rank 0, `look` and `read` the two loads of rank 1.

import numpy as np
from epmoe import RaceError, device
from epmoe.device import (block_idx, fence_acq_rel_sys, kernel,
                          ld_acquire_gpu_i32, ld_acquire_sys_i32,
                          ld_relaxed_gpu_i32, ld_relaxed_sys_i32, load_i32,
                          red_add_release_gpu_i32, st_relaxed_sys_i32,
                          st_release_gpu_i32, st_release_sys_i32, store_i32,
                          u64)
from epmoe.lessons.telling import wrapped

MESSAGE, FLAG, SEEN = 0, 64, 128    # bytes from `params`


def passing(write, flag_up, look, read):
    """A kernel made of four operations on addresses."""
    @kernel
    def pass_a_message(params, num_tokens, my_rank):
        if my_rank == 0:
            write(params + u64(MESSAGE), 42)
            flag_up(params + u64(FLAG), 1)
        else:
            while look(params + u64(FLAG)) == 0:
                pass
            store_i32(params + u64(SEEN), read(params + u64(MESSAGE)))

    return pass_a_message


# There are two ranks with one block each. The memory belongs to rank 1.


def run(kern, seed, blocks=1, **options):
    """The number that rank 1 read, under one schedule."""
    machine = device.machine(2, seed=seed, **options)
    memory = machine.alloc(256, "memory", rank=1, regions=[
        ("message", MESSAGE, (4,), np.int32, ("number",)),
        ("flag", FLAG, (2,), np.int32, ("number",)),
        ("seen", SEEN, (1,), np.int32, ("number",))])
    memory.fill(0)
    try:
        for rank in (0, 1):
            machine.launch(kern, blocks, 1, (memory.address, 0, rank),
                           stream=machine.stream(rank))
        machine.synchronize()
        return int(memory.read(np.int32, 1, SEEN)[0])
    finally:
        memory.free()


def race(kern, **options):
    """The report of the first race under 8 schedules, as text."""
    for seed in range(8):
        try:
            run(kern, seed, racecheck=True, **options)
        except RaceError as report:
            return str(report)
    return "no race under 8 schedules"


# ## Old news
#
# An access like st_relaxed_sys_i32 is strong: other threads may read the place
# while it is written. They see the old or the new number and nothing else. (A
# plain store_i32 does not even promise that.) Make all four relaxed:
#
# Predict: 30 schedules. How often will rank 1 read the old number?

relaxed = passing(st_relaxed_sys_i32, st_relaxed_sys_i32,
                  ld_relaxed_sys_i32, ld_relaxed_sys_i32)
seen = [run(relaxed, seed) for seed in range(30)]
print(wrapped(f"rank 1 read {seen}"))
assert set(seen) == {42}

# This was right 30 times. But the simulator is kinder than a GPU: its stores
# take effect in program order. The memory model of GPUs does not promise
# this. The two stores may travel separately through the machine, and the flag
# may arrive first. With stale=True the simulator uses this freedom: a load
# may return any older number that the rules permit.

seen = [run(relaxed, seed, stale=True) for seed in range(30)]
print(wrapped(f"rank 1 read {seen}"))
assert set(seen) == {0, 42}

# The flag is up, and the message is not there.
#
# ## Release and acquire
#
# The remedy has two halves, a release store and an acquire load. If the load
# reads the number that the store wrote, then everything that the writer did
# before the store is visible to the reader after the load. One half alone
# does nothing.
#
# Predict: both halves, release alone, acquire alone. Which of them let rank 1
# read the old number?

ordered = passing(st_relaxed_sys_i32, st_release_sys_i32,
                  ld_acquire_sys_i32, ld_relaxed_sys_i32)
release = passing(st_relaxed_sys_i32, st_release_sys_i32,
                  ld_relaxed_sys_i32, ld_relaxed_sys_i32)
acquire = passing(st_relaxed_sys_i32, st_relaxed_sys_i32,
                  ld_acquire_sys_i32, ld_relaxed_sys_i32)
for name, kern in (("both halves", ordered), ("release alone", release),
                   ("acquire alone", acquire)):
    seen = [run(kern, seed, stale=True) for seed in range(50)]
    print(f"{name}: {seen.count(0)} of 50 read the old number")
    assert (0 in seen) == (kern is not ordered)

# ## The race report
#
# Real messages are written by plain stores, 16 bytes at a time, because these
# are fast. Plain accesses of two threads to one place must be ordered.
# Otherwise they are a data race, and their outcome is undefined. A race can
# happen without any wrong value, so tests of values cannot find it. The race
# detector can. It records which thread has acquired what from which other
# thread. Here the flag is relaxed:

report = race(passing(store_i32, st_relaxed_sys_i32,
                      ld_acquire_sys_i32, load_i32))
print(wrapped(report))
assert "data race on message" in report and "the write is relaxed" in report

# How to read it: the first line gives the place, and says which accesses are
# not ordered. 1 and 2 are these accesses, with their lines in this file. Then
# comes the missing synchronisation. Last comes the pair that almost ordered
# them: the load read the number of the store, but the store is relaxed.
#
# With both halves there is no report:

report = race(passing(store_i32, st_release_sys_i32,
                      ld_acquire_sys_i32, load_i32))
print(report)
assert report.startswith("no race")

# ## A fence, and no fence
#
# A fence is a separate instruction that makes order. A fence before relaxed
# stores turns all of them into releases. A fence after a relaxed load turns
# it into an acquire. So one fence can serve many signals.


def fenced(with_fence):
    """The kernel with a relaxed flag, with or without a fence before it."""
    def flag_up(address, value):
        if with_fence:
            fence_acq_rel_sys()
        st_relaxed_sys_i32(address, value)

    return passing(store_i32, flag_up, ld_acquire_sys_i32, load_i32)


report = race(fenced(True))
print("with the fence:", report)
assert report.startswith("no race")
report = race(fenced(False))
print("without it:")
print(wrapped(report))
assert "data race on message" in report

# ## How far
#
# The last part of an intrinsic's name is its scope: cta (the threads of the
# block), gpu (of this GPU), sys (of the whole system, with other GPUs). A
# narrow scope is cheaper, but one that is too narrow does nothing. Between
# two ranks:

report = race(passing(store_i32, st_release_gpu_i32,
                      ld_acquire_gpu_i32, load_i32))
print(wrapped(report))
assert "do not include each other" in report

# ## Three parties
#
# In dispatch many blocks write messages, and ONE signal covers them all. So
# there is a party in the middle. The writers add to a counter, `finished`.
# The signaller waits until all writers have done so, and raises the flag. May
# the reader rely on writers with which it never synchronised? Yes: a release
# passes on what the signaller itself acquired. Release is cumulative. This is
# the chain:
#
#   writer      stores its message; finished += 1     release, gpu
#   signaller   loads finished, sees them all         acquire, gpu
#               raises the flag                       release, sys
#   reader      loads the flag                        acquire, sys
#
# (To keep the program short, `finished` is next to the flag here. In dispatch
# it is on the writers' rank.)

WRITERS = 3


def chain(count_up, see_all):
    """A kernel of writers, a signaller and a reader."""
    @kernel
    def three_parties(params, num_tokens, my_rank):
        flag, finished = params + u64(FLAG), params + u64(FLAG + 4)
        if my_rank == 0 and block_idx() > 0:            # a writer
            message = params + u64(MESSAGE + 4 * block_idx())
            store_i32(message, 14)
            count_up(finished, 1)
        elif my_rank == 0:                              # the signaller
            while see_all(finished) < WRITERS:
                pass
            st_release_sys_i32(flag, 1)
        elif block_idx() == 0:                          # the reader
            while ld_acquire_sys_i32(flag) == 0:
                pass
            total = 0
            for i in range(1, WRITERS + 1):
                total += load_i32(params + u64(MESSAGE + 4 * i))
            store_i32(params + u64(SEEN), total)

    return three_parties


whole = chain(red_add_release_gpu_i32, ld_acquire_gpu_i32)
assert run(whole, 0, blocks=1 + WRITERS) == 14 * WRITERS
print("whole:", race(whole, blocks=1 + WRITERS))
broken = chain(red_add_release_gpu_i32, ld_relaxed_gpu_i32)
report = race(broken, blocks=1 + WRITERS)
print("the signaller's load relaxed:")
print(wrapped(report))
assert "data race on message" in report and "the read is relaxed" in report

# The signaller never reads the messages, and yet its load must acquire.
#
# ## The same in the real kernels
#
# This chain is dispatch, with recv_count as the flag. The next lines go
# through the source of the plain kernels. They relax one release after
# another, and run the kernels in a small world of two ranks, until there is a
# race on recv_buf:

from epmoe.lessons.broken_kernel import unordered

mutant, report = unordered("dispatch_recv_buf")
print(f"{mutant.token.place}: {mutant.change}")
print(wrapped(report))

# One intrinsic of the kernels has changed. The report names the message, the
# line that wrote it, the line that read it, and the synchronisation that came
# closest to ordering them. `epmoe mutants` removes each synchronisation of
# every kernel in turn, and checks that a test notices.
#
# ## Worked problems
#
# 1. A message of 14336 bytes is written by stores of 16 bytes. Suppose a
#    release store costs 500 ns more than a plain one. What would it cost to
#    make every store a release, in place of one signal at the end?
#
# Answer: 896 stores x 0.5 us = 448 us. One signal costs 0.5 us. That is why
# messages are written by plain stores.

assert 14336 // 16 == 896 and 896 * 0.5 == 448

# 2. The reader may see the flag as 0 or 1, and the message as old or new. How
#    many of the four outcomes can happen if all are relaxed? Which does
#    release and acquire forbid?
#
# Answer: All four can. Release and acquire forbid one: flag 1 with the old
# message.

assert len({(f, m) for f in (0, 1) for m in ("old", "new")}) == 4

# 3. Writer and reader are on two GPUs. The release and the acquire can each
#    have the scopes cta, gpu and sys. How many of the 9 combinations put the
#    message before its reader?
#
# Answer: One, sys with sys. Each scope must include the other thread.

scopes = ("cta", "gpu", "sys")
assert sum(a == b == "sys" for a in scopes for b in scopes) == 1

# 4. In the chain of three parties, WRITERS = 3. How many releases are
#    executed? How many acquires have to see one?
#
# Answer: 4 releases: one of each writer, one of the signaller. The signaller
# must acquire all 3 writers' additions, the reader the signaller's flag. One
# load that sees 3 acquires all three additions, because additions to one
# counter continue each other's release.

assert WRITERS + 1 == 4

# ## Exercises
#
# WARM-UP. Writer and reader are two blocks of one GPU. The release and the
# acquire can each have the scopes cta, gpu and sys. How many of the 9
# combinations put the message before its reader? Set WARM_UP.
#
# CORE. The file has a chain of four parties, as four functions. All their
# intrinsics are too weak. On rank 0, as above, blocks 1 to 3 send a message
# each, and block 0 signals. On rank 1 only block 0 polls the flag. When it is
# up, block 0 raises a second flag, `ready`, for its own blocks 1 to 3, and
# these read one message each. `finished` is on rank 0. `message`, `flag` and
# `ready` are on rank 1.
#
# Change the ORDER (relaxed, acquire, release) and SCOPE (cta, gpu, sys) of
# the intrinsics until nothing races, and nothing is stronger than it must be.
# You may use these, named by operation, order, scope and type:
#
#   red_add_{relaxed,release}_{cta,gpu,sys}_i32      add
#   ld_{relaxed,acquire}_{cta,gpu,sys}_i32           load
#   st_{relaxed,release}_{cta,gpu,sys}_i32           store
#   fence_acq_rel_{cta,gpu,sys}                      if you prefer fences
#
# The judge runs your functions under the race detector. Then it weakens each
# intrinsic in turn, as `epmoe mutants` does, and expects a race.
#
# STRETCH. Rank 0 stores x = 1 and then loads y. Rank 1 stores y = 1 and then
# loads x. Both began as 0. The stores are release, the loads acquire, all of
# scope sys. How many of the four outcomes (what rank 0 loads, what rank 1
# loads) can happen? Set STRETCH.
