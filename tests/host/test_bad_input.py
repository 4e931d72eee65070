"""What fails a call: the message names value, rule and remedy; nothing is launched and nothing is written."""

import math

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, combine, config, parallel, refused

import epmoe_ref
from epmoe import EPValueError, ExpertParallel, LaunchConfig, LocalWorld

INTEGERS = "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"

X, IDS, W = batch(config())


def with_id(rank, token, slot, value):
    """One id of a rank, all of whose others are -1."""
    ids = [np.full_like(a, -1, np.int64) if r == rank else a for r, a in enumerate(IDS)]
    ids[rank][token, slot] = value
    return ids


TWICE = with_id(1, 0, 0, 3)
TWICE[1][0, 1] = 3
UINT64 = [np.full(a.shape, 2**63, np.uint64) for a in IDS]
FIVE = dict(input_tokens=[np.zeros((5, 16), BF16), X[1]], topk_ids=[np.full((5, 2), -1), IDS[1]])
DISPATCH = {
    "more tokens than max": (FIVE, "rank 0 holds 5 tokens, more than max_tokens_per_rank=4"),
    "id too large": (dict(topk_ids=with_id(1, 2, 1, 4)), r"rank 1: token 2, k 1 holds 4, .*\[0, n_experts=4\); -1"),
    "id below -1": (dict(topk_ids=with_id(0, 1, 0, -2)), r"rank 0: token 1, k 0 holds -2, .*\[0, n_experts=4\)"),
    "id that wraps to 1": (dict(topk_ids=with_id(0, 0, 0, 2**32 + 1)), "rank 0: token 0, k 0 holds 4294967297"),
    "id of uint64": (dict(topk_ids=UINT64), "rank 0: .* holds 9223372036854775808"),
    "id twice in a token": (dict(topk_ids=TWICE), "rank 1: token 0, k 1 holds 3, which k 0 .*distinct"),
    "ids of float": (dict(topk_ids=[a.astype(np.float32) for a in IDS]), "rank 0 has dtype float32, an integer type"),
    "ids of bool": (dict(topk_ids=[a > 0 for a in IDS]), "rank 0 has dtype bool, an integer type"),
    "ids of another shape": (dict(topk_ids=[a[:, :1] for a in IDS]), "topk_ids of rank 0 .*top_k=2"),
    "ids for fewer tokens": (dict(topk_ids=[IDS[0][:-1], IDS[1]]), "topk_ids of rank 0 .*num_tokens=4"),
    "tokens of float64": (
        dict(input_tokens=[a.astype(np.float64) for a in X]),
        "float64, bfloat16 is needed: convert it$",
    ),
    "tokens as bits": (dict(input_tokens=[a.view(np.uint16) for a in X]), "rank 0 has dtype uint16, bfloat16 .*view"),
    "tokens of another hidden": (dict(input_tokens=[a[:, :8] for a in X]), r"rank 0 has shape \(4, 8\), .*hidden=16"),
    "tokens with one axis": (dict(input_tokens=[a.ravel() for a in X]), r"rank 0 has shape \(64,\), .*hidden=16"),
    "no list over ranks": (dict(input_tokens=X[0]), "input_tokens .*list .* 2 ranks"),
    "a rank missing": (dict(input_tokens=X[:1]), "input_tokens has 1 entries.* 2 ranks"),
    "no array": (dict(input_tokens=[None, X[1]]), "rank 0 is a NoneType.*NumPy"),
    "a list of numbers": (dict(input_tokens=[a.tolist() for a in X]), "rank 0 is a list, .*convert .* np.asarray"),
    "a scale as an array": (dict(input_scale=np.ones(2)), "input_scale of rank 0 is array"),
    "out of no Dispatched": (dict(out=X), "out of rank 0 must be a Dispatched of epmoe, not ndarray"),
}


@pytest.mark.parametrize("case", DISPATCH)
def test_dispatch_names_the_place_and_launches_nothing(case, ep):
    changed, said = DISPATCH[case]
    good = dict(input_tokens=X, topk_ids=IDS)
    with refused(ep, said):
        ep.dispatch(**good | changed)
    ep.dispatch(**good)  # and the object is as usable as before


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, 1e-60, 1e60, "1", [1.0]], ids=str)
def test_input_scale_is_positive_and_finite(scale, ep):
    with pytest.raises(EPValueError, match="input_scale"):
        ep.dispatch(X, IDS, input_scale=scale)


