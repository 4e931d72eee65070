"""Lesson 9: Overlap and graphs: host time against device time."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Two clocks run in every program for GPUs. The host (the CPU) launches
# kernels; the device runs them. Whichever is slower decides. And on the
# device, links and arithmetic are two resources, and a program that uses them
# in turn leaves one idle at any time. This lesson is about both.
#
# ## Two clocks
#
# A launch returns before its kernel has run: kernels wait in a queue, the
# stream. So host and device overlap, and a loop of n kernels takes about
#
#   n x max(host time of a launch, device time of a kernel)
#
# A kernel begins when it has been launched and the one before it has ended.
# In code:


def elapsed(host_us, device_us, n):
    """Microseconds until the last of n kernels has ended."""
    launched = ended = 0.0
    for _ in range(n):
        launched += host_us
        ended = max(launched, ended) + device_us
    return ended


# Predict: A launch costs the host 9 us. 100 kernels of 4 us, and 100 of 30
# us: how long do they take?

for device_us in (4, 30):
    total = elapsed(9, device_us, 100)
    print(f"100 kernels of {device_us:2} us: {total:5.0f} us,"
          f" the host alone {9 * 100}, the device alone {100 * device_us}")
assert elapsed(9, 4, 100) == 904 and elapsed(9, 30, 100) == 3009

# With short kernels the GPU is idle most of the time, and nothing that makes
# kernels faster helps. This is what happens with few tokens. The project
# times loops of calls with the wall clock, as a caller sees them, and the same
# kernels from a graph (next section), which needs hardly any time of the host:

import re

from epmoe.lessons import measured

loop, machine = measured.loop()
rows = {(r["kernels"], r["arrays"], r["tokens"]): r for r in loop}


def shown(*which):
    """Microseconds as text; a star: on a slow CPU; -: not measured."""
    row = rows.get(which, {})
    return f"{row['us']:.1f}" + "*" * bool(row.get("slow")) if row else "-"


def marks(texts):
    """Explain the marks in these cells."""
    if any("*" in text for text in texts):
        print("*: on a slow CPU")
    if "-" in texts:
        print("-: not measured")


if loop:
    print(f"us a pair of dispatch and combine, ExpertParallel, {machine}")
    print("tokens   calls   graph")
    seen = []
    for n in (1, 128, 4096):
        us = [shown("ExpertParallel", a, n) for a in ("same", "graph")]
        print(f"{n:6}{us[0]:>8}{us[1]:>8}")
        seen += us
    marks(seen)
    one = [rows.get(("ExpertParallel", a, 1)) for a in ("same", "graph")]
    assert None in one or one[0]["us"] > 1.5 * one[1]["us"]
else:
    print("(no table of loops at hand; on GPUs this makes one:")
    print(" mpirun -n 2 python -m mpi4py -m benchmarks loop)")

# With 1 token our calls keep the host busy for longer than the kernels take:
# the host decides, unless a graph replays the kernels. With 128 tokens both
# take about as long. The host has no more to do for 4096 tokens than for 1, so
# there the device decides. Any layer in between (argument checks, autograd,
# results that the host waits for) takes more time of the host. Here are all
# interfaces:

if loop:
    columns = "same", "new", "layers", "graph"
    print(f"us a pair of dispatch and combine, 128 tokens, {machine}")
    print(" " * 38 + "".join(f"{c:>8}" for c in columns))
    seen = []
    for name in dict.fromkeys(name for name, _, n in rows if n == 128):
        us = [shown(name, c, 128) for c in columns]
        waits = re.sub(",? exact$", ", host waits", name)
        print(f"{waits:38}" + "".join(f"{text:>8}" for text in us))
        seen += us
    marks(seen)

# same: every pair gets the same arrays. new: every pair gets arrays at other
# addresses. layers: eight pairs, each with the tokens that the one before
# returned, and all results are kept. graph: the device alone, which is the
# next section. host waits: for the counts, and results have as many rows as
# came. on device and budget: the host does not wait; results have room for
# the most rows, or for as many as the caller says.
#
# Compare each column with the last one. Where they differ, as under torch,
# the caller waits for the host. Where they agree, the device decides.
#
# ## Graphs
#
# A CUDA graph is a list of launches, recorded once and launched as one. The
# host pays a fixed amount for the whole list, and the device goes from kernel
# to kernel by itself.


def elapsed_graph(replay_us, device_us, n):
    """The same n kernels from one graph."""
    return replay_us + n * device_us


print(f"100 kernels of 4 us from a graph: {elapsed_graph(10, 4, 100)} us")
assert elapsed_graph(10, 4, 100) < elapsed(9, 4, 100) / 2

# What may be in a graph? Anything for which the host need not know a result.
# A dispatch that returns exactly as many rows as came must tell the host how
# many; the host waits, and cannot record. So there are two kinds of dispatch:
# exact ones, and ones whose results have room for the worst case and whose
# counts stay on the device (`fused_dispatch_on_device`, ExpertParallel). The
# addresses of arrays are recorded as well: a replay reads the same arrays.
#
# Waiting has a price beyond the graph. The queue is empty when the host has
# waited, and the device idles until the next launch:


def elapsed_waiting(host_us, device_us, wait_us, n):
    """The host waits for each kernel, and needs wait_us to notice."""
    return n * (host_us + device_us + wait_us)


print(f"100 kernels of 30 us, waiting for each: "
      f"{elapsed_waiting(9, 30, 15, 100)} us instead of "
      f"{elapsed(9, 30, 100):.0f}")

# ## Two resources
#
# Now the device. While rows cross the links, the arithmetic units idle, and
# the other way round. One batch cannot change that: its experts need its
# rows. Two half batches can: the rows of B travel while the experts compute
# on A.
#
# A small model of it. A task has a resource, a duration, and tasks that must
# have ended before. Each resource works on its tasks in the order of the
# list, one at a time, as a stream does.


def finish(tasks):
    """{name: (begin, end)} of tasks (name, resource, us, names before)."""
    free, out = {}, {}
    for name, resource, us, before in tasks:
        begin = max([free.get(resource, 0.0), *(out[b][1] for b in before)])
        free[resource] = begin + us
        out[name] = begin, begin + us
    return out


def draw(tasks):
    """A line for each resource, 10 us a character; returns the last end."""
    times = finish(tasks)
    for resource in ("compute", "link"):
        line = ""
        for name, needs, _, _ in tasks:
            if needs == resource:
                begin, end = (round(t / 10) for t in times[name])
                line = line.ljust(begin, ".") + name[0] * (end - begin)
        print(f"  {resource:8}{line}")
    return max(end for _, end in times.values())


# One layer: attention, dispatch, experts, combine. First a whole batch:

whole = [("attention", "compute", 100, []),
         ("dispatch", "link", 40, ["attention"]),
         ("experts", "compute", 80, ["dispatch"]),
         ("combine", "link", 60, ["experts"])]
end = draw(whole)
print(f"{end:.0f} us; compute is busy for 180 of them")
assert end == 280

# Predict: Two half batches, A and B, every task half as long. When is the
# second one done, if A and B take turns?


def halves(fixed_us):
    """Two microbatches; fixed_us: what a task takes beyond its half."""
    out = []
    for name, resource, us, before in whole:
        for batch in "AB":
            out.append((batch + name, resource, us / 2 + fixed_us,
                        [batch + b for b in before]))
    return out


end = draw(halves(0))
print(f"{end:.0f} us")
assert end == 210

# Of 100 us on the links 70 are hidden behind arithmetic. What cannot be
# hidden is the last combine, and in a model of many layers not even that: it
# runs beside the next layer's attention.
#
# ## When halving does not help
#
# A task of half the tokens takes more than half the time. Launches, signals
# and the way across the link are paid twice. With a fixed part of 5, 10, ...
# us for each task:

for fixed in (0, 5, 10, 15, 20):
    end = max(e for _, e in finish(halves(fixed)).values())
    print(f"fixed part {fixed:2} us: two halves {end:.0f} us, whole 280 us")
    assert (end > 280) == (fixed > 10)

# The fixed part can be measured: a dispatch of 1 token has hardly any bytes.

found = measured.newest()
if found and found.row("pairs fused", "dispatch", 1):
    for phase in ("dispatch", "combine"):
        one = found.row("pairs fused", phase, 1)["us"]
        for tokens in (128, 4096):
            us = found.row("pairs fused", phase, tokens)["us"]
            print(f"{phase} of {tokens:4} tokens: {us:7.1f} us, "
                  f"of which about {one:.0f} are fixed, {one / us:.0%}")

# For 4096 tokens two microbatches are nearly free; for 128 they cost a good
# part of what they hide. There is a second price: while both run, they share
# memory bandwidth and multiprocessors. That is why kernels for overlap use
# few multiprocessors (docs/measured.md shows what 24 of 132 achieve).
#
# ## Overlap with the real interface
#
# A dispatch has two halves for this purpose: dispatch_async sends, and
# dispatch_wait receives. Whatever is launched in between overlaps with the
# journey. Two microbatches that are under way at once need buffers of their
# own (lesson 5), so two ExpertParallel objects:

import ml_dtypes
import numpy as np
from epmoe import EPConfig, ExpertParallel, LocalWorld

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8,
               max_tokens_per_rank=4)
rng = np.random.default_rng(9)
batches = []
for _ in "AB":
    x = [rng.integers(-3, 4, (4, 8)).astype(ml_dtypes.bfloat16)
         for _ in range(2)]
    ids = [np.array([rng.permutation(4)[:2] for _ in range(4)])
           for _ in range(2)]
    batches.append((x, ids))
ones = [np.ones((4, 2), np.float32)] * 2


def in_turn():
    """Batch after batch."""
    out = []
    with ExpertParallel(cfg, LocalWorld(2, seed=0)) as ep:
        for x, ids in batches:
            d = ep.dispatch(x, ids)
            y = [of_rank.output_tokens for of_rank in d]
            out.append([np.array(o) for o in ep.combine(y, d, ones)])
    return out


def overlapped():
    """Both at once: A's experts run while B travels."""
    world, out = LocalWorld(2, seed=0), []
    with ExpertParallel(cfg, world) as a, ExpertParallel(cfg, world) as b:
        a.dispatch_async(*batches[0])
        b.dispatch_async(*batches[1])           # B is on its way
        of_a = a.dispatch_wait()                # A's experts would run here
        a.combine_async([r.output_tokens for r in of_a], of_a)
        of_b = b.dispatch_wait()                # B's experts
        out.append([np.array(o) for o in a.combine_wait(ones)])
        b.combine_async([r.output_tokens for r in of_b], of_b)
        out.append([np.array(o) for o in b.combine_wait(ones)])
    return out


