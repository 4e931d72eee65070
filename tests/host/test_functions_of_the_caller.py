"""An output lambda stores its result itself, as with the reference; a value function returns a number, or is refused."""

import numpy as np
import pytest
from worlds_at_hand import batch, config, parallel, scaled_rows

import epmoe_ref
from epmoe.host.user_functions import add_rn, mul_rn
from epmoe_ref.errors import EPStateError, EPValueError, OutOfBoundsError

KERNELS = ["plain", "fast"]
HERE = ["reference", *KERNELS]


def store(token, col, value, result, bias, counts):
    result[token, col] = add_rn(mul_rn(value, np.float32(2)), bias[col])
    counts[token, col] = counts[token, col] + 1


def arrays(x, hidden, spread=1):
    """What `store` writes, by rank: a float32 and an int32 array (every `spread`th column of larger ones)."""
    return [[np.zeros((len(t), hidden * spread), dtype)[:, ::spread] for t in x] for dtype in (np.float32, np.int32)]


CFG = config()
X, IDS, WEIGHTS = batch(CFG, 1, [4, 2])


def parallel_of(where):
    return parallel(CFG, kernels=None if where == "reference" else where)


def run(where, ep, **options):
    """What the reference's combine returns, or that of ep."""
    options = {"router_weights": WEIGHTS, **options}
    if where == "reference":
        d = epmoe_ref.dispatch(CFG, X, IDS)
        return epmoe_ref.combine(CFG, scaled_rows(d, 0.5), d, **options)
    d = ep.dispatch(X, IDS)
    return ep.combine(scaled_rows(d, 0.5), d, **options)