COMBINE = {  # what the change makes of outputs, results of dispatch and weights
    "outputs of float32": (lambda y, d, w: ([a.astype("f4") for a in y], d, w), "rank 0 has dtype float32, .*bfloat16"),
    "outputs of another hidden": (lambda y, d, w: ([a[:, :8] for a in y], d, w), "rank 0 .*hidden=16"),
    "Dispatched as outputs": (lambda y, d, w: (d, d, w), "rank 0 is a Dispatched: pass .* like d.output_tokens"),
    "no outputs": (lambda y, d, w: ([y[0], None], d, w), "expert_outputs of rank 1 is a NoneType, which is no array"),
    "one row short": (lambda y, d, w: ([a[:-1] for a in y], d, w), "rank 0 .*rows.*capacity"),
    "outputs of one rank": (lambda y, d, w: (y[:1], d, w), "expert_outputs has 1 entries.* 2 ranks"),
    "one number as weights": (lambda y, d, w: (y, d, 0.5), "router_weights must be a list .* 2 ranks .*, not float"),
    "a scalar as weights": (lambda y, d, w: (y, d, [1.0, 1.0]), "rank 0 .*top_k=2.* a single number is refused"),
    "a function for each rank": (lambda y, d, w: (y, d, [max, max]), "router_weights of rank 0 is a function: .* one"),
    "weights of float64": (lambda y, d, w: (y, d, [a.astype("f8") for a in w]), "rank 0 has dtype float64, float32"),
    "weights of another shape": (lambda y, d, w: (y, d, [a.T.copy() for a in w]), "rank 0 .*top_k=2"),
    "outputs of the last rank": (lambda y, d, w: ([y[0], y[1][:, :8]], d, w), "rank 1 .*hidden=16"),
    "weights of the last rank": (lambda y, d, w: (y, d, [w[0], w[1][:1]]), "rank 1 has shape .*top_k=2"),
    "ranks swapped": (lambda y, d, w: (y, d[::-1], w), "rank 0 .*another round or rank"),
    "no Dispatched": (lambda y, d, w: (y, y, w), "rank 0 .*ndarray"),
    "the reference's": (lambda y, d, w: (y, [object.__new__(epmoe_ref.Dispatched)] * 2, w), "a reference Dispatched"),
}


@pytest.mark.parametrize("case", COMBINE)
def test_combine_names_the_place_and_launches_nothing(case, ep):
    change, said = COMBINE[case]
    x, ids, weights = batch(config(), num_tokens=[4, 4])
    d = ep.dispatch(x, ids)
    y = [a.trimmed().output_tokens.copy() for a in d]
    with refused(ep, said):
        ep.combine(*change(y, d, weights))
    ep.combine(y, d, weights)


def first_argument(token, col, value, a):
    return a


FUNCTIONS = [
    (dict(epilogue=lambda t, c, v: v), "needs router weights"),
    (dict(router_weights=W, epilogue=lambda t, c: 0), "epilogue cannot be called"),
    (dict(router_weights=lambda t: 1.0), "router_weights cannot be called"),
    (dict(router_weights=W, epilogue_args=(1.0,)), "no epilogue"),
    (dict(router_weights=W, router_weights_args=(1.0,)), "no function"),
    (dict(router_weights=W, epilogue=3), "epilogue must be a function, not int"),
    (dict(router_weights=W, elementwise_lambda_fn=X), "elementwise_lambda_fn must be a function, not list"),
    (dict(router_weights=W, epilogue=first_argument, epilogue_args=("x",)), "str"),
    (dict(router_weights=W, epilogue=first_argument, epilogue_args=(2**40,)), "int32"),
    (dict(router_weights=W, epilogue=first_argument, epilogue_args=([1.0, "x"],)), "rank 1 is a str"),
    (dict(router_weights=W, epilogue=first_argument, epilogue_args=(np.zeros(3),)), "float64"),
    (
        dict(router_weights=W, epilogue=first_argument, epilogue_args=([1.0, 2.0, 3.0],)),
        r"epilogue_args\[0\] .* 2 ranks",
    ),
]


def test_functions_are_checked_before_the_launch(ep):
    d = ep.dispatch(X, IDS)
    y = [a.output_tokens for a in d]
    for options, said in FUNCTIONS:
        with refused(ep, said):
            ep.combine(y, d, **options)


