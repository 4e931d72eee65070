"""Makes the report of a dump: a dict of numbers. `--json` prints it, and the text and the page show it."""

import numpy as np

from epmoe.routing import guessed_experts
from epmoe.routing_report import counts, interfaces, measured
from epmoe_ref.config import MAX_EXPERTS, MAX_GPUS_PER_NODE
from epmoe_ref.errors import EPValueError

DEFAULT_RANKS, DEFAULT_HIDDEN = 8, 7168
SWEPT_RANKS = (2, 4, 8, 16, 32, 64, 128)
MOST_RANKS = 1024
ALIKE = 1.05  # times that differ by less count as equal


def report(dump, name, *, n_experts=None, n_ranks=None, hidden=None, token_format="bf16", link_gbps=None):
    """The report of a Dump. Arguments that are None come from the file or are assumed. `assumed` lists the assumptions.

    Every quantity of a step is {median, p90, p99, max} over the steps. Bytes are of one step, times in microseconds.
    """
    assumed = list(dump.notes)
    if n_ranks is None and dump.rank_offsets is not None:
        n_ranks = len(dump.rank_offsets) - 1
    n_experts, n_ranks = _world(dump, n_experts, n_ranks, assumed)
    dump.check(n_experts)
    if dump.rank_offsets is not None and len(dump.rank_offsets) != n_ranks + 1:
        assumed.append(f"rank_offsets of the file is for {len(dump.rank_offsets) - 1} ranks: tokens are dealt evenly")
    hidden = hidden or dump.hidden
    if hidden is None:
        hidden = DEFAULT_HIDDEN
        assumed.append(f"hidden={hidden}, because the file has no x: --hidden changes it")
    link_given = link_gbps is not None
    if not link_given:
        link_gbps, machine = measured.table()["link_gbps"], measured.machine(measured.table())
        assumed.append(
            f"links of {link_gbps} GB/s each way for up to {MAX_GPUS_PER_NODE} ranks, as measured on {machine}: "
            "--link-gbps changes it"
        )
    options = (n_experts, hidden, token_format, link_gbps, link_given)
    here = _on_ranks(dump, n_ranks, *options)
    return {
        "file": name,
        "assumed": assumed,
        "n_ranks": n_ranks,
        "n_experts": n_experts,
        "top_k": dump.top_k,
        "hidden": hidden,
        "format": token_format,
        "link_gbps": link_gbps,
        "steps": len(dump.steps),
        "tokens": dump.tokens,
        "empty_slots": int(sum((ids < 0).sum() for ids in dump.steps)),
        **here,
        "sweep": [_brief(_on_ranks(dump, n, *options), n) for n in _swept(n_experts, n_ranks)],
        "measured": {
            key: measured.table()[key] for key in ("from", "date", "commit", "device", "n_ranks", "link_gbps")
        },
    }


def _world(dump, n_experts, n_ranks, assumed):
    """(n_experts, n_ranks) as given, from the file, or assumed."""
    given = n_experts or dump.n_experts
    if n_experts is not None and n_experts > MAX_EXPERTS:
        raise EPValueError(f"--experts {n_experts} must be at most {MAX_EXPERTS}")
    if given is None:
        given, note = guessed_experts(dump.steps, n_ranks or DEFAULT_RANKS)
        assumed.append(note)
    if n_ranks is None:
        n_ranks = max(n for n in range(1, DEFAULT_RANKS + 1) if given % n == 0)
        assumed.append(f"{n_ranks} ranks: --ranks changes it")
    if n_ranks > MOST_RANKS:
        raise EPValueError(f"--ranks {n_ranks} must be at most {MOST_RANKS}: the report holds a matrix of all ranks")
    if given % n_ranks:
        fits = [n for n in range(1, min(given, 64) + 1) if given % n == 0]
        raise EPValueError(
            f"{given} experts cannot be dealt evenly to {n_ranks} ranks: give --ranks one of {fits}, or "
            f"another number of --experts"
        )
    return given, n_ranks


def _on_ranks(dump, n_ranks, n_experts, hidden, token_format, link_gbps, link_given):
    """The part of the report that depends on the number of ranks."""
    by_step = [dump.split(ids, n_ranks) for ids in dump.steps]
    steps = [counts.count(ids, n_experts) for ids in by_step]
    most_tokens = max(int(step.tokens.max()) for step in steps)
    cfg = interfaces.config(n_ranks, n_experts, dump.top_k, hidden, most_tokens, token_format)
    sizes = interfaces.Sizes(cfg, link_gbps, link_given or n_ranks <= MAX_GPUS_PER_NODE)
    ways = {name: _interface(name, steps, sizes) for name in interfaces.INTERFACES}
    return {
        "tokens_per_rank": _over([s.tokens.max() for s in steps]),
        "imbalance": {
            side: {
                "max_over_mean": _over([counts.max_over_mean(getattr(s, f"by_{side}")) for s in steps]),
                "gini": _over([counts.gini(getattr(s, f"by_{side}")) for s in steps]),
            }
            for side in ("rank", "expert")
        },
        "pairs_by_rank": sum(s.by_rank for s in steps).tolist(),
        "pairs_by_expert": sum(s.by_expert for s in steps).tolist(),
        "pairs": sum(s.pairs for s in steps).tolist(),
        "rows": sum(s.rows for s in steps).tolist(),
        "message_bytes": sizes.message_bytes,
        "row_bytes": sizes.row_bytes,
        "combine_row_bytes": sizes.combine_bytes,
        "interfaces": ways,
        "take": _take(ways, sizes, len(steps)),
    }


