"""Vectors of fused_a2a: rows of FusedDispatch and expert-major rows of HybridEPDispatch, forward and backward."""

from functools import partial

from epmoe.check import hybrid, rows
from epmoe.check.compare_rows import pair_of
from epmoe.check.made_arrays import GRAD_X, RETURNED
from epmoe.vectors.files import Array, file_name, one_nan
from epmoe_ref import fused_a2a

N_RANKS = 4


def vectors():
    """(name, about, function that makes the arrays) of every vector."""
    for case in rows.cases(N_RANKS):
        sizes = dict(num_experts=case.n_experts, top_k=case.top_k, hidden=case.hidden)
        about = _about(case, "FusedDispatch, FusedCombine", sizes)
        yield file_name("fused_a2a", case.name), about, partial(_rows_arrays, case)
    for case in hybrid.cases(N_RANKS):
        sizes = dict(num_local_experts=case.n_local_experts, hidden=case.hidden, options=case.options)
        about = _about(case, "HybridEPDispatch, HybridEPCombine", sizes)
        yield file_name("hybrid", case.name), about, partial(_hybrid_arrays, case)


def _about(case, source, sizes):
    return {"case": case.name, "n_tokens": list(case.n_tokens), "n_ranks": N_RANKS, **sizes, "source": source}


def _rows_arrays(case):
    x, ids, probs = case.x(0), case.token_indices(0), case.token_probs(0)
    recv_x, recv_ids, recv_probs, counts, handle = fused_a2a.dispatch_forward(x, ids, probs, case.n_experts)
    returned = case.returned(0, handle)
    grad_rows, grad_row_probs = case.gradients(0, recv_ids)
    grad_x, grad_probs = fused_a2a.dispatch_backward(handle, grad_rows, grad_row_probs)
    grad_combined = case.gradients_of_combined(0)
    return _arrays(
        input=dict(
            x=x,
            token_indices=ids,
            token_probs=probs,
            grad_recv_x=grad_rows,
            grad_recv_token_probs=grad_row_probs,
            grad_combined_x=grad_combined,
        ),
        expert=dict(returned_x=returned),
        output=dict(
            recv_x=recv_x,
            recv_token_indices=recv_ids,
            recv_token_probs=recv_probs,
            tokens_per_expert=counts,
            combined_x=one_nan(fused_a2a.combine_forward(returned, handle)),
            grad_x=grad_x,
            grad_token_probs=grad_probs,
            grad_returned_x=fused_a2a.combine_backward(handle, grad_combined),
        ),
    )


def _hybrid_arrays(case):
    x, routing_map, probs = case.x(0), case.routing_map(0), case.probs(0)
    hidden, row_probs, scales, counts, handle = fused_a2a.hybrid_dispatch_forward(
        x, routing_map, probs, case.n_local_experts, **case.options
    )
    returned, grad_hidden = (case.like_rows(0, use, handle, hidden) for use in (RETURNED, GRAD_X))
    grad_row_probs = case.gradients_of_probs(0, hidden)
    grad_x, grad_probs = fused_a2a.hybrid_dispatch_backward(handle, grad_hidden, grad_row_probs)
    grad_combined = case.gradients_of_combined(0)
    return _arrays(
        input=dict(
            x=x,
            routing_map=routing_map,
            probs=probs,
            grad_hidden=grad_hidden,
            grad_dispatched_probs=grad_row_probs,
            grad_combined_x=grad_combined,
        ),
        expert=dict(returned_x=returned),
        output=dict(
            dispatched_hidden=hidden,
            dispatched_probs=row_probs,
            dispatched_scaling_factor=scales,
            tokens_per_expert=counts,
            overflow=handle.overflow,
            combined_x=one_nan(fused_a2a.hybrid_combine_forward(returned, handle)),
            grad_x=grad_x,
            grad_probs=grad_probs,
            grad_returned_x=fused_a2a.hybrid_combine_backward(handle, grad_combined),
        ),
    )


def _arrays(**sides):
    """Arrays of each side by name, in rank order. Entries that are None are left out. Pairs are NAME and NAME_scales."""
    return [
        Array(name + suffix, side, rank, array)
        for side, named in sides.items()
        for name, per_rank in named.items()
        if per_rank is not None
        for rank in range(N_RANKS)
        if per_rank[rank] is not None
        for suffix, array in zip(("", "_scales"), pair_of(per_rank[rank]))
    ]
