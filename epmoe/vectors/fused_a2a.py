"""Vectors of fused_a2a: rows of FusedDispatch and expert-major rows of HybridEPDispatch, forward and backward."""

from dataclasses import dataclass

import numpy as np

from epmoe.check import random_bits, rows
from epmoe.vectors.files import Array, file_name
from epmoe_ref import fused_a2a

N_RANKS = 4
GRAD_X, GRAD_PROBS, GRAD_OUT, PROBS, RETURNED = range(200, 205)


def vectors():
    """(name, about, arrays) of every vector."""
    for case in rows.cases(N_RANKS):
        about = {"case": case.name, "n_tokens": list(case.n_tokens), "n_ranks": N_RANKS, "num_experts": case.n_experts,
                 "top_k": case.top_k, "hidden": case.hidden, "source": "FusedDispatch, FusedCombine"}
        yield file_name("fused_a2a", case.name), about, _rows_arrays(case)
    for case in HYBRID:
        about = {"case": case.name, "n_tokens": list(case.n_tokens), "n_ranks": N_RANKS,
                 "num_local_experts": case.n_local_experts, "hidden": case.hidden, "options": case.options,
                 "source": "HybridEPDispatch, HybridEPCombine"}
        yield file_name("hybrid", case.name), about, _hybrid_arrays(case)


def _floats(dtype, seed, use, rank, shape):
    values = random_bits.floats(dtype, random_bits.stream(seed, use, rank), int(np.prod(shape)), exponents=(-4, 1))
    return values.reshape(shape)


def _rows_arrays(case):
    x, ids, probs = case.x(0), case.token_indices(0), case.token_probs(0)
    recv_x, recv_ids, recv_probs, counts, handle = fused_a2a.dispatch_forward(x, ids, probs, case.n_experts)
    pairs = [np.stack(pair, axis=1) for pair in zip(handle.src_rank, handle.src_token)]
    returned = [case.returned(0, rank, rows_) for rank, rows_ in enumerate(pairs)]
    grad_rows = [_floats("bf16", case.seed, GRAD_X, rank, r.shape) for rank, r in enumerate(recv_x)]
    grad_row_probs = [np.where(i >= 0, _floats("fp32", case.seed, GRAD_PROBS, rank, i.shape), np.float32(0))
                      for rank, i in enumerate(recv_ids)]
    grad_x, grad_probs = fused_a2a.dispatch_backward(handle, grad_rows, grad_row_probs)
    grad_combined = [_floats("bf16", case.seed, GRAD_OUT, rank, a.shape) for rank, a in enumerate(x)]
    return _arrays(
        input=dict(x=x, token_indices=ids, token_probs=probs, grad_recv_x=grad_rows,
                   grad_recv_token_probs=grad_row_probs, grad_combined_x=grad_combined),
        expert=dict(returned_x=returned),
        output=dict(recv_x=recv_x, recv_token_indices=recv_ids, recv_token_probs=recv_probs, tokens_per_expert=counts,
                    combined_x=fused_a2a.combine_forward(returned, handle), grad_x=grad_x, grad_token_probs=grad_probs,
                    grad_returned_x=fused_a2a.combine_backward(handle, grad_combined)))


@dataclass(frozen=True)
class HybridCase:
    """One world of hybrid_dispatch_forward; options are its keyword arguments."""

    name: str
    seed: int
    options: dict
    n_tokens: tuple = (8, 5, 0, 6)
    n_local_experts: int = 3
    top_k: int = 4
    hidden: int = 128
    with_probs: bool = True


HYBRID = (
    HybridCase("exact rows", 300, {}),
    HybridCase("padding to 16", 301, {"pad_multiple": 16}),
    HybridCase("more rows than needed", 302, {"num_permuted_tokens": 64, "pad_multiple": 8}),
    HybridCase("overflow", 303, {"num_permuted_tokens": 17}),
    HybridCase("overflow by padding", 304, {"num_permuted_tokens": 40, "pad_multiple": 16}),
    HybridCase("no room at all", 305, {"num_permuted_tokens": 0}),
    HybridCase("fp8", 306, {"fp8_dispatch": True, "pad_multiple": 4}, hidden=256),
    HybridCase("two p2p worlds", 307, {"p2p_world_size": 2}),
    HybridCase("without probs", 308, {}, with_probs=False),
    HybridCase("no tokens at all", 309, {"pad_multiple": 8}, n_tokens=(0, 0, 0, 0)),
    HybridCase("every expert", 310, {}, top_k=12),
)


def _hybrid_arrays(case):
    x = [_floats("bf16", case.seed, rows.X, rank, (n, case.hidden)) for rank, n in enumerate(case.n_tokens)]
    routing_map = [_routing_map(case, rank, n) for rank, n in enumerate(case.n_tokens)]
    probs = None
    if case.with_probs:
        probs = [np.abs(_floats("fp32", case.seed, PROBS, rank, m.shape)) for rank, m in enumerate(routing_map)]
    hidden, row_probs, scales, counts, handle = fused_a2a.hybrid_dispatch_forward(
        x, routing_map, probs, case.n_local_experts, **case.options)
    returned, grad_hidden, grad_row_probs = [], [], []
    for rank, rows_ in enumerate(hidden):
        returned.append(_floats("bf16", case.seed, RETURNED, rank, rows_.shape))
        grad_hidden.append(_floats("bf16", case.seed, GRAD_X, rank, rows_.shape))
        grad_row_probs.append(_floats("fp32", case.seed, GRAD_PROBS, rank, rows_.shape[:1]))
    grad_x, grad_probs = fused_a2a.hybrid_dispatch_backward(handle, grad_hidden,
                                                            grad_row_probs if case.with_probs else None)
    grad_combined = [_floats("bf16", case.seed, GRAD_OUT, rank, a.shape) for rank, a in enumerate(x)]
    return _arrays(
        input=dict(x=x, routing_map=routing_map, probs=probs, grad_hidden=grad_hidden,
                   grad_dispatched_probs=grad_row_probs if case.with_probs else None, grad_combined_x=grad_combined),
        expert=dict(returned_x=returned),
        output=dict(dispatched_hidden=hidden, dispatched_probs=row_probs, dispatched_scaling_factor=scales,
                    tokens_per_expert=counts, overflow=handle.overflow,
                    combined_x=fused_a2a.hybrid_combine_forward(returned, handle), grad_x=grad_x, grad_probs=grad_probs,
                    grad_returned_x=fused_a2a.hybrid_combine_backward(handle, grad_combined)))


def _routing_map(case, rank, n):
    n_experts = N_RANKS * case.n_local_experts
    ids = random_bits.permutations(random_bits.stream(case.seed, rows.ROUTING, rank), n, n_experts)[:, :case.top_k]
    routed = np.zeros((n, n_experts), bool)
    routed[np.arange(n)[:, None], ids] = True
    return routed


def _arrays(**sides):
    """Arrays of each side by name, in the order of ranks; entries that are None are left out."""
    return [Array(name, side, rank, per_rank[rank]) for side, named in sides.items() for name, per_rank in named.items()
            if per_rank is not None for rank in range(N_RANKS) if per_rank[rank] is not None]