def _interface(name, steps, sizes):
    of_steps = [interfaces.costs(name, step, sizes) for step in steps]
    entry = {"is": interfaces.INTERFACES[name], "not_offered": interfaces.offered(name, sizes.cfg)}
    if of_steps[0][0] is None:
        return entry | dict.fromkeys(("dispatch", "combine", "round_us", "result_bytes", "memory_bytes"))
    for phase, found in zip(("dispatch", "combine"), zip(*of_steps)):
        entry[phase] = {name: _over(values) for name, values in zip(interfaces.Cost._fields, zip(*found))}
    entry["round_us"] = _over([_round_us(pair) for pair in of_steps])
    entry["result_bytes"] = _over([interfaces.result_bytes(name, step, sizes) for step in steps])
    entry["memory_bytes"] = interfaces.memory_bytes(name, steps, sizes)
    return entry


def _round_us(costs):
    """Expected time of dispatch and combine together; None if these kernels were not measured."""
    us = [cost.expected_us for cost in costs]
    return None if None in us else sum(us)


def _floor_us(way):
    """The floors of dispatch and combine together, in the median step; None if the link's speed is not known."""
    floors = [way[phase]["floor_us"] for phase in ("dispatch", "combine")]
    return None if None in floors else sum(floor["median"] for floor in floors)


def _over(values):
    """{median, p90, p99, max} over steps; None if no step has a value."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    median, p90, p99, most = np.percentile(np.asarray(values, float), (50, 90, 99, 100)).tolist()
    return {"median": median, "p90": p90, "p99": p99, "max": most}


def _take(ways, sizes, n_steps):
    """{interface, why}: the interface with the shortest round in the median step."""
    ours = {name: way for name, way in ways.items() if way["not_offered"] is None and name != "pairs_plain"}
    measured_all = all(way["round_us"] for way in ours.values())
    us = {name: way["round_us"]["median"] if measured_all else _floor_us(way) for name, way in ours.items()}
    best = min(us, key=us.get)
    if len(us) > 1 and us["pairs"] <= ALIKE * us[best]:
        best = "pairs"
    why = [f"{way['is']} is not possible: it {way['not_offered']}" for way in ways.values() if way["not_offered"]]
    others = ", ".join(f"{ours[name]['is']} {us[name]:.1f}" for name in us if name != best)
    if not ways["pairs"]["dispatch"]["busiest_bytes"]["max"]:
        why.append("no expected times: no token leaves its rank, and we measured only tokens that do")
    elif not sizes.link_known:
        why.append(
            f"no times: more than {MAX_GPUS_PER_NODE} ranks need a network, which we did not measure; "
            "give its speed with --link-gbps"
        )
    elif others:
        least = "take about" if measured_all else "take at least"
        step = " in the median step" if n_steps > 1 else ""
        why.append(f"dispatch and combine {least} {us[best]:.1f} us{step} ({others})")
    if best == "pairs":
        why.append(
            "rows arrive grouped by expert, and the token's rank sums in float32, so results have the same bits on "
            "any number of ranks"
        )
    elif best == "rows":
        why.append(
            "each rank receives a token once; your experts select their rows and sum their results there; if they "
            f"need rows grouped by expert, use hybrid_ep_dispatch ({us['expert_major']:.1f} us)"
        )
    else:
        why.append(
            "each rank receives a token once, and rows arrive grouped by expert; partial sums are rounded before "
            "they are sent back"
        )
    return {"interface": best, "is": ways[best]["is"], "why": why}


def _swept(n_experts, n_ranks):
    """Numbers of ranks to compare: this one, and powers of two (or other divisors) that divide the experts."""
    found = {n for n in SWEPT_RANKS if n_experts % n == 0} | {n_ranks}
    if len(found) < 4:
        found |= set([n for n in range(2, SWEPT_RANKS[-1] + 1) if n_experts % n == 0][:8])
    return sorted(found)


def _brief(of_ranks, n_ranks):
    """The line of the sweep for one number of ranks."""
    ways = of_ranks["interfaces"]
    line = {
        "n_ranks": n_ranks,
        "tokens_per_rank": of_ranks["tokens_per_rank"],
        "rank_max_over_mean": of_ranks["imbalance"]["rank"]["max_over_mean"],
        "take": of_ranks["take"]["interface"],
    }
    line["interfaces"] = {
        name: {
            "not_offered": way["not_offered"],
            "round_us": way["round_us"],
            "memory_bytes": way["memory_bytes"],
            "floor_us": None if way["dispatch"] is None else _floor_us(way),
        }
        for name, way in ways.items()
    }
    return line
