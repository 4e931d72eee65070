"""Other libraries' times: measured in the same run, and constants that were measured before, with their source.

A peer is compared with our kernels if it does the same work. Pairs and expert-major deliver rows grouped by expert, as
NCCL with a permutation and DeepEP's low latency kernels do. Rows deliver one row for each (token, rank), as DeepEP V1
and V2 do, and are compared with all of them.
"""

from typing import NamedTuple

from benchmarks import shapes

GROUPED = ("nccl all-to-all", "DeepEP low latency")
ALL = (*GROUPED, "DeepEP V1", "DeepEP V2")
SOURCE = (
    "not of this run: measured on 2026-11-20 on 2 and 4 NVIDIA H200 of one host (NV18 each way, driver 580), "
    "CUDA events, cold L2, slowest rank, median of 30, top 8; DeepEP V1 with its layout known beforehand "
    "(computing it takes 35 us more)"
)


class Peer(NamedTuple):
    """One constant: microseconds of a phase on 4 and on 2 ranks, None if not measured."""

    name: str
    phase: str
    shape: str
    ranks4: float | None
    ranks2: float | None


CONSTANTS = (
    Peer("DeepEP V1", "dispatch", "4096x7168/256", 544, 215),
    Peer("DeepEP V2", "dispatch", "4096x7168/256", 635, 259),
    Peer("DeepEP V1", "combine", "4096x7168/256", 533, 229),
    Peer("DeepEP V2", "combine", "4096x7168/256", 590, 241),
    Peer("nccl all-to-all", "dispatch", "4096x7168/256:fp8", 904, 728),
    Peer("DeepEP V1", "dispatch", "4096x7168/256:fp8", 293, 133),
    Peer("DeepEP V2", "dispatch", "4096x7168/256:fp8", 334, 140),
    Peer("DeepEP V1", "dispatch", "4096x4096/128", 321, 136),
    Peer("DeepEP V1", "combine", "4096x4096/128", 322, None),
    Peer("DeepEP V2", "combine", "4096x4096/128", None, 144),
    Peer("DeepEP low latency", "dispatch", "128x7168/256", 55.6, 42.6),
    Peer("DeepEP low latency", "combine", "128x7168/256", 62.7, 46.0),
    Peer("DeepEP V2", "dispatch", "128x7168/256", 34.8, 22.9),
    Peer("DeepEP V2", "combine", "128x7168/256", 37.7, 24.7),
    Peer("DeepEP low latency", "dispatch", "128x7168/256:fp8", 37.1, 30.7),
    Peer("DeepEP V2", "dispatch", "128x7168/256:fp8", 27.0, 19.9),
    Peer("DeepEP V2", "dispatch", "1x7168/256", 18.1, 17.2),
    Peer("nccl all-to-all", "dispatch", "1x7168/256", 17.8, 16.6),
    Peer("DeepEP low latency", "combine", "1x7168/256", 19.7, None),
    Peer("DeepEP V2", "combine", "1x7168/256", None, 18.5),
    Peer("DeepEP low latency", "dispatch", "128x7168/256:zipf", 87, None),
    Peer("DeepEP low latency", "combine", "128x7168/256:zipf", 90, None),
    Peer("DeepEP V1", "dispatch", "4096x7168/256:zipf", 857, None),
    Peer("DeepEP V2", "dispatch", "4096x7168/256:zipf", 698, None),
    Peer("DeepEP V1", "combine", "4096x7168/256:zipf", 626, None),
    Peer("DeepEP V2", "combine", "4096x7168/256:zipf", 688, None),
)


def of_kernels(kernels):
    """Names of the peers that do the same work; none for a peer itself."""
    if kernels in ALL:
        return ()
    return ALL if kernels.startswith("rows") else GROUPED


def constants(device, n_ranks):
    """[(Peer, us)] for this kind of machine. Only H200s, with 2 or 4 ranks and a GPU for each, have any."""
    if "H200" not in device or n_ranks not in (2, 4) or "virtual" in device:
        return []
    column = 3 if n_ranks == 4 else 4
    return [(p, p[column]) for p in CONSTANTS if p[column] is not None]


def annotate(record):
    """Add to every row of ours its best peer: peer, peer_us, peer_here (in this run, or a constant), to_peer."""
    known = {}  # (phase, shape) -> [(us, name, here)]
    for r in record["rows"]:
        if r["kernels"] in ALL and not r["graph"]:
            known.setdefault((r["phase"], shapes.of_row(r)), []).append((r["us"], r["kernels"], True))
    for p, us in constants(record["device"], record["n_ranks"]):
        known.setdefault((p.phase, shapes.parse(p.shape)), []).append((us, p.name, False))
    for r in record["rows"]:
        names = of_kernels(r["kernels"])
        phase = "dispatch" if r["phase"] == "cached" else r["phase"]
        us, name, here = min(
            (k for k in known.get((phase, shapes.of_row(r)), ()) if k[1] in names), default=(None, None, None)
        )
        r |= {"peer": name, "peer_us": us, "peer_here": here, "to_peer": round(r["us"] / us, 2) if us else None}


def report(record):
    """Lines of text: the constants used in comparisons, and their source."""
    held = constants(record["device"], record["n_ranks"])
    if not held:
        return []
    width = max(len(p.name) for p, _ in held)
    return [
        f"peers marked *: {SOURCE}",
        *(f"  {p.name:{width}}  {p.phase:8}  {p.shape:18}  {us:7g} us" for p, us in held),
    ]
