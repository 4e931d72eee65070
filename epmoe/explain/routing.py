"""Who sends what to whom: tokens on the left, experts on the right, a line for each slot of a token."""

import numpy as np

from epmoe.explain.arrays import label
from epmoe.explain.palette import rank_class
from epmoe.explain.svg import Panel, path, rect, shown, tag, text, token_box

ROW, BOX, WIDTH = 24, 20, 326
TOKENS_AT, EXPERTS_AT = 70, 236


def columns(cfg, num_tokens):
    """Where tokens and experts stand: ({(rank, token): y}, {expert: y}, height), both columns equally high."""
    tokens, y = {}, 44
    for rank in range(cfg.n_ranks):
        for t in range(max(1, num_tokens[rank])):
            tokens[rank, t] = y
            y += ROW
        y += 10
    high = y
    step = max(ROW + 2, (high - 54) / (cfg.n_experts + 0.4 * cfg.n_ranks))
    experts, y = {}, 44.0
    for e in range(cfg.n_experts):
        experts[e] = y
        y += step + (0.4 * step if (e + 1) % cfg.n_local_experts == 0 else 0)
    return tokens, experts, max(high, y)


def heads(cfg, tokens, experts, num_tokens, left, right):
    """Titles of both columns and the ranks' names."""
    parts = [text(TOKENS_AT + BOX, 16, left, "t b", "end"), text(EXPERTS_AT, 16, right, "t b")]
    for rank in range(cfg.n_ranks):
        n = max(1, num_tokens[rank])
        middle = (tokens[rank, 0] + tokens[rank, n - 1]) / 2
        parts.append(text(0, middle + BOX / 2 + 4, f"rank {rank}", "t"))
        if not num_tokens[rank]:
            parts.append(text(TOKENS_AT, tokens[rank, 0] + 14, "none", "m"))
        first = rank * cfg.n_local_experts
        middle = (experts[first] + experts[first + cfg.n_local_experts - 1]) / 2
        parts.append(text(EXPERTS_AT + 44, middle + BOX / 2 + 4, f"rank {rank}", "t"))
    return parts


def panel(history):
    """The routing as the router gave it: topk_ids, with the router's weights in the words of each line."""
    r = history.recording
    cfg, num_tokens = r.cfg, r.routed.num_tokens
    tokens, experts, height = columns(cfg, num_tokens)
    parts = heads(cfg, tokens, experts, num_tokens, "tokens", "experts")
    loads = np.zeros(cfg.n_experts, int)
    lines, boxes = [], []
    for (rank, t), y in tokens.items():
        if t >= num_tokens[rank]:
            continue
        row = r.dispatched[rank].topk_ids[t]
        for k, e in enumerate(row):
            e, weight = int(e), float(r.routed.topk_weights[rank][t, k])
            what = shown(label("topk_ids", rank, (t, k), ("token", "k")), e,
                         tip=f"{label('router_weights', rank, (t, k), ('token', 'k'))} = {weight:.7g}")
            start = (TOKENS_AT + BOX, y + BOX / 2 + (k - (len(row) - 1) / 2) * min(4, 14 / len(row)))
            if e < 0:
                boxes.append(tag("g", path(f"M{start[0]} {start[1]:.1f}h14", f"flow k{rank_class(rank)}"),
                                 text(start[0] + 17, start[1] + 4, "-1", "m small over"), **what))
                continue
            loads[e] += 1
            end = experts[e] + BOX / 2
            bend = (EXPERTS_AT - start[0]) / 2
            lines.append(path(f"M{start[0]} {start[1]:.1f}C{start[0] + bend} {start[1]:.1f} {EXPERTS_AT - bend} "
                              f"{end:.1f} {EXPERTS_AT} {end:.1f}", f"flow k{rank_class(rank)}", **what))
        boxes.append(token_box(TOKENS_AT, y, BOX, BOX, rank, f"t{t}",
                               **shown(tip=f"token {t} of rank {rank}: input_tokens[rank {rank}][token {t}]")))
    for e, y in experts.items():
        owner, local = divmod(e, cfg.n_local_experts)
        boxes.append(tag("g", rect(EXPERTS_AT, y, 34, BOX, "cell", 3), text(EXPERTS_AT + 17, y + 14, f"e{e}", "t small",
                                                                           "middle"),
                         **shown(tip=f"expert {e} is local_expert {local} of rank {owner}; {loads[e]} rows")))
    return Panel("Routing", WIDTH, height, "".join(parts + lines + boxes))
