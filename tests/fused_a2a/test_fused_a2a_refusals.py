"""What fused_a2a refuses on the device: before anything is launched, with value, rule and remedy."""

import numpy as np
import pytest
from rows_group import BF16, FP32, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe_ref.errors import EPValueError


@pytest.fixture(scope="module")
def world():
    group, rng = group_of(2), np.random.default_rng(1)
    ids, probs = routing(rng, (4, 3), 4, 2)
    x, maps = tokens(rng, (4, 3), 8), [np.ones((n, 4), bool) for n in (4, 3)]
    *_, handle = fused_a2a.fused_dispatch(x, ids, probs, 4, group)
    *_, hybrid = fused_a2a.hybrid_ep_dispatch(x, maps, None, group, 2, pad_multiple=4)
    return dict(group=group, x=x, ids=ids, probs=probs, maps=maps, handle=handle, hybrid=hybrid)


def at(arrays, rank, place, value):
    copies = [a.copy() for a in arrays]
    copies[rank][place] = value
    return copies


REFUSED = {
    "an id too large": (
        lambda w: fused_a2a.fused_dispatch(
            w["x"], at(w["ids"], 1, (2, 0), 4), w["probs"], 4, w["group"]
        ),
        r"rank 1: token 2, k 0 holds 4, which is outside \[0, num_experts=4\)",
    ),
    "an id twice": (
        lambda w: fused_a2a.fused_dispatch(
            w["x"], at(w["ids"], 0, 1, 3), w["probs"], 4, w["group"]
        ),
        r"rank 0: token 1, k 1 holds 3, which k 0 of the token already holds",
    ),
    "float ids": (
        lambda w: fused_a2a.fused_dispatch(w["x"], w["probs"], w["probs"], 4, w["group"]),
        "integer type",
    ),
    "a rank too few": (
        lambda w: fused_a2a.fused_dispatch(w["x"][:1], w["ids"], w["probs"], 4, w["group"]),
        "x has 1 entries",
    ),
    "experts that do not divide": (
        lambda w: fused_a2a.fused_dispatch(w["x"], w["ids"], w["probs"], 5, w["group"]),
        "num_experts=5 must be a multiple of n_ranks=2",
    ),
    "rows of 12 bytes": (
        lambda w: fused_a2a.fused_dispatch(
            [a[:, :6] for a in w["x"]], w["ids"], w["probs"], 4, w["group"]
        ),
        "must be a positive multiple of 16",
    ),
    "probs of another type": (
        lambda w: fused_a2a.fused_dispatch(
            w["x"], w["ids"], [p.astype(BF16) for p in w["probs"]], 4, w["group"]
        ),
        "token_probs of rank 0 has dtype bfloat16",
    ),
    "the flag without its other": (
        lambda w: fused_a2a.fused_combine(w["x"], w["group"], w["handle"], False, True),
        "allocate_on_comm_stream=True needs async_finish=True",
    ),
    "rows that are not the handle's": (
        lambda w: fused_a2a.fused_combine(w["x"], w["group"], w["handle"]),
        "rows, ",
    ),
    "another handle": (
        lambda w: fused_a2a.fused_combine(w["x"], w["group"], w["hybrid"]),
        "FusedDispatch.forward returned",
    ),
    "the handle of another group": (
        lambda w: fused_a2a.fused_combine(
            tokens(np.random.default_rng(0), w["handle"].num_rows, 8), group_of(2), w["handle"]
        ),
        r"group is .* over another one, .* pass that one",
    ),
    "no handle": (
        lambda w: fused_a2a.hybrid_ep_combine(w["x"], None),
        "HybridEPDispatch.forward returned is needed",
    ),
    "a map of bytes": (
        lambda w: fused_a2a.hybrid_ep_dispatch(
            w["x"], [m.astype(np.uint8) for m in w["maps"]], None, w["group"], 2
        ),
        "dtype uint8, bool is needed: convert",
    ),
    "a map of fewer experts": (
        lambda w: fused_a2a.hybrid_ep_dispatch(w["x"], w["maps"], None, w["group"], 3),
        "4 columns, 6 are needed: n_ranks=2 times num_local_experts=3",
    ),
    "bytes in words": (
        lambda w: fused_a2a.get_buffer(w["group"], "x"),
        "hidden_bytes='x' must be a whole number",
    ),
    "a format for a flag": (
        lambda w: fused_a2a.init_hybrid_ep_buffer(w["group"], 8, 4, 2, 24, 24, "fp8"),
        "fp8_dispatch='fp8' must be True or False",
    ),
    "float32 by expert": (
        lambda w: fused_a2a.hybrid_ep_dispatch(
            [a.astype(FP32) for a in w["x"]], w["maps"], None, w["group"], 2
        ),
        "dtype float32",
    ),
    "a negative budget": (
        lambda w: fused_a2a.hybrid_ep_dispatch(
            w["x"], w["maps"], None, w["group"], 2, num_permuted_tokens=-1
        ),
        "num_permuted_tokens=-1",
    ),
    "more padding than int32 counts": (
        lambda w: fused_a2a.hybrid_ep_dispatch(
            w["x"], w["maps"], None, w["group"], 2, pad_multiple=2**31
        ),
        "num_local_experts=2 times pad_multiple=2147483648, rows of padding=4294967296 must be at most",
    ),
    "another padding": (
        lambda w: fused_a2a.hybrid_ep_combine(
            tokens(np.random.default_rng(0), w["hybrid"].num_rows, 8), w["hybrid"], pad_multiple=8
        ),
        "the handle has 4",
    ),
    "another number of rows": (
        lambda w: fused_a2a.hybrid_ep_combine(
            tokens(np.random.default_rng(0), w["hybrid"].num_rows, 8),
            w["hybrid"],
            num_permuted_tokens=5,
        ),
        "whose handle has",
    ),
    "half an SM": (lambda w: fused_a2a.set_deepep_num_sms(0.5), "num_sms=0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_and_nothing_was_launched(world, case):
    call, said = REFUSED[case]
    before = world["group"].machine.count
    with pytest.raises(EPValueError, match=said):
        call(world)
    assert world["group"].machine.count == before


@pytest.mark.parametrize("dtype, nbytes", [(BF16, 2), (FP32, 4), (np.uint8, 2)], ids=str)
def test_hidden_bytes(dtype, nbytes):
    assert fused_a2a.get_hidden_bytes(np.zeros((3, 24), dtype)) == 24 * nbytes
