"""Runs worlds through ExpertParallel over LocalWorld in the simulator: first difference from the model, or None."""

import api_arrays
import counters_after
import numpy as np
import record_model
from differences import combine_difference, dispatch_difference
from random_worlds import describe


def weight_of(token, k, w):
    """The router weights as a function of the place."""
    return w[token, k]


def epilogue(token, col, value, gain, bias):
    """value * gain[col] + bias[token], two roundings."""
    from epmoe import add_rn, mul_rn

    return add_rn(mul_rn(value, gain[col]), bias[token])


def combine_arguments(world, weights_as_function=False):
    """router_weights and the keywords of combine (combine_wait)."""
    weights, keywords = api_arrays.weights(world), {}
    if weights_as_function:
        keywords["router_weights_args"], weights = (weights,), weight_of
    if world.epilogue is not None:
        keywords.update(epilogue=epilogue, epilogue_args=api_arrays.epilogue_args(world))
    return weights, keywords


def one_round(ep, world, fused, weights_as_function=False, received=None, fused_combine=None):
    """(list of Dispatched, list of outputs) of one dispatch and combine; outputs are from the world's experts.

    fused: both launches; fused_combine: another choice for combine.
    """
    received = received or record_model.dispatch(world)
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
    outputs = [api_arrays.expert_outputs(world, r, received[r], results[r]) for r in range(world.n_ranks)]
    weights, keywords = combine_arguments(world, weights_as_function)
    if fused if fused_combine is None else fused_combine:
        combined = ep.combine(outputs, dispatched, weights, **keywords)
    else:
        ep.combine_async(outputs, dispatched)
        combined = ep.combine_wait(weights, **keywords)
    require_none(counters_after.after_combine(world, rank, ep) for rank in range(world.n_ranks))
    return results, [np.asarray(c) for c in combined]


def require_none(differences):
    for difference in differences:
        if difference:
            raise Different(difference)


class Different(AssertionError):
    """The message is the first difference."""


def simulator_difference(
    worlds, *, fused, seed=0, weights_as_function=False, racecheck=None, launch=None, mixed=False, kernels=None
):
    """First difference of a sequence of rounds on one ExpertParallel, so that leftovers affect the next round.

    worlds: worlds of one configuration (next_round), or one world. fused: True, False, or one for each round.
    mixed: combine is launched as in the round before. kernels: as in ExpertParallel.
    """
    from epmoe import ExpertParallel, LocalWorld
    from epmoe_ref import EPConfig

    worlds = worlds if isinstance(worlds, list) else [worlds]
    fused = fused if isinstance(fused, list) else [fused] * len(worlds)
    cfg = api_arrays.config(worlds[0], EPConfig)
    local = LocalWorld(cfg.n_ranks, seed=seed, racecheck=racecheck)
    with ExpertParallel(cfg, local, launch=launch, kernels=kernels) as ep:
        for turn, world in enumerate(worlds):
            expected = record_model.combine(world)
            try:
                _, combined = one_round(
                    ep,
                    world,
                    fused[turn],
                    weights_as_function and world.weights is not None,
                    fused_combine=fused[turn - 1] if mixed else None,
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
