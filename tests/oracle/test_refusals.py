"""Both packages refuse invalid input before computing anything, and the object stays usable."""

import api_arrays
import numpy as np
import pytest
import record_model
from random_worlds import random_world

from epmoe_ref.errors import EPValueError


class Refused:
    """One world, dispatched by a package; `combine` gets the arguments to refuse."""

    def __init__(self, world):
        from epmoe_ref import EPConfig

        self.world, self.cfg = world, api_arrays.config(world, EPConfig)
        self.received = record_model.dispatch(world)
        self.tokens, self.ids = api_arrays.input_tokens(world), api_arrays.topk_ids(world)

    def outputs(self, dispatched):
        return [
            api_arrays.expert_outputs(
                self.world,
                r,
                self.received[r],
                dispatched[r].trimmed().numpy() if hasattr(dispatched[r], "trimmed") else dispatched[r],
            )
            for r in range(self.world.n_ranks)
        ]


class InReference(Refused):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def dispatch(self, *args, **keywords):
        import epmoe_ref

        return epmoe_ref.dispatch(self.cfg, *args, **keywords)

    def combine(self, outputs, dispatched, weights=None, **keywords):
        import epmoe_ref

        return epmoe_ref.combine(self.cfg, outputs, dispatched, router_weights=weights, **keywords)


class InSimulator(Refused):
    def __enter__(self):
        from epmoe import ExpertParallel, LocalWorld

        self.ep = ExpertParallel(self.cfg, LocalWorld(self.world.n_ranks)).__enter__()
        return self

    def __exit__(self, *error):
        return self.ep.__exit__(*error)

    def dispatch(self, *args, **keywords):
        return self.ep.dispatch(*args, **keywords)

    def combine(self, outputs, dispatched, weights=None, **keywords):
        return self.ep.combine(outputs, dispatched, weights, **keywords)


@pytest.fixture(params=[InReference, InSimulator], ids=["reference", "simulator"])
def package(request):
    return request.param


def bad_id(value):
    def spoil(run):
        run.ids[1] = run.ids[1].astype(np.int64)
        run.ids[1][0, 1] = value

    return spoil


def twice(run):
    run.ids[1][0, :] = 3


def wrong_dtype(run):
    run.tokens[0] = run.tokens[0].astype(np.float64)


def wrong_width(run):
    run.tokens[0] = run.tokens[0][:, :-1]


def float_ids(run):
    run.ids[0] = run.ids[0].astype(np.float32)


def too_many_tokens(run):
    n = run.world.max_tokens_per_rank + 1
    run.tokens[0] = np.zeros((n, run.world.hidden), run.tokens[0].dtype)
    run.ids[0] = np.full((n, run.world.top_k), -1, np.int32)


def ids_of_another_top_k(run):
    run.ids[0] = run.ids[0][:, :-1]


def ids_of_other_tokens(run):
    run.ids[0] = run.ids[0][:-1]


def too_few_ranks(run):
    del run.tokens[1]


BAD_DISPATCHES = {
    "id over the range": bad_id(4),
    "id under -1": bad_id(-2),
    "id that would narrow into the range": bad_id(1 << 32),
    "id twice in a token": twice,
    "float64 tokens": wrong_dtype,
    "other hidden": wrong_width,
    "float ids": float_ids,
    "more tokens than max_tokens_per_rank": too_many_tokens,
    "ids of a smaller top_k": ids_of_another_top_k,
    "ids of fewer tokens": ids_of_other_tokens,
    "a rank is missing": too_few_ranks,
}


def full_world(**fixed):
    """With tokens on both ranks."""
    sizes = dict(n_ranks=2, n_local_experts=2, top_k=2, hidden=8, weights="array", epilogue=False)
    plain = dict(token_format="bf16", skip_a2a=False, fused_shared_expert=False)
    fixed = sizes | plain | dict(combine_dtype="bf16") | fixed
    worlds = (random_world(seed, **fixed) for seed in range(200))
    return next(w for w in worlds if all(2 <= len(t) < 5 for t in w.tokens))


def test_bad_dispatches_are_refused_and_leave_a_usable_object(package):
    with package(full_world()) as run:
        tokens, ids = run.tokens, run.ids
        for name, spoil in BAD_DISPATCHES.items():
            run.tokens, run.ids = list(tokens), [i.copy() for i in ids]
            spoil(run)
            with pytest.raises(EPValueError):
                run.dispatch(run.tokens, run.ids)
                pytest.fail(name)
        dispatched = run.dispatch(tokens, ids)
        run.combine(run.outputs(dispatched), dispatched, api_arrays.weights(run.world))


def test_input_scales_that_are_not_positive_and_finite_are_refused(package):
    with package(full_world(token_format="nvfp4", hidden=64)) as run:
        for scale in (0.0, -1.0, float("inf"), float("nan"), 1e-60, 1e60, "one"):
            with pytest.raises(EPValueError):
                run.dispatch(run.tokens, run.ids, input_scale=scale)
                pytest.fail(f"input_scale={scale}")
        dispatched = run.dispatch(run.tokens, run.ids)
        run.combine(run.outputs(dispatched), dispatched, api_arrays.weights(run.world))


def no_weights_with_epilogue(run, outputs, weights):
    return outputs, None, dict(epilogue=lambda token, col, value: value)


def scalar_weight(run, outputs, weights):
    return outputs, 0.5, {}


def weights_of_other_shape(run, outputs, weights):
    return outputs, [w[:, :1] for w in weights], {}


def double_weights(run, outputs, weights):
    return outputs, [w.astype(np.float64) for w in weights], {}


def outputs_of_other_type(run, outputs, weights):
    return [o.astype(np.float32) for o in outputs], weights, {}


def outputs_too_short(run, outputs, weights):
    return [o[:-1] for o in outputs], weights, {}


def outputs_of_one_rank(run, outputs, weights):
    return outputs[:1], weights, {}


BAD_COMBINES = [
    no_weights_with_epilogue,
    scalar_weight,
    weights_of_other_shape,
    double_weights,
    outputs_of_other_type,
    outputs_too_short,
    outputs_of_one_rank,
]


def test_bad_combines_are_refused_and_leave_a_usable_object(package):
    world = full_world()
    with package(world) as run:
        dispatched = run.dispatch(run.tokens, run.ids)
        good, weights = run.outputs(dispatched), api_arrays.weights(world)
        for spoil in BAD_COMBINES:
            outputs, spoiled_weights, keywords = spoil(run, good, weights)
            with pytest.raises(EPValueError):
                run.combine(outputs, dispatched, spoiled_weights, **keywords)
                pytest.fail(spoil.__name__)
        run.combine(good, dispatched, weights)


def test_a_shared_expert_without_router_weights_is_refused(package):
    world = full_world(fused_shared_expert=True)
    with package(world) as run:
        dispatched = run.dispatch(run.tokens, run.ids)
        with pytest.raises(EPValueError):
            run.combine(run.outputs(dispatched), dispatched, None)
        run.combine(run.outputs(dispatched), dispatched, api_arrays.weights(world))
