"""Right answers to the exercises, in several forms."""

OFFSETS = """
import numpy as np


def row_offsets(counts):
    ends = np.cumsum(counts.sum(axis=1))
    return np.concatenate([[0], ends])


def first_row(counts, local_expert, src_rank):
    return row_offsets(counts)[local_expert] + counts[local_expert, :src_rank].sum()
"""

OFFSETS_BY_HAND = """
def row_offsets(counts):
    out = [0]
    for of_expert in counts.tolist():
        out.append(out[-1] + sum(of_expert))
    return tuple(out)


def first_row(counts, local_expert, src_rank):
    return sum(counts.reshape(-1)[:local_expert * counts.shape[1] + src_rank].tolist())
"""

PLACE = """
def up(n):
    return (n + 15) // 16 * 16


def place(n_ranks, n_experts, top_k, hidden, max_tokens, expert, src_rank, slot):
    local = n_experts // n_ranks
    le = expert % local
    message = up(2 * hidden) + up(4) + up(2 * top_k)
    return expert // local, ((le * n_ranks + src_rank) * max_tokens + slot) * message
"""

PLACE_AS_ARRAY = """
import numpy as np


def place(n_ranks, n_experts, top_k, hidden, max_tokens, expert, src_rank, slot):
    owner, local = divmod(expert, n_experts // n_ranks)
    message = 2 * hidden + 16 + -(-top_k // 8) * 16
    shape = n_experts // n_ranks, n_ranks, max_tokens, message
    return [owner, np.ravel_multi_index((local, src_rank, slot, 0), shape)]
"""

SLOTS = """
import numpy as np


def first_slots(counts):
    return np.cumsum(counts, axis=0) - counts


def own_slots(experts, first):
    out = []
    for i, e in enumerate(experts):
        same = experts[:i].count(e)
        out.append(-1 if e < 0 else first[e] + same)
    return out
"""

SLOTS_BY_HAND = """
import numpy as np


def first_slots(counts):
    first, before = [], [0] * counts.shape[1]
    for of_block in counts.tolist():
        first.append(before)
        before = [b + c for b, c in zip(before, of_block)]
    return first


def own_slots(experts, first):
    first = first.copy()
    out = np.full(len(experts), -1)
    for i, e in enumerate(experts):
        if e != -1:
            out[i] = first[e]
            first[e] += 1
    return out
"""

CHAIN = """
from epmoe.device import *


def send(message, finished, value):
    store_i32(message, value)
    red_add_release_gpu_i32(finished, 1)


def signal(finished, flag, n_messages):
    while ld_acquire_gpu_i32(finished) != n_messages:
        pass
    st_release_sys_i32(flag, 1)


def receive(flag, ready):
    while ld_acquire_sys_i32(flag) == 0:
        pass
    st_release_gpu_i32(ready, 1)


def read(ready, message):
    while ld_acquire_gpu_i32(ready) == 0:
        pass
    return load_i32(message)
"""

CHAIN_OF_FENCES = """
from epmoe.device import *


def send(message, finished, value):
    store_i32(message, value)
    fence_acq_rel_gpu()
    red_add_relaxed_gpu_i32(finished, 1)


def signal(finished, flag, n_messages):
    while ld_relaxed_gpu_i32(finished) != n_messages:
        pass
    fence_acq_rel_sys()                 # for what was acquired, and for what is released
    st_relaxed_sys_i32(flag, 1)


def receive(flag, ready):
    while ld_relaxed_sys_i32(flag) == 0:
        pass
    fence_acq_rel_sys()
    st_relaxed_gpu_i32(ready, 1)


def read(ready, message):
    while ld_relaxed_gpu_i32(ready) == 0:
        pass
    fence_acq_rel_gpu()
    return load_i32(message)
"""

CHAIN_OF_ATOMICS = CHAIN.replace("red_add_release_gpu_i32(", "atomic_add_release_gpu_i32(").replace(
    "    st_release_gpu_i32(ready, 1)", "    red_add_release_gpu_i32(ready, 1)"
)

TWO_BUFFERS = """
def program(rounds):
    steps = []
    for i in range(rounds):
        b = i % 2
        steps += [f"send {b}", f"wait {b}"]
    return steps
"""

BARRIERS = """
def program(rounds):
    return ["send 0", "wait 0", "barrier"] * rounds
"""

PREFETCHING = """
def program(rounds):
    steps = ["send 0"]
    for i in range(1, rounds):
        steps += [f"send {i % 2}", f"wait {(i - 1) % 2}"]
    return steps + [f"wait {(rounds - 1) % 2}"]
"""

DECIDE = """
import numpy as np


def decide(topk_ids, n_ranks, n_experts, row_bytes, link_gbps, extra_us):
    local = n_experts // n_ranks
    found = []
    for once in (False, True):
        out = np.zeros((n_ranks, n_ranks))
        for src, ids in enumerate(topk_ids):
            owner = np.where(ids < 0, -1, ids // local)
            for dst in range(n_ranks):
                here = owner == dst
                out[src, dst] = here.any(axis=1).sum() if once else here.sum()
            out[src, src] = 0
        found.append(max(out.sum(0).max(), out.sum(1).max()) * row_bytes / link_gbps / 1e3)
    return (*found, "rows" if found[1] + extra_us < found[0] else "pairs")
"""

