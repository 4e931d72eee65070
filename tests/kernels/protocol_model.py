"""What dispatch and combine must do, as plain loops over tokens and slots, for the kernels' own tests.

Written from the text of the protocol; shares nothing with the kernels but the configuration.
"""

import numpy as np


def clean(cfg, topk_ids):
    """Ids outside [0, n_experts) and later occurrences in a token become -1."""
    cleaned = np.full(topk_ids.shape, -1, np.int32)
    for t, token in enumerate(topk_ids):
        seen = set()
        for k, e in enumerate(token):
            if 0 <= e < cfg.n_experts and e not in seen:
                cleaned[t, k] = e
                seen.add(e)
    return cleaned


def share(cfg, num_tokens, rank):
    """Tokens that are the shared expert's rows on a rank: (first, number)."""
    if not cfg.fused_shared_expert:
        return 0, 0
    if not cfg.skip_a2a:
        return 0, num_tokens
    parts = [len(p) for p in np.array_split(np.arange(num_tokens), cfg.allreduce_world_size)]
    return sum(parts[:rank]), parts[rank]


def routed(cfg, rank, topk_ids):
    """{(local expert, src_rank index): [(src_rank, t, k), ...]} of everything that reaches a rank."""
    rows = {}
    sources = [rank] if cfg.skip_a2a else range(cfg.n_ranks)
    for index, source in enumerate(sources):
        for t, token in enumerate(clean(cfg, topk_ids[source])):
            for k, e in enumerate(token):
                if e >= 0 and e // cfg.n_local_experts == rank:
                    rows.setdefault((e % cfg.n_local_experts, index), []).append((source, t, k))
    return rows


def check_dispatch(cfg, rank, topk_ids, d, pad_rows=1):
    """Asserts offsets, ids, counts and src_info of a rank's result; returns [(src_rank, token, group)] a row.

    Rows of the shared expert have this rank as their source; padding rows are None.
    """
    expected = routed(cfg, rank, topk_ids)
    first_shared, n_shared = share(cfg, len(topk_ids[rank]), rank)
    origin, offsets = [], [0]

    def end_group():
        while len(origin) % pad_rows:
            assert d["src_info"][len(origin)].tolist() == [-1, -1], f"padding row {len(origin)}"
            origin.append(None)
        offsets.append(len(origin))

    if cfg.fused_shared_expert:
        for i in range(n_shared):
            assert d["src_info"][i].tolist() == [-1, -1], f"row {i} of the shared expert"
            origin.append((rank, first_shared + i, 0))
        end_group()
    front = len(offsets) - 1
    for local_expert in range(cfg.n_local_experts):
        for index in range(cfg.n_src_ranks):
            want = expected.get((local_expert, index), [])
            assert d["counts"][local_expert, index] == len(want), (local_expert, index)
            here = d["src_info"][len(origin) : len(origin) + len(want)].tolist()
            place = f"rank {rank}, local expert {local_expert}, source {index}"
            assert sorted(map(tuple, here)) == sorted((t, k) for _, t, k in want), place
            source = rank if cfg.skip_a2a else index
            origin += [(source, t, front + local_expert) for t, _ in here]
        end_group()
    assert d["row_offsets"].tolist() == offsets
    assert d["expert_ids"].tolist() == list(range(cfg.n_groups))
    assert (d["src_info"][len(origin) :] == -1).all(), "src_info behind the last row was written"
    assert (d["clean_topk_ids"] == clean(cfg, topk_ids[rank])).all()
    return origin


def fma(a, b, c):
    """float32(a * b + c) with one rounding, on arrays: exact by way of an odd-rounded float64 sum."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    c = c.astype(np.float64)
    total = product + c
    b_part = total - product
    error = (product - (total - b_part)) + (c - b_part)  # what the sum lost
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    inexact = (error != 0) & np.isfinite(total)
    odd = np.where(bits & 1, bits, np.where(away, bits + 1, bits - 1))
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def combine(cfg, rank, topk_ids, outputs_of, weights, dtype, shared=None, epilogue=None):
    """Output tokens of a rank. outputs_of(src_rank, t, expert) -> row of `dtype`; shared(t) -> row or None."""
    ids = clean(cfg, topk_ids[rank])
    n, k_slots = ids.shape
    if weights is None:
        out = np.zeros((n, k_slots, cfg.hidden), dtype)
    else:
        out = np.zeros((n, cfg.hidden), dtype)
    for t in range(n):
        total = np.zeros(cfg.hidden, np.float32)
        for k, e in enumerate(ids[t]):
            if e < 0 or (cfg.skip_a2a and e // cfg.n_local_experts != rank):
                continue
            row = outputs_of(rank, t, e)
            if weights is None:
                out[t, k] = row
            else:
                total = fma(np.full(cfg.hidden, weights[t, k], np.float32), row.astype(np.float32), total)
        if weights is None:
            continue
        result = total.astype(dtype)
        if cfg.fused_shared_expert:
            extra = shared(t)
            extra = np.zeros(cfg.hidden, dtype) if extra is None else extra
            result = (result.astype(np.float32) + extra.astype(np.float32)).astype(dtype)
        if epilogue:
            result = epilogue(t, np.arange(cfg.hidden), result.astype(np.float32)).astype(dtype)
        out[t] = result
    return out
