"""Bad input to fused_a2a raises EPValueError that names the value, the rule and the remedy."""

import re

import ml_dtypes
import numpy as np
import pytest

from epmoe_ref import EPValueError, fused_a2a

BF16 = ml_dtypes.bfloat16
F32 = np.float32


def refused(message):
    return pytest.raises(EPValueError, match=message)


def rows_world(**changes):
    """Arguments of dispatch_forward: two ranks of 3 and 2 tokens, four experts, top-2."""
    world = dict(
        x=[np.ones((3, 8), BF16), np.ones((2, 8), BF16)],
        token_indices=[np.array([[0, 1], [2, -1], [3, 0]]), np.array([[1, 3], [2, 0]])],
        token_probs=[np.ones((3, 2), F32), np.ones((2, 2), F32)],
        num_experts=4,
    )
    return {**world, **changes}


def hybrid_world(**changes):
    """Arguments of hybrid_dispatch_forward: two ranks of 3 and 2 tokens, four experts; 5 rows on each rank."""
    world = dict(
        x=[np.ones((3, 8), BF16), np.ones((2, 8), BF16)],
        routing_map=[np.tile([True, False, True, False], (n, 1)) for n in (3, 2)],
        probs=[np.ones((3, 4), F32), np.ones((2, 4), F32)],
        num_local_experts=2,
    )
    return {**world, **changes}


def ids(first):
    return [np.array([first, [2, -1], [3, 0]]), np.array([[1, 3], [2, 0]])]