DECIDE_BY_HAND = """
def decide(topk_ids, n_ranks, n_experts, row_bytes, link_gbps, extra_us):
    sent, received = [[0, 0] for _ in range(n_ranks)], [[0, 0] for _ in range(n_ranks)]
    for src, ids in enumerate(topk_ids):
        for token in ids.tolist():
            owners = [e // (n_experts // n_ranks) for e in token if e >= 0]
            for i, to in enumerate((owners, set(owners))):
                for dst in to:
                    if dst != src:
                        sent[src][i] += 1
                        received[dst][i] += 1
    pairs, rows = (max(n[i] for n in sent + received) * row_bytes / (link_gbps * 1e9) * 1e6 for i in (0, 1))
    return [pairs, rows, "pairs" if pairs <= rows + extra_us else "rows"]
"""

DROP = """
import numpy as np


def drop(topk_ids, n_experts, capacity):
    out = topk_ids.copy()
    for e in range(n_experts):
        where = np.flatnonzero(topk_ids.reshape(-1) == e)
        out.reshape(-1)[where[capacity:]] = -1
    return out
"""

DROP_BY_HAND = """
def drop(topk_ids, n_experts, capacity):
    room = [capacity] * n_experts
    out = []
    for token in topk_ids.tolist():
        out.append([])
        for e in token:
            keeps = e >= 0 and room[e] > 0
            if keeps:
                room[e] -= 1
            out[-1].append(e if keeps else -1)
    return np.array(out).reshape(topk_ids.shape)


import numpy as np
"""

BACKWARD = """
import numpy as np


def backward(x, topk_ids, weights, matrix, grad_out):
    gx, gw, gm = np.zeros_like(x), np.zeros_like(weights), np.zeros_like(matrix)
    for t, k in np.ndindex(topk_ids.shape):
        e = topk_ids[t, k]
        if e < 0:
            continue
        y = x[t] @ matrix[e]
        grad_y = weights[t, k] * grad_out[t]
        gw[t, k] = y @ grad_out[t]
        gx[t] += grad_y @ matrix[e].T
        gm[e] += np.outer(x[t], grad_y)
    return gx, gw, gm
"""

BACKWARD_BY_EINSUM = """
import numpy as np


def backward(x, topk_ids, weights, matrix, grad_out):
    here = topk_ids >= 0
    w = weights * here
    chosen = matrix[topk_ids]
    gx = np.einsum("tk,tkij,tj->ti", w, chosen, grad_out)
    gw = np.einsum("ti,tkij,tj->tk", x, chosen, grad_out) * here
    gm = np.zeros_like(matrix)
    np.add.at(gm, topk_ids, np.einsum("ti,tk,tj->tkij", x, w, grad_out))
    return [gx, gw, gm]
"""

FINISH = """
def finish_times(tasks):
    free, ends = {}, {}
    for name, resource, us, before in tasks:
        ready = [ends[b] for b in before]
        busy = 0 if resource == "none" else free.get(resource, 0)
        begin = max([busy, *ready])
        ends[name] = begin + us
        free[resource] = begin + us
    return ends
"""

FINISH_BY_SEARCH = """
def finish_times(tasks):
    def end(i):
        name, resource, us, before = tasks[i]
        waits_for = [j for j in range(i) if tasks[j][0] in before or tasks[j][1] == resource != "none"]
        return us + max((end(j) for j in waits_for), default=0)

    return {task[0]: end(i) for i, task in enumerate(tasks)}
"""

FLOORS = """
import numpy as np


def network_floors(topk_ids, n_ranks, n_experts, ranks_per_host, row_bytes, net_gbps):
    local, h = n_experts // n_ranks, ranks_per_host
    pairs, rows, hosts = np.zeros((3, n_ranks, n_ranks))
    for src, ids in enumerate(topk_ids):
        rank = np.where(ids < 0, src, ids // local)
        for dst in range(n_ranks):
            if dst // h != src // h:
                pairs[src, dst] = (rank == dst).sum()
                rows[src, dst] = (rank == dst).any(axis=1).sum()
            if dst // h != src // h and dst % h == src % h:
                hosts[src, dst] = (rank // h == dst // h).any(axis=1).sum()
    return [max(m.sum(0).max(), m.sum(1).max()) * row_bytes / net_gbps / 1e3 for m in (pairs, rows, hosts)]
"""

FLOORS_BY_HAND = """
def network_floors(topk_ids, n_ranks, n_experts, ranks_per_host, row_bytes, net_gbps):
    sent = [[0] * 3 for _ in range(n_ranks)]
    received = [[0] * 3 for _ in range(n_ranks)]
    for src, ids in enumerate(topk_ids):
        home, place = divmod(src, ranks_per_host)
        for token in ids.tolist():
            ranks = [e * n_ranks // n_experts for e in token if e >= 0]
            away = [r for r in ranks if r // ranks_per_host != home]
            passed_on = [r // ranks_per_host * ranks_per_host + place for r in away]
            for way, to in enumerate((away, set(away), set(passed_on))):
                for r in to:
                    sent[src][way] += 1
                    received[r][way] += 1
    return tuple(max(n[way] for n in sent + received) * row_bytes / net_gbps * 1e-3 for way in range(3))
"""
