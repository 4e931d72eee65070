"""What fails a call: the message names value, rule and remedy; nothing is launched and nothing is written."""

import math

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, config, parallel, regions

from epmoe import EPConfig, EPError, EPValueError, ExpertParallel, LaunchConfig, LocalWorld

# change of the configuration -> what its message must contain
CONFIGURATIONS = [
    (dict(hidden=12), ["hidden=12", "multiple of 8", "pad"]),
    (dict(hidden=64, token_format="fp8_blockwise"), ["hidden=64", "multiple of 128"]),
    (dict(hidden=32, token_format="nvfp4"), ["hidden=32", "multiple of 64"]),
    (dict(hidden=64, token_format="mxfp4"), ["hidden=64", "multiple of 128"]),
    (dict(hidden=64, token_format="mxfp8"), ["hidden=64", "multiple of 128"]),
    (dict(hidden=16, token_format="mxfp4_rows"), ["hidden=16", "multiple of 32"]),
    (dict(top_k=5), ["top_k=5", "n_experts=4"]),
    (dict(n_experts=5), ["n_experts=5", "multiple of n_ranks=2"]),
    (dict(n_experts=65536), ["n_experts=65536", "65535"]),
    (dict(n_ranks=0), ["n_ranks=0", "at least 1"]),
    (dict(max_tokens_per_rank=0), ["max_tokens_per_rank=0", "at least 1"]),
    (dict(token_format="fp7"), ["fp7", "bf16"]),
    (dict(p2p_world_size=1), ["p2p_world_size=1", "use_shmem"]),
]


@pytest.mark.parametrize("change, parts", CONFIGURATIONS, ids=[str(c) for c, _ in CONFIGURATIONS])
def test_configuration_names_value_rule_and_remedy(change, parts):
    with pytest.raises(EPValueError) as error:
        config(**change)
    assert all(part in str(error.value) for part in parts), error.value


def with_id(ids, rank, token, slot, value, dtype=np.int64):
    ids = [a.astype(dtype) for a in ids]
    ids[rank][token, slot] = value
    return ids


def ones(ids, rank):
    """All slots of a rank -1, so that only the id put in is there."""
    return [np.full_like(a, -1) if r == rank else a for r, a in enumerate(ids)]


def dispatch_cases():
    cfg = config()
    x, ids, _ = batch(cfg)
    too_many = [np.zeros((5, 16), BF16), x[1]]
    yield (
        "more tokens than max",
        too_many,
        [np.full((5, 2), -1), ids[1]],
        ["rank 0", "5 tokens", "max_tokens_per_rank=4"],
    )
    yield (
        "id too large",
        x,
        with_id(ones(ids, 1), 1, 2, 1, 4),
        ["rank 1", "token 2, k 1", "holds 4", "n_experts=4", "-1"],
    )
    yield (
        "id below -1",
        x,
        with_id(ones(ids, 0), 0, 1, 0, -2),
        ["rank 0", "token 1, k 0", "holds -2", "[0, n_experts=4)"],
    )
    yield (
        "id that wraps to a good int32",
        x,
        with_id(ones(ids, 0), 0, 0, 0, 2**32 + 1),
        ["rank 0", "token 0, k 0", "holds 4294967297"],
    )
    yield (
        "id of uint64",
        x,
        [np.full(a.shape, 2**63, np.uint64) for a in ids],
        ["rank 0", "holds 9223372036854775808"],
    )
    twice = with_id(ones(ids, 1), 1, 0, 0, 3)
    twice[1][0, 1] = 3
    yield (
        "id twice in a token",
        x,
        twice,
        ["rank 1", "token 0, k 1", "holds 3", "k 0", "distinct"],
    )
    yield "ids of float", x, [a.astype(np.float32) for a in ids], ["rank 0", "float32", "integer"]
    yield "ids of bool", x, [a > 0 for a in ids], ["rank 0", "bool", "integer"]
    yield "ids of another shape", x, [a[:, :1] for a in ids], ["topk_ids of rank 0", "top_k=2"]
    yield "ids for fewer tokens", x, [ids[0][:-1], ids[1]], ["topk_ids of rank 0", "num_tokens=4"]
    yield (
        "tokens of float64",
        [a.astype(np.float64) for a in x],
        ids,
        ["rank 0", "float64", "bfloat16"],
    )
    yield (
        "tokens as bits",
        [a.view(np.uint16) for a in x],
        ids,
        ["rank 0", "uint16", "bfloat16", "view"],
    )
    yield "tokens of another hidden", [a[:, :8] for a in x], ids, ["rank 0", "(4, 8)", "hidden=16"]
    yield "tokens with one axis", [a.ravel() for a in x], ids, ["rank 0", "(64,)", "hidden=16"]
    yield "no list over ranks", x[0], ids, ["input_tokens", "list", "2 ranks"]
    yield "a rank missing", x[:1], ids, ["input_tokens", "1 entries", "2 ranks"]
    yield "no array", [None, x[1]], ids, ["rank 0", "NoneType", "NumPy"]