ROWS = {
    "a bare array": (dict(x=np.ones((3, 8), BF16)), r"x is a ndarray.*list with one entry a rank"),
    "no rank": (dict(x=[]), r"x is an empty list.*at least one rank"),
    "a rank too few": (dict(token_probs=[np.ones((3, 2), F32)]), r"token_probs has 1 entries.*2 ranks"),
    "not a matrix": (dict(x=[np.ones(8, BF16), np.ones((2, 8), BF16)]), r"x\[0\] has shape \(8,\)"),
    "two dtypes": (dict(x=[np.ones((3, 8), BF16), np.ones((2, 8), F32)]), r"x\[1\] has dtype float32.*one dtype"),
    "two widths": (dict(x=[np.ones((3, 8), BF16), np.ones((2, 16), BF16)]), r"x\[1\] has 16 columns"),
    "rows of 8 bytes": (dict(x=[np.ones((n, 4), BF16) for n in (3, 2)]), r"4 x 2 = 8 bytes.*multiple of 16"),
    "rows of nothing": (dict(x=[np.ones((n, 0), BF16) for n in (3, 2)]), r"0 bytes.*not empty"),
    "objects": (dict(x=[np.ones((n, 2), object) for n in (3, 2)]), r"dtype object.*without references"),
    "ids of another T": (dict(token_indices=[np.zeros((2, 1), int)] * 2), r"token_indices\[0\] has 2 rows where 3"),
    "float ids": (dict(token_indices=[own.astype(F32) for own in ids([0, 1])]), r"\[0\] has dtype float32: expert ids"),
    "bool ids": (dict(token_indices=[own > 0 for own in ids([0, 1])]), r"has dtype bool: expert ids are integers"),
    "id too large": (dict(token_indices=ids([0, 4])), r"token_indices\[0\]\[0, 1\] = 4: .*\[0, 4\), or -1"),
    "id far too large": (dict(token_indices=ids([0, 2**40])), r"\[0, 1\] = 1099511627776"),
    "unsigned -1": (
        dict(
            token_indices=[np.uint64([[2**64 - 1]] * n) for n in (3, 2)],
            token_probs=[np.ones((n, 1), F32) for n in (3, 2)],
        ),
        r"= 18446744073709551615",
    ),
    "id -2": (dict(token_indices=ids([-2, 0])), r"token_indices\[0\]\[0, 0\] = -2"),
    "id twice": (dict(token_indices=ids([1, 1])), r"token_indices\[0\]\[0\] = \[1, 1\] has expert 1 twice.*-1"),
    "K > E": (dict(token_indices=[np.full((n, 5), -1) for n in (3, 2)]), r"5 ids a token.*num_experts=4"),
    "K = 0": (dict(token_indices=[np.zeros((n, 0), int) for n in (3, 2)]), r"0 ids a token"),
    "probs of float64": (dict(token_probs=[np.ones((n, 2)) for n in (3, 2)]), r"dtype float64: it must be float32"),
    "probs of another K": (dict(token_probs=[np.ones((n, 3), F32) for n in (3, 2)]), r"3 columns where 2 belong"),
    "experts that do not divide": (dict(num_experts=5), r"num_experts=5 must be a multiple of n_ranks=2"),
    "no experts": (dict(num_experts=0), r"num_experts=0 must be at least 1"),
    "half an expert": (dict(num_experts=2.5), r"num_experts=2.5 must be an integer"),
    "a pair on one rank": (dict(x=[(np.ones((3, 128), "u1"), 1), np.ones((2, 128), BF16)]), r"x\[1\] is not a pair"),
    "pairs that are not FP8": (
        dict(x=[(np.ones((n, 128), BF16), np.ones((n, 1), F32)) for n in (3, 2)]),
        r"x \(tokens\)\[0\] has dtype bfloat16: it must be float8_e4m3fn",
    ),
    "pairs of a wrong hidden size": (
        dict(x=[(np.ones((n, 64), ml_dtypes.float8_e4m3fn), np.ones((n, 1), F32)) for n in (3, 2)]),
        r"hidden=64 of x must be a multiple of 128",
    ),
    "scales of another H": (
        dict(x=[(np.ones((n, 256), ml_dtypes.float8_e4m3fn), np.ones((n, 1), F32)) for n in (3, 2)]),
        r"x \(scales\)\[0\] has 1 columns where 2 belong",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_dispatch_refuses(case):
    changes, message = ROWS[case]
    with refused(message):
        fused_a2a.dispatch_forward(**rows_world(**changes))


HYBRID = {
    "float32": (dict(x=[np.ones((n, 8), F32) for n in (3, 2)]), r"dtype float32: it must be bfloat16 or float16"),
    "rows of 8 bytes": (dict(x=[np.ones((n, 4), BF16) for n in (3, 2)]), r"4 x 2 = 8 bytes.*multiple of 16"),
    "a map of ints": (dict(routing_map=[np.ones((n, 4), int) for n in (3, 2)]), r"dtype int64: it must be bool"),
    "a map of another T": (dict(routing_map=[np.ones((2, 4), bool)] * 2), r"routing_map\[0\] has 2 rows where 3"),
    "a map of another E": (dict(routing_map=[np.ones((n, 6), bool) for n in (3, 2)]), r"6 columns.*2 \* 2 = 4"),
    "sparse probs": (dict(probs=[np.ones((n, 2), F32) for n in (3, 2)]), r"probs\[0\] has 2 columns where 4 belong"),
    "probs of float64": (dict(probs=[np.ones((n, 4)) for n in (3, 2)]), r"probs\[0\] has dtype float64"),
    "no local expert": (dict(num_local_experts=0), r"num_local_experts=0 must be at least 1"),
    "negative padding": (dict(pad_multiple=-1), r"pad_multiple=-1 must be at least 0"),
    "padding by a truth value": (dict(pad_multiple=True), r"pad_multiple=True must be an integer"),
    "negative budget": (dict(num_permuted_tokens=-1), r"num_permuted_tokens=-1 must be at least 0"),
    "worlds that do not divide": (dict(p2p_world_size=3), r"p2p_world_size=3 must divide n_ranks=2"),
    "FP8 of float16": (
        dict(x=[np.ones((n, 128), np.float16) for n in (3, 2)], fp8_dispatch=True),
        r"dtype float16.*bfloat16",
    ),
    "FP8 of a wrong hidden size": (dict(fp8_dispatch=True), r"hidden=8: .*multiple of 128"),
}


@pytest.mark.parametrize("case", HYBRID)
def test_hybrid_dispatch_refuses(case):
    changes, message = HYBRID[case]
    with refused(message):
        fused_a2a.hybrid_dispatch_forward(**hybrid_world(**changes))


def test_rows_of_another_routing_are_refused_everywhere():
    recv_x, _, recv_probs, _, handle = fused_a2a.dispatch_forward(**rows_world())
    short = [rows[1:] for rows in recv_x]
    with refused(r"x\[0\] has 3 rows where 4 belong.*one and the same dispatch"):
        fused_a2a.combine_forward(short, handle)
    with refused(r"grad_recv_x\[0\] has 3 rows where 4 belong"):
        fused_a2a.dispatch_backward(handle, short, recv_probs)
    with refused(r"grad_recv_token_probs\[0\] has 3 rows where 4 belong"):
        fused_a2a.dispatch_backward(handle, recv_x, [rows[1:] for rows in recv_probs])
    with refused(r"grad_recv_token_probs\[0\] has 3 columns where 2 belong"):
        fused_a2a.dispatch_backward(handle, recv_x, [np.ones((len(rows), 3), F32) for rows in recv_x])
    with refused(r"grad_combined_x\[0\] has 4 rows where 3 belong"):
        fused_a2a.combine_backward(handle, recv_x)
    with refused(r"x has 1 entries for a world of 2 ranks"):
        fused_a2a.combine_forward(recv_x[:1], handle)


def test_hybrid_rows_of_another_routing_are_refused_everywhere():
    hidden, probs, _, _, handle = fused_a2a.hybrid_dispatch_forward(**hybrid_world())
    short = [rows[1:] for rows in hidden]
    with refused(r"x\[0\] has 4 rows where 5 belong"):
        fused_a2a.hybrid_combine_forward(short, handle)
    with refused(r"grad_hidden\[0\] has 4 rows where 5 belong"):
        fused_a2a.hybrid_dispatch_backward(handle, short, probs)
    with refused(r"grad_probs\[0\] has shape \(4,\) where \(5,\) belongs"):
        fused_a2a.hybrid_dispatch_backward(handle, hidden, [rows[1:] for rows in probs])
    with refused(r"grad_probs\[0\] has dtype float64"):
        fused_a2a.hybrid_dispatch_backward(handle, hidden, [rows.astype(float) for rows in probs])
    with refused(r"grad_combined_x\[0\] has 5 rows where 3 belong"):
        fused_a2a.hybrid_combine_backward(handle, hidden)


def test_combine_refuses_numbers_that_are_not_the_handles():
    hidden, *_, handle = fused_a2a.hybrid_dispatch_forward(**hybrid_world(), num_permuted_tokens=7, pad_multiple=2)
    fused_a2a.hybrid_combine_forward(hidden, handle, num_permuted_tokens=7, pad_multiple=2)
    with refused(r"num_permuted_tokens=8, but .* made 7 rows on rank 0.*leave it out"):
        fused_a2a.hybrid_combine_forward(hidden, handle, num_permuted_tokens=8)
    with refused(r"num_permuted_tokens=6, but .* made 7 rows on rank 1"):
        fused_a2a.hybrid_combine_forward(hidden, handle, num_permuted_tokens=[7, 6])
    with refused(r"pad_multiple=0, but the dispatch of this handle had 2"):
        fused_a2a.hybrid_combine_forward(hidden, handle, pad_multiple=0)


def test_the_sum_of_one_byte_or_64_bit_rows_is_refused():
    recv_x, *_, handle = fused_a2a.dispatch_forward(**rows_world())
    for dtype in (np.float64, ml_dtypes.float8_e4m3fn, np.int32):
        with refused(r"it must be bfloat16 or float16 or float32"):
            fused_a2a.combine_forward([np.ones((len(rows), 16)).astype(dtype) for rows in recv_x], handle)


def test_a_handle_of_the_other_family_is_refused():
    recv_x, *_, rows = fused_a2a.dispatch_forward(**rows_world())
    hidden, *_, hybrid = fused_a2a.hybrid_dispatch_forward(**hybrid_world())
    with refused("handle is a HybridHandle: it must be the RowsHandle"):
        fused_a2a.combine_forward(hidden, hybrid)
    with refused("handle is a RowsHandle: it must be the HybridHandle"):
        fused_a2a.hybrid_combine_forward(recv_x, rows)
    with refused("handle is a NoneType"):
        fused_a2a.combine_backward(None, recv_x)


def test_hidden_bytes_are_those_of_a_matrix():
    with refused(re.escape("x is (8,): hidden bytes belong to one rank's matrix [tokens, hidden]")):
        fused_a2a.get_hidden_bytes(np.ones(8))
    with refused("x is list"):
        fused_a2a.get_hidden_bytes([np.ones((2, 8))])