for one, other in zip(in_turn(), overlapped()):
    assert all((p == q).all() for p, q in zip(one, other))
print("in turn and overlapped: the same bytes")

# ## Worked problems
#
# 1. A layer launches 12 kernels, 5 us of host time each. There are 61 layers.
#    How many tokens a second does one sequence get at most, if every step
#    launches all of them?
#
# Answer: 61 x 12 x 5 us = 3.66 ms for a token, so 273 tokens a second. A
# faster GPU changes nothing.

assert 61 * 12 * 5 == 3660 and round(1e6 / 3660) == 273

# 2. A graph of those 732 kernels is replayed in 20 us of host time. Each
#    kernel takes 3 us on the device. What is the time for a token now?
#
# Answer: 20 + 732 x 3 = 2216 us. Now the device decides.

assert elapsed_graph(20, 3, 732) == 2216

# 3. Arithmetic takes 180 us of a layer and links 100 us. What is the least
#    time for a layer with perfect overlap, and the largest gain?
#
# Answer: 180 us, the busier resource. 280 / 180 = 1.56 times as fast. Overlap
# never gains more than a factor of 2.

assert round(280 / 180, 2) == 1.56

# 4. The host waits once in a layer for 15 us, during which nothing is queued.
#    61 layers, 280 us each. What does waiting cost?
#
# Answer: 61 x 15 = 915 us in 17.1 ms, 5 %. With layers of 60 us it would be
# 25 %.

assert 61 * 15 == 915 and round(915 / (61 * 280), 2) == 0.05

# ## Exercises
#
# WARM-UP. A launch costs the host 8 us. A loop launches 50 kernels of 20 us
# and waits at the end. After how many microseconds has the last one ended,
# counted from the beginning of the first launch? Set WARM_UP.
#
# CORE. Write the model of two resources yourself, with one more rule:
#
#   finish_times(tasks)
#
# tasks is a list of (name, resource, us, before): a string, a string, a
# number, and a list of names that stand earlier in the list. A resource runs
# its tasks one at a time, in the order of the list. A task begins when its
# resource is free AND all tasks in `before` have ended. The rule: a task
# whose resource is "none" needs no resource, it only waits for the tasks in
# `before`. Return {name: end} for all tasks.
#
# STRETCH. One layer, two microbatches. For each: attention 50 us (compute),
# dispatch 20 us (link), experts 20 us (compute), combine 30 us (link). What
# is the least time in which both can be done? Set STRETCH.