@pytest.mark.parametrize(
    "x, ids, parts", [c[1:] for c in dispatch_cases()], ids=[c[0] for c in dispatch_cases()]
)
def test_dispatch_names_the_place_and_launches_nothing(x, ids, parts):
    cfg = config()
    with parallel(cfg) as ep:
        before, launched = regions(ep), ep.world.machine.count
        with pytest.raises(EPValueError) as error:
            ep.dispatch(x, ids)
        assert all(part in str(error.value) for part in parts), error.value
        assert ep.world.machine.count == launched
        after = regions(ep)
        assert all(np.array_equal(after[name], before[name]) for name in before)
        ep.dispatch(*batch(cfg)[:2])  # and the object is as usable as before


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, 1e60, "1", [1.0]], ids=str)
def test_input_scale_is_positive_and_finite(scale):
    cfg = config()
    with parallel(cfg) as ep, pytest.raises(EPValueError, match="input_scale"):
        ep.dispatch(*batch(cfg)[:2], input_scale=scale)


def combine_cases():
    yield (
        "outputs of float32",
        lambda y, d, w: ([a.astype(np.float32) for a in y], d, w),
        ["rank 0", "float32", "bfloat16"],
    )
    yield (
        "outputs of another hidden",
        lambda y, d, w: ([a[:, :8] for a in y], d, w),
        ["rank 0", "hidden=16"],
    )
    yield (
        "one row short",
        lambda y, d, w: ([a[:-1] for a in y], d, w),
        ["rank 0", "rows", "capacity"],
    )
    yield (
        "a scalar as weights",
        lambda y, d, w: (y, d, [1.0, 1.0]),
        ["rank 0", "number is refused", "top_k=2"],
    )
    yield (
        "weights of float64",
        lambda y, d, w: (y, d, [a.astype(np.float64) for a in w]),
        ["rank 0", "float64", "float32"],
    )
    yield (
        "weights of another shape",
        lambda y, d, w: (y, d, [a.T.copy() for a in w]),
        ["rank 0", "top_k=2"],
    )
    yield "ranks swapped", lambda y, d, w: (y, d[::-1], w), ["rank 0", "another round or rank"]
    yield "no Dispatched", lambda y, d, w: (y, y, w), ["rank 0", "ndarray"]


@pytest.mark.parametrize(
    "change, parts", [c[1:] for c in combine_cases()], ids=[c[0] for c in combine_cases()]
)
def test_combine_names_the_place_and_launches_nothing(change, parts):
    cfg = config()
    x, ids, weights = batch(cfg, num_tokens=[4, 4])
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        y = [a.trimmed().output_tokens.copy() for a in d]
        bad_y, bad_d, bad_weights = change(y, d, weights)
        before, launched = regions(ep), ep.world.machine.count
        with pytest.raises(EPValueError) as error:
            ep.combine(bad_y, bad_d, bad_weights)
        assert all(part in str(error.value) for part in parts), error.value
        assert ep.world.machine.count == launched
        after = regions(ep)
        assert all(np.array_equal(after[name], before[name]) for name in before)
        ep.combine(y, d, weights)


def first_argument(token, col, value, a):
    return a


def test_functions_are_checked_before_the_launch():
    cfg = config()
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        y = [a.output_tokens for a in d]
        for options, said in [
            (dict(epilogue=lambda t, c, v: v), "needs router weights"),
            (dict(router_weights=weights, epilogue=lambda t, c: 0), "epilogue cannot be called"),
            (dict(router_weights=lambda t: 1.0), "router_weights cannot be called"),
            (dict(router_weights=weights, epilogue_args=(1.0,)), "no epilogue"),
            (dict(router_weights=weights, router_weights_args=(1.0,)), "no function"),
            (dict(router_weights=weights, epilogue=first_argument, epilogue_args=("x",)), "str"),
            (
                dict(router_weights=weights, epilogue=first_argument, epilogue_args=(2**40,)),
                "int32",
            ),
            (
                dict(router_weights=weights, epilogue=first_argument, epilogue_args=(np.zeros(3),)),
                "float64",
            ),
        ]:
            with pytest.raises(EPValueError, match=said):
                ep.combine(y, d, **options)


def test_a_shared_expert_needs_router_weights():
    cfg = config(fused_shared_expert=True)
    with parallel(cfg) as ep:
        d = ep.dispatch(*batch(cfg)[:2])
        with pytest.raises(EPValueError, match="fused_shared_expert.*router weights"):
            ep.combine([a.output_tokens for a in d], d)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, None, "30", True], ids=str)
