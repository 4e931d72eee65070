"""Runs one world through epmoe_ref and through the record model: the first difference, or None."""

import api_arrays
import record_model
from differences import combine_difference, dispatch_difference
from random_worlds import describe


def weight_of(token, k, w):
    """The router weights as a function of the place."""
    return w[token, k]


def epilogue(token, col, value, gain, bias):
    """Two roundings: NumPy does not contract."""
    return value * gain[col] + bias[token]


def reference_difference(world, *, weights_as_function=False):
    import epmoe_ref

    cfg = api_arrays.config(world, epmoe_ref.EPConfig)
    received = record_model.dispatch(world)
    dispatched = epmoe_ref.dispatch(
        cfg, api_arrays.input_tokens(world), api_arrays.topk_ids(world), input_scale=api_arrays.input_scale(world)
    )
    for rank in range(world.n_ranks):
        for name, result in (("dispatch", dispatched[rank]), ("canonical", epmoe_ref.canonical(dispatched[rank]))):
            difference = dispatch_difference(world, rank, received[rank], result, padding_is_zero=True)
            if difference:
                return f"{name}, {difference}\n  {describe(world)}"

    outputs = [
        api_arrays.expert_outputs(world, rank, received[rank], dispatched[rank]) for rank in range(world.n_ranks)
    ]
    weights = api_arrays.weights(world)
    keywords = {}
    if world.epilogue is not None:
        keywords = dict(epilogue=epilogue, epilogue_args=api_arrays.epilogue_args(world))
    if weights_as_function:
        keywords["router_weights_args"], weights = (weights,), weight_of
    combined = epmoe_ref.combine(cfg, outputs, dispatched, router_weights=weights, **keywords)
    expected = record_model.combine(world)
    for rank in range(world.n_ranks):
        difference = combine_difference(world, rank, expected[rank], combined[rank])
        if difference:
            return f"combine, {difference}\n  {describe(world)}"
    return None