class Unreadable(np.ndarray):
    """An array whose address cannot be read."""

    __array_interface__ = ctypes = property(lambda self: 1 / 0)


def test_after_an_error_before_the_launch_the_round_goes_on(ep):
    with pytest.raises(ZeroDivisionError):
        ep.dispatch([a.view(Unreadable) for a in X], IDS)
    d = ep.dispatch(X, IDS)
    with pytest.raises(ZeroDivisionError):
        combine(ep, d, [a.view(Unreadable) for a in W])
    combine(ep, d, W)


def test_a_shared_expert_needs_router_weights():
    with parallel(config(fused_shared_expert=True)) as ep:
        d = ep.dispatch(X, IDS)
        with pytest.raises(EPValueError, match="fused_shared_expert.*router weights"):
            combine(ep, d)


def test_what_is_no_launch_is_refused():
    with pytest.raises(EPValueError, match=r"launch is a dict.*LaunchConfig\(n_sms"):
        parallel(config(), launch=dict(n_sms=4))


@pytest.mark.parametrize("value", ["4", 4.5, math.inf, math.nan, True, np.array([4]), int], ids=str)
@pytest.mark.parametrize("name", ["n_sms", "num_threads"])
def test_a_launch_has_whole_numbers(name, value):
    with pytest.raises(EPValueError, match=f"{name}=.* must be a whole number"):
        LaunchConfig(**{name: value})


@pytest.mark.parametrize("args", [1, "ab", np.ones(3), {}], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("name", ["epilogue_args", "router_weights_args"])
def test_arguments_of_functions_are_a_tuple(name, args, ep):
    d = ep.dispatch(X, IDS)
    with pytest.raises(EPValueError, match=rf"{name} is a .*{name}=\(a,\)"):
        combine(ep, d, W, **{name: args})


def test_what_is_no_configuration_is_refused():
    for call in (lambda: ExpertParallel({}, LocalWorld(2)), lambda: ExpertParallel.plan({})):
        with pytest.raises(EPValueError, match=r"cfg is a dict; an EPConfig\(n_ranks, .* is needed"):
            call()


@pytest.mark.parametrize(
    "name, value, rule", [("EPMOE_SEED", "abc", "a whole number"), ("EPMOE_RACECHECK", "no", "0 or 1")]
)
def test_what_a_variable_of_the_environment_cannot_mean_is_refused(monkeypatch, name, value, rule):
    monkeypatch.setenv(name, value)
    with pytest.raises(EPValueError, match=f"{name}={value} must be {rule}"):
        LocalWorld(2)


@pytest.mark.parametrize(
    "given, said",
    [
        (["recv_count"], "no region 'recv_count'; there are .*dispatch_recv_count.*reserved"),
        ([["A"]], "no region"),
        (["A", 5], r"rank=5 is not of this process, which has \[0, 1\]"),
    ],
    ids=str,
)
def test_a_region_that_is_not_there_is_refused_with_those_that_are(given, said, ep):
    with pytest.raises(EPValueError, match=said):
        ep.region(*given)


def test_world_and_configuration_have_the_same_ranks():
    with pytest.raises(EPValueError, match="n_ranks=2.*n_ranks=3"):
        ExpertParallel(config(), LocalWorld(3))


@pytest.mark.parametrize("n_ranks", [0, -1, 1.5, True, "4", 2**31])
def test_a_world_has_a_rank_and_no_more_than_there_can_be_experts(n_ranks):
    with pytest.raises(EPValueError, match=f"n_ranks={n_ranks!r} must be"):
        LocalWorld(n_ranks)


@pytest.mark.parametrize("seed", range(20))
def test_random_garbage_ids_are_refused_and_nothing_is_written(seed, ep):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(INTEGERS[seed % len(INTEGERS)])
    with refused(ep, "rank 0"):
        ep.dispatch(X, [rng.integers(0, 256, (len(a), 2 * dtype.itemsize), np.uint8).view(dtype) for a in X])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_is_taken(dtype, ep):
    ids = [(np.arange(len(a))[:, None] + [0, 1]) % 4 for a in X]
    for of_rank, wanted in zip(ep.dispatch(X, [a.astype(dtype) for a in ids]), ids):
        assert of_rank.topk_ids.dtype == np.int32
        assert np.array_equal(of_rank.topk_ids, wanted)