def test_the_timeout_is_positive_and_finite(timeout):
    with pytest.raises(EPValueError, match="timeout"):
        parallel(config(), timeout=timeout)


@pytest.mark.parametrize(
    "given, parts",
    [
        (dict(world=2), ["world is a int", "LocalWorld"]),
        (dict(launch=dict(n_sms=4)), ["launch is a dict", "LaunchConfig(n_sms"]),
        (dict(kernels=["plain"]), ["kernels=['plain']", "'plain' or 'fast'"]),
    ],
)
def test_what_is_no_world_or_no_launch_is_refused(given, parts):
    with pytest.raises(EPValueError) as error:
        ExpertParallel(config(), **dict(world=LocalWorld(2)) | given)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("value", ["4", 4.5, math.inf, math.nan, True, np.array([4]), int], ids=str)
@pytest.mark.parametrize("name", ["n_sms", "num_threads"])
def test_a_launch_has_whole_numbers(name, value):
    with pytest.raises(EPValueError, match=f"{name}=.* must be a whole number"):
        LaunchConfig(**{name: value})


def test_a_world_has_as_many_ranks_as_there_can_be_experts():
    with pytest.raises(EPValueError, match="n_ranks=2147483648 must be at most 65535"):
        LocalWorld(2**31)


@pytest.mark.parametrize("args", [1, "ab", np.ones(3), {}], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("name", ["epilogue_args", "router_weights_args"])
def test_arguments_of_functions_are_a_tuple(name, args):
    cfg = config()
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        with pytest.raises(EPValueError, match=rf"{name} is a .*{name}=\(a,\)"):
            ep.combine([a.output_tokens for a in d], d, weights, **{name: args})


def test_what_is_no_configuration_is_refused():
    for call in (lambda: ExpertParallel({}, LocalWorld(2)), lambda: ExpertParallel.plan({})):
        with pytest.raises(
            EPValueError, match=r"cfg is a dict; an EPConfig\(n_ranks, .* is needed"
        ):
            call()


def test_a_seed_of_the_environment_is_a_number_or_none(monkeypatch):
    monkeypatch.setenv("EPMOE_SEED", "none")
    assert LocalWorld(2).n_ranks == 2
    monkeypatch.setenv("EPMOE_SEED", "abc")
    with pytest.raises(EPValueError, match="EPMOE_SEED=abc must be a whole number"):
        LocalWorld(2)


def test_a_region_that_is_not_there_is_refused_with_those_that_are():
    with parallel(config()) as ep:
        with pytest.raises(
            EPValueError, match="no region 'recv_count'; there are .*dispatch_recv_count.*reserved"
        ):
            ep.region("recv_count")
        with pytest.raises(
            EPValueError, match=r"rank=5 is not of this process, which has \[0, 1\]"
        ):
            ep.region("A", 5)


def test_world_and_configuration_have_the_same_ranks():
    with pytest.raises(EPValueError, match="n_ranks=2.*n_ranks=3"):
        ExpertParallel(config(), LocalWorld(3))


@pytest.mark.parametrize("n_ranks", [0, -1, 1.5, True, "4"])
def test_a_world_has_at_least_one_rank(n_ranks):
    with pytest.raises(EPValueError, match="n_ranks"):
        LocalWorld(n_ranks)


@pytest.mark.parametrize("seed", range(20))
def test_random_garbage_ids_are_refused_or_right(seed):
    """Whatever topk_ids holds: either it is refused and nothing is written, or every id was good."""
    cfg = config(n_experts=6, top_k=3)
    rng = np.random.default_rng(seed)
    kinds = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
    dtype = kinds[seed % len(kinds)]
    ids = [
        rng.integers(0, 256, (4, 3 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
        for _ in range(2)
    ]
    with parallel(cfg) as ep:
        before = regions(ep)
        x = batch(cfg, num_tokens=[4, 4])[0]
        good = all(((a >= 0) & (a < 6)).all() for a in ids)
        assert not good
        with pytest.raises(EPError, match="rank 0"):
            ep.dispatch(x, ids)
        after = regions(ep)
        assert all(np.array_equal(after[name], before[name]) for name in before)


def test_every_integer_type_is_taken():
    cfg = config()
    x, ids, _ = batch(cfg)
    ids = [np.where(a < 0, 0, a) for a in ids]
    ids = [np.where(np.arange(2) == 1, (a[:, :1] + 1) % 4, a) for a in ids]
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        with parallel(cfg) as ep:
            d = ep.dispatch(x, [a.astype(dtype) for a in ids])
            assert all(
                r.topk_ids.dtype == np.int32 and np.array_equal(r.topk_ids, a)
                for r, a in zip(d, ids)
            )


def test_errors_are_one_tree():
    assert issubclass(EPValueError, EPError) and issubclass(EPValueError, ValueError)
    with pytest.raises(EPError):
        EPConfig(2, 3, 1, 8, 1)
