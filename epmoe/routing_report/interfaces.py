"""The interfaces for dispatch and combine: their bytes, floors, expected times and memory."""

from typing import NamedTuple

from epmoe.host import rank_memory
from epmoe.routing_report import counts, measured
from epmoe_ref.config import MAX_GPUS_PER_NODE, EPConfig

ROW_FORMATS = ("bf16", "fp8_blockwise")  # formats of fused_dispatch and hybrid_ep_dispatch
COMBINE_BYTES = 2  # bf16
RESULTS_IN_POOL = 3  # rows: the pool's staging area and two results (fused_a2a.buffer)
INTERFACES = {
    "pairs_plain": "ExpertParallel, plain",
    "pairs": "ExpertParallel, fast",
    "rows": "fused_dispatch",
    "expert_major": "hybrid_ep_dispatch",
}


class Cost(NamedTuple):
    """One phase of one step with one interface.

    total_bytes: sent by all ranks together to other ranks. busiest_bytes: the most that one rank sends or receives.
    floor_us: busiest_bytes at the link's speed, None if that is not known. expected_us: expected time of our kernels,
    None if not measured or if no bytes cross links.
    """

    total_bytes: int
    busiest_bytes: int
    floor_us: float | None
    expected_us: float | None


class Sizes(NamedTuple):
    """Factors of the counts. link_gbps: 10**9 bytes a second that each rank can send, and receive at the same time.

    link_known: whether the ranks have such links, so that a time can be expected.
    """

    cfg: EPConfig
    link_gbps: float
    link_known: bool = True

    @property
    def row_bytes(self):
        """Bytes of one token's values and scales."""
        return self.cfg.format.values_size() + self.cfg.format.scales_size()

    @property
    def message_bytes(self):
        """Bytes of one message: values, scales, src_info and topk_info, each padded."""
        return self.cfg.format.msg_size()

    @property
    def combine_bytes(self):
        """Bytes of one row that combine sends back."""
        return COMBINE_BYTES * self.cfg.hidden


def config(n_ranks, n_experts, top_k, hidden, tokens, token_format):
    """The EPConfig of a routing. More than 8 ranks means several hosts (SHMEM). Errors: EPValueError."""
    several = n_ranks > MAX_GPUS_PER_NODE
    p2p = max(d for d in range(1, MAX_GPUS_PER_NODE + 1) if n_ranks % d == 0) if several else n_ranks
    return EPConfig(
        n_ranks,
        n_experts,
        top_k,
        hidden,
        max(tokens, 1),
        token_format=token_format,
        p2p_world_size=p2p,
        use_shmem=several,
    )


def offered(interface, cfg):
    """None if this project has the interface for the configuration, else why not."""
    if interface.startswith("pairs"):
        return None
    if cfg.token_format not in ROW_FORMATS:
        return f"sends {' and '.join(ROW_FORMATS)}, not {cfg.token_format}"
    if cfg.n_ranks > MAX_GPUS_PER_NODE:
        return f"needs all ranks in one p2p world of at most {MAX_GPUS_PER_NODE}"
    return None


def costs(interface, step, sizes):
    """(Cost of dispatch, Cost of combine) of one step. None if the interface is not possible here."""
    if offered(interface, sizes.cfg) is not None:
        return None, None
    parts = {
        "pairs_plain": [(step.pairs, sizes.message_bytes)],
        # the payload once for each rank, in one message; the token's other messages there refer to it
        "pairs": [
            (step.rows, sizes.cfg.format.token_size()),
            (step.pairs, sizes.message_bytes - sizes.cfg.format.token_size()),
        ],
    }.get(interface, [(step.rows, sizes.row_bytes)])
    back = step.pairs if interface.startswith("pairs") else step.rows
    dispatch = sum(matrix * nbytes for matrix, nbytes in parts)
    return (
        _cost(interface, "dispatch", dispatch, sizes, sizes.cfg.token_format),
        _cost(interface, "combine", back * sizes.combine_bytes, sizes, "bf16"),
    )


def _cost(interface, phase, matrix, sizes, token_format):
    most = counts.busiest(matrix)
    floor_us = most / sizes.link_gbps / 1e3 if sizes.link_known else None
    known = most and sizes.link_known
    us = measured.expected_us(interface, phase, token_format, most, floor_us) if known else None
    return Cost(int(counts.off_rank(matrix).sum()), most, floor_us, us)


def result_bytes(interface, step, sizes):
    """Bytes of token rows that dispatch returns on the rank that receives most, including its own tokens'."""
    received = (step.rows if interface == "rows" else step.pairs).sum(axis=0)
    return int(received.max(initial=0)) * sizes.row_bytes


def memory_bytes(interface, steps, sizes):
    """Bytes that one rank allocates for one round: buffers, counters and results.

    ExpertParallel and the pools of the others have room for the worst case, cfg.max_tokens_per_rank on every rank. Only
    the expert rows of hybrid_ep_dispatch have their exact size.
    """
    cfg = sizes.cfg
    if interface.startswith("pairs"):
        return sum(use.planned_bytes for use in rank_memory.plan(cfg) if use.buffer != "unreduced combine result")
    rows = cfg.n_ranks * cfg.max_tokens_per_rank
    back = cfg.max_tokens_per_rank * sizes.combine_bytes
    if interface == "rows":
        # ids int64, probs float32
        return RESULTS_IN_POOL * rows * (sizes.row_bytes + 12 * cfg.top_k) + back
    staged = rows * (sizes.row_bytes + 8 * cfg.n_local_experts)  # slots int32, probs float32
    most = max((int(step.by_rank.max(initial=0)) for step in steps), default=0)
    return staged + most * (sizes.row_bytes + 4) + back