@pytest.mark.by_day
@pytest.mark.parametrize("spread", [1, 2], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_output_lambda_stores_what_the_reference_stores_and_once(kernels, fused, dtype, spread):
    cfg = config(hidden=40, max_tokens_per_rank=5, combine_dtype=dtype)
    x, ids, weights = batch(cfg, 3, [5, 3])
    bias, wanted = np.linspace(-1, 1, 40, dtype=np.float32), arrays(x, 40)
    d_ref = epmoe_ref.dispatch(cfg, x, ids)
    y = scaled_rows(d_ref, 0.5)
    y = [rows.astype({"bf16": rows.dtype, "fp32": np.float32}[dtype]) for rows in y]
    options = dict(elementwise_lambda_fn=store, epilogue_args=(wanted[0], bias, wanted[1]))
    epmoe_ref.combine(cfg, y, d_ref, router_weights=weights, **options)
    with parallel(cfg, kernels=kernels, fused=fused, seed=7) as ep:
        for _ in range(2):
            stored = arrays(x, 40, spread)
            d = ep.dispatch(x, ids)
            rows = [a.astype(b.dtype) for a, b in zip(scaled_rows(d, 0.5), y)]
            options["epilogue_args"] = stored[0], bias, stored[1]
            assert ep.combine(rows, d, weights, **options) == [None, None]
            for got, want in zip((*stored[0], *stored[1]), (*wanted[0], *wanted[1])):
                assert np.array_equal(got, want)
            assert all((count == 1).all() for count in stored[1])


@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_may_store_into_one_array(kernels):
    # its elements are copied and come back
    shared = np.zeros((2, 4 * 16 + 1), np.float32)[:, 1:].T[::-1].T[:, ::-1]

    def own(token, col, value, table, rank):
        table[rank, token * 16 + col] = value

    with parallel_of(kernels) as ep:
        run(kernels, ep, elementwise_lambda_fn=own, epilogue_args=(shared, [0, 1]))
        want = run(kernels, ep)
    for rank in range(2):
        stored = shared[rank, : len(X[rank]) * 16].reshape(-1, 16)
        assert np.array_equal(stored, np.asarray(want[rank], np.float32))


def returning(value):
    def function(*arguments):
        return value

    return function


WRONG = {"nothing": None, "a str": "1", "a list": [1.0], "a complex": 1j, "of shape": np.zeros((2, 2), np.float32)}


@pytest.mark.by_day(12)
@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("what", ["epilogue", "router_weights"])
def test_a_value_function_that_returns_no_number_is_refused(what, wrong, where):
    with parallel_of(where) as ep:
        with pytest.raises(EPValueError, match=what):
            run(where, ep, **{what: returning(WRONG[wrong])})
        if where != "reference":  # nothing was launched: the round goes on
            assert ep._rounds.state == "dispatched"


def test_tensors_are_arguments_as_arrays_are():
    torch = pytest.importorskip("torch")
    options = dict(
        router_weights=lambda token, k, table: table[token, k],
        epilogue=lambda token, col, value, bias: add_rn(value, bias[col]),
    )
    made = []
    for of in np.asarray, torch.from_numpy:
        options["router_weights_args"] = ([of(w) for w in WEIGHTS],)
        options["epilogue_args"] = (of(np.ones(16, np.float32)),)
        with parallel(CFG) as ep:
            made.append(run("plain", ep, **options))
    assert all(np.array_equal(a, b) for a, b in zip(*made))


@pytest.mark.parametrize("wrong", [None, "1", 1j])
def test_an_input_scale_that_is_no_number_is_refused(wrong):
    cfg = config(hidden=64, token_format="nvfp4")
    with parallel(cfg) as ep, pytest.raises(EPValueError, match="input_scale"):
        ep.dispatch(*batch(cfg)[:2], returning(wrong))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_function_that_returns_nothing_for_some_tokens_ends_the_round(kernels):
    def sometimes(token, col, value):
        if token < 2:
            return value

    with parallel_of(kernels) as ep:
        with pytest.raises(EPValueError, match="epilogue sometimes returns nothing"):
            run(kernels, ep, epilogue=sometimes)
        with pytest.raises(EPStateError, match="reset"):
            ep.dispatch(X, IDS)
        ep.reset()
        run(kernels, ep)


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize(
    "options, told",
    [
        (dict(elementwise_lambda_fn=lambda token, col, value: value), "elementwise_lambda_fn"),
        (dict(elementwise_lambda_fn=store), "elementwise_lambda_fn cannot be called"),
        (dict(elementwise_lambda_fn=returning(None), epilogue=returning(1.0)), "epilogue"),
        (dict(elementwise_lambda_fn=returning(None), router_weights=None), "router.weights"),
    ],
    ids=["returns a value", "takes more", "with an epilogue", "without weights"],
)
def test_what_is_no_output_lambda_is_refused(options, told, where):
    with parallel_of(where) as ep, pytest.raises(EPValueError, match=told):
        run(where, ep, **options)


def write(token, col, value, table):
    table[token, col] = value


def weigh_and_write(token, k, table):
    table[token, k] = 2
    return 1.0


def pass_and_write(token, col, value, table):
    write(token, col, value, table)
    return value


def frozen(array):
    array.flags.writeable = False
    return array


ONLY_READ = {
    "a read-only array": ("elementwise_lambda_fn", write, frozen(np.zeros((4, 16), np.float32))),
    "an array that is widened": ("elementwise_lambda_fn", write, np.zeros((4, 16), np.float16)),
    "an epilogue's": ("epilogue", pass_and_write, np.zeros((4, 16), np.float32)),
    "a router weight's": ("router_weights", weigh_and_write, np.zeros((4, 16), np.float32)),
}


def with_table(what, function, table):
    args = "router_weights_args" if what == "router_weights" else "epilogue_args"
    return {what: function, args: (table,)}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", ONLY_READ)
def test_a_store_into_an_array_that_is_only_read_is_refused(case, kernels):
    what, function, table = ONLY_READ[case]

    def later(token, *others):  # not for the first token, for which the function is tried
        return function(token, *others) if token else 1.0 if what != "elementwise_lambda_fn" else None

    with parallel_of(kernels) as ep:
        with pytest.raises(EPValueError, match=f"{what} .*may only read"):
            run(kernels, ep, **with_table(what, function, table))
        assert ep._rounds.state == "dispatched"
        ep.reset()
        with pytest.raises((TypeError, OutOfBoundsError), match="read-only"):
            run(kernels, ep, **with_table(what, later, table))
    assert not table.any()


def test_an_array_whose_elements_overlap_is_not_stored_into():
    table = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (4, 16), (0, 4))
    with parallel(CFG) as ep:
        with pytest.raises(EPValueError, match=r"epilogue_args\[0\] of rank 0 .*lie in one place"):
            run("plain", ep, elementwise_lambda_fn=write, epilogue_args=(table,))
        assert ep._rounds.state == "dispatched"


FAULTY = {
    "NameError": lambda token, col, value: undefined(value),  # noqa: F821
    "AttributeError": lambda token, col, value: np.sigmoid(value),
    "TypeError": lambda token, col, value: len(value),
}


@pytest.mark.parametrize("error", FAULTY)
@pytest.mark.parametrize("what", ["epilogue", "elementwise_lambda_fn"])
def test_a_function_that_can_never_be_called_is_refused_before_the_launch(what, error):
    with parallel(CFG) as ep:
        with pytest.raises(EPValueError, match=f"{what} <lambda> cannot be called: {error}"):
            run("plain", ep, **{what: FAULTY[error]})
        assert ep._rounds.state == "dispatched"


def test_an_array_that_is_widened_is_tried_as_float32():
    bias = np.ones(16, np.float16)
    with parallel(CFG) as ep:
        run("plain", ep, epilogue=lambda token, col, value, bias: add_rn(value, bias[col]), epilogue_args=(bias,))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e-60])
def test_a_function_returns_a_scale_that_is_positive_and_finite(scale):
    cfg = config(hidden=64, token_format="nvfp4")
    x, ids, _ = batch(cfg)
    with parallel(cfg) as ep:
        with pytest.raises(EPValueError, match="returns .*positive and finite"):
            ep.dispatch(x, ids, returning(scale))
        with pytest.raises(EPValueError, match="cannot be called: IndexError"):
            ep.dispatch(x, ids, lambda i: [][0])
        ep.dispatch(x, ids)
