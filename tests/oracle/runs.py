"""Runs worlds through epmoe_ref, and through ExpertParallel in the simulator: first difference from the record model."""

import api_arrays
import counters_after
import numpy as np
import record_model
from differences import combine_difference, dispatch_difference
from random_worlds import describe

import epmoe_ref
from epmoe import ExpertParallel, LocalWorld, add_rn, mul_rn


def weight_of(token, k, w):
    """The router weights as a function of the place."""
    return w[token, k]


def epilogue(token, col, value, gain, bias):
    """value * gain[col] + bias[token], two roundings."""
    return add_rn(mul_rn(value, gain[col]), bias[token])


def combine_arguments(world, weights_as_function):
    """router_weights and the keywords of combine (combine_wait)."""
    weights, keywords = api_arrays.weights(world), {}
    if weights_as_function and weights is not None:
        keywords["router_weights_args"], weights = (weights,), weight_of
    if world.epilogue is not None:
        keywords.update(epilogue=epilogue, epilogue_args=api_arrays.epilogue_args(world))
    return weights, keywords


class Different(AssertionError):
    """The message is the first difference."""


def require_none(differences):
    for difference in differences:
        if difference:
            raise Different(difference)


def expert_outputs(world, received, dispatched):
    return [api_arrays.expert_outputs(world, r, received[r], dispatched[r]) for r in range(world.n_ranks)]


def reference_difference(world, *, weights_as_function=False):
    """First difference of the reference in one round, or None."""
    cfg = api_arrays.config(world)
    received = record_model.dispatch(world)
    dispatched = epmoe_ref.dispatch(
        cfg, api_arrays.input_tokens(world), api_arrays.topk_ids(world), input_scale=api_arrays.input_scale(world)
    )
    for rank in range(world.n_ranks):
        for name, result in (("dispatch", dispatched[rank]), ("canonical", epmoe_ref.canonical(dispatched[rank]))):
            difference = dispatch_difference(world, rank, received[rank], result, padding_is_zero=True)
            if difference:
                return f"{name}, {difference}\n  {describe(world)}"
    weights, keywords = combine_arguments(world, weights_as_function)
    outputs = expert_outputs(world, received, dispatched)
    combined = epmoe_ref.combine(cfg, outputs, dispatched, router_weights=weights, **keywords)
    for rank, expected in enumerate(record_model.combine(world)):
        difference = combine_difference(world, rank, expected, combined[rank])
        if difference:
            return f"combine, {difference}\n  {describe(world)}"
    return None


def one_round(ep, world, fused, weights_as_function=False, fused_combine=None):
    """The outputs of one dispatch and combine, of the world's experts; dispatch and the counters are compared.

    fused: both launches; fused_combine: another choice for combine.
    """
    received = record_model.dispatch(world)
    tokens = api_arrays.input_tokens(world)
    ids, scale = api_arrays.topk_ids(world), api_arrays.input_scale(world)
    if fused:
        dispatched = ep.dispatch(tokens, ids, input_scale=scale)
    else:
        ep.dispatch_async(tokens, ids, input_scale=scale)
        dispatched = ep.dispatch_wait()
    results = [d.trimmed().numpy() for d in dispatched]
    require_none(
        dispatch_difference(world, rank, received[rank], result, padding_is_zero=False)
        for rank, result in enumerate(results)
    )
    require_none(counters_after.after_dispatch(world, rank, received[rank], ep) for rank in range(world.n_ranks))
    outputs = expert_outputs(world, received, results)
    weights, keywords = combine_arguments(world, weights_as_function)
    if fused if fused_combine is None else fused_combine:
        combined = ep.combine(outputs, dispatched, weights, **keywords)
    else:
        ep.combine_async(outputs, dispatched)
        combined = ep.combine_wait(weights, **keywords)
    require_none(counters_after.after_combine(world, rank, ep) for rank in range(world.n_ranks))
    return [np.asarray(c) for c in combined]


def simulator_difference(
    worlds, *, fused, seed, weights_as_function=False, racecheck=None, launch=None, mixed=False, kernels=None
):
    """First difference of a sequence of rounds on one ExpertParallel, so that leftovers affect the next round.

    worlds: worlds of one configuration (next_round), or one world. fused: True, False, or one for each round.
    mixed: combine is launched as in the round before. kernels: as in ExpertParallel.
    """
    worlds = worlds if isinstance(worlds, list) else [worlds]
    fused = fused if isinstance(fused, list) else [fused] * len(worlds)
    cfg = api_arrays.config(worlds[0])
    local = LocalWorld(cfg.n_ranks, seed=seed, racecheck=racecheck)
    with ExpertParallel(cfg, local, launch=launch, kernels=kernels) as ep:
        for turn, world in enumerate(worlds):
            expected = record_model.combine(world)
            try:
                combined = one_round(
                    ep, world, fused[turn], weights_as_function, fused_combine=fused[turn - 1] if mixed else None
                )
                require_none(
                    combine_difference(world, rank, expected[rank], combined[rank]) for rank in range(world.n_ranks)
                )
            except Different as e:
                how = "fused" if fused[turn] else "split"
                return f"round {turn} ({how}, schedule seed {seed}, {launch}): {e}\n  {describe(world)}"
            except Exception as e:
                # a crash, a deadlock, a race: the message must still say which world
                raise AssertionError(f"{type(e).__name__}: {e}\n  {describe(world)}") from e
    return None
