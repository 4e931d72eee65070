"""Refusals of dispatch and combine: each message names rank, token, k and value, and the rule."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import config, world

from epmoe_ref import EPConfig, EPValueError, combine, dispatch

CFG = config(max_tokens=150)


def refused(words):
    return pytest.raises(EPValueError, match=words)


def with_ids(rank, change):
    x, ids = world(CFG)
    ids[rank] = change(ids[rank].copy())
    return x, ids


@pytest.mark.parametrize(
    "rank, token, k, value, dtype",
    [
        (0, 3, 2, 16, np.int32),
        (2, 39, 3, -2, np.int64),
        (3, 0, 0, 2**32 + 1, np.int64),
        (3, 7, 1, -(2**31), np.int32),
        (0, 1, 0, 2**63, np.uint64),
        (2, 5, 1, 65535, np.uint16),
        (0, 0, 0, 2**31, np.uint32),
        (0, 0, 0, 127, np.int8),
    ],
)
def test_ids_out_of_range(rank, token, k, value, dtype):
    def change(ids):
        ids = np.where(ids < 0, 0, ids) if np.dtype(dtype).kind == "u" else ids
        ids = ids.astype(dtype)
        ids[token, k] = value
        return ids

    with refused(rf"topk_ids of rank {rank}, token {token}, k {k} is {value} and must be in \[0, n_experts=16\)"):
        dispatch(CFG, *with_ids(rank, change))


def test_an_id_twice_in_one_token():
    ids = np.array([[0, 1, 2, 3], [-1, 7, -1, 7], [5, 5, 5, 5]])
    x, none = [np.ones((3, 24), bfloat16)] * 4, np.full((3, 4), -1)
    with refused(r"rank 2, token 1, k 3 is 7, as k 1 is already.*\(2 such tokens\)"):
        dispatch(CFG, x, [none, none, ids, ids])


@pytest.mark.parametrize(
    "ids, words",
    [
        (np.zeros((13, 3), int), r"topk_ids of rank 0 has shape \[13, 3\] and must be \[num_tokens, top_k=4\]"),
        (np.zeros(52, int), r"shape \[52\]"),
        (np.zeros((13, 4)), "dtype float64 and must be of an integer type"),
        (np.zeros((13, 4), bool), "dtype bool"),
        (np.full((151, 4), -1), "rank 0 has 151 tokens and max_tokens_per_rank is 150"),
        (np.full((12, 4), -1), r"input_tokens of rank 0 has shape \[13, 24\] and must be \[12, hidden=24\]"),
    ],
)
def test_form_of_ids(ids, words):
    with refused(words):
        dispatch(CFG, *with_ids(0, lambda _: ids))


@pytest.mark.parametrize(
    "tokens, words",
    [
        (np.ones((13, 24), np.float64), "input_tokens of rank 0 has dtype float64 and must be bfloat16"),
        (np.ones((13, 32), bfloat16), r"shape \[13, 32\] and must be \[13, hidden=24\]"),
        (np.ones(13 * 24, bfloat16), r"shape \[312\]"),
        ([[1] * 24] * 13, "type list and must be a NumPy array"),
    ],
)
def test_form_of_tokens(tokens, words):
    x, ids = world(CFG)
    with refused(words):
        dispatch(CFG, [tokens, *x[1:]], ids)


def test_worlds_are_lists_over_ranks():
    x, ids = world(CFG)
    with refused("input_tokens has 3 entries and must be a list over ranks, n_ranks=4"):
        dispatch(CFG, x[:3], ids)
    with refused("topk_ids has type ndarray and must be a list over ranks"):
        dispatch(CFG, x, ids[0])
    d, outputs = dispatch(CFG, x, ids), [np.ones((1, 24), bfloat16)] * 4
    with refused("dispatched has type Dispatched"):
        combine(CFG, outputs, d[0])
    with refused("expert_outputs has 2 entries"):
        combine(CFG, outputs[:2], d)


@pytest.mark.parametrize("scale", [0.0, -1, np.nan, np.inf, 1e-60, 1e60, [1, 1, 1, -1], "big", lambda i: -1.0])
def test_input_scales(scale):
    cfg = config("nvfp4", False, 128)
    with refused("input_scale of rank [03]=.* must be one positive finite"):
        dispatch(cfg, *world(cfg), input_scale=scale)


def test_input_scales_are_one_a_rank():
    cfg = config("nvfp4", False, 128)
    with refused("input_scale has 2 entries"):
        dispatch(cfg, *world(cfg), input_scale=[1, 1])


def test_nothing_is_refused_that_is_allowed():
    x, ids = world(CFG)
    ids[0][:] = -1
    dispatch(CFG, tuple(x), tuple(i.tolist() if len(i) else i for i in ids))


def combine_world(cfg):
    x, ids = world(cfg)
    d = dispatch(cfg, x, ids)
    return (
        [np.ones((len(r.src_info), cfg.hidden), bfloat16) for r in d],
        d,
        [np.ones((r.num_tokens, cfg.top_k), np.float32) for r in d],
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda y: y.astype(np.float32), r"expert_outputs of rank 1 is float32\[.*\] and must be .* of bfloat16"),
        (lambda y: y[:-1], r"expert_outputs of rank 1 is bfloat16\[.*\] and must be \[\d+, hidden=24\]"),
        (lambda y: y[:, :8], r"hidden=24"),
        (lambda y: y.tolist(), "of type list"),
    ],
)
def test_form_of_expert_outputs(change, words):
    y, d, w = combine_world(CFG)
    with refused(words):
        combine(CFG, [y[0], change(y[1]), *y[2:]], d, router_weights=w)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: 0.5, "router_weights=0.5 is a scalar"),
        (lambda w: np.float32(1), "is a scalar"),
        (lambda w: w[:3], "router_weights has 3 entries"),
        (lambda w: w[0], "router_weights has type ndarray"),
        (lambda w: [w[0].astype(float), *w[1:]], r"rank 0 is float64\[13, 4\] and must be float32 \[13, 4\]"),
        (lambda w: [w[0][:, :3], *w[1:]], r"float32\[13, 3\]"),
        (lambda w: [None, *w[1:]], "of type NoneType"),
    ],
)
def test_form_of_router_weights(change, words):
    y, d, w = combine_world(CFG)
    with refused(words):
        combine(CFG, y, d, router_weights=change(w))


def test_combinations_without_a_meaning():
    y, d, w = combine_world(CFG)
    with refused("epilogue without router_weights"):
        combine(CFG, y, d, epilogue=lambda t, c, v: v)
    of_epilogue = dict(epilogue=lambda t, c, v, a, b: v, epilogue_args=(1, [1, 2]))
    with refused(r"epilogue_args\[1\] is a list of 2 entries and must have one entry a rank"):
        combine(CFG, y, d, router_weights=w, **of_epilogue)
    of_weights = dict(router_weights=lambda t, k, a: 1, router_weights_args=([1],))
    with refused(r"router_weights_args\[0\] is a list of 1 entries"):
        combine(CFG, y, d, **of_weights)
    cfg = config(fused_shared_expert=True)
    y, d, w = combine_world(cfg)
    with refused("fused_shared_expert=True without router_weights"):
        combine(cfg, y, d)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(router_weights=lambda token: token), r"router_weights cannot be called with \(token, k\)"),
        (dict(epilogue=lambda token, col: col), r"epilogue cannot be called with \(token, col, value\)"),
        (dict(epilogue=lambda token, col, value, bias: value), r"epilogue cannot be called .* 0 of epilogue_args"),
        (dict(epilogue=3), "epilogue is of type int and must be a function"),
        (dict(epilogue_args=(1.0,)), "epilogue_args has 1 entries, and there is no epilogue function"),
        (dict(router_weights_args=(1.0,)), "router_weights_args has 1 entries"),
        (dict(elementwise_lambda_fn=lambda t, c: None), r"elementwise_lambda_fn cannot be called .* of epilogue_args"),
        (
            dict(elementwise_lambda_fn=lambda t, c, v: v),
            "elementwise_lambda_fn returned ndarray and must return nothing",
        ),
        (dict(elementwise_lambda_fn=lambda t, c, v: None, epilogue=lambda t, c, v: v), "give one of them"),
        (dict(elementwise_lambda_fn=lambda t, c, v: None, router_weights=None), "elementwise_lambda_fn without router"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(change, said):
    cfg = EPConfig(1, 2, 1, 8, 2)
    x, ids = [np.ones((2, 8), bfloat16)], [np.array([[0], [1]])]
    d = dispatch(cfg, x, ids)
    arguments = dict(router_weights=[np.ones((2, 1), np.float32)]) | change
    with refused(said):
        combine(cfg, [d[0].output_tokens], d, **arguments)


@pytest.mark.parametrize(
    "token_format, scale", [("bf16", 0.0), ("bf16", True), ("nvfp4", True), ("mxfp8", float("nan"))]
)
def test_input_scales_are_checked_with_every_format(token_format, scale):
    cfg = EPConfig(1, 2, 1, 128, 2, token_format=token_format)
    with refused("must be one positive finite number"):
        dispatch(cfg, [np.ones((2, 128), bfloat16)], [np.array([[0], [1]])], input_scale=scale)


@pytest.mark.parametrize(
    "returned, said",
    [
        (None, "returned None and must return a value"),
        ("1.0", "returned str"),
        (b"1", "returned bytes"),
        ([1.0, 2.0], "returned list"),
        ((1.0,), "returned tuple"),
        (1j, "returned complex numbers"),
        (np.ones((1, 1), complex), "returned complex numbers"),
        (np.ones(1), r"returned shape \[1\]"),
        (np.ones((3, 3, 3)), r"returned shape \[3, 3, 3\]"),
        (slice(1), "returned slice"),
        (np.array(["a"]), "returned an array of <U1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["router_weights", "epilogue", "input_scale"])
def test_a_value_function_that_returns_no_number_for_each_element_is_refused(name, returned, said):
    cfg = EPConfig(1, 2, 1, 64, 2, token_format="nvfp4")
    x, ids = [np.ones((2, 64), bfloat16)], [np.array([[0], [1]])]
    with refused(f"{name} {said}"):
        d = dispatch(cfg, x, ids, input_scale=(lambda i: returned) if name == "input_scale" else 1.0)
        weights = [np.ones((2, 1), np.float32)]
        functions = (
            {"router_weights": lambda token, k: returned}
            if name == "router_weights"
            else {"router_weights": weights, "epilogue": lambda token, col, value: returned}
        )
        combine(cfg, [np.ones((2, 64), bfloat16)], d, **functions)
