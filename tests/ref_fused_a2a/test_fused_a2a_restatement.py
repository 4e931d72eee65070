"""epmoe_ref.fused_a2a against the plain-loop restatement: same bits on random worlds, forward and backward."""

import os

import fused_a2a_restatement as plain
import numpy as np
from fused_a2a_laws import assert_same_bits, law
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe_ref import fused_a2a, strategies

worlds_of_numbers = settings(law, max_examples=80 if "EPMOE_FUZZ" in os.environ else 25)


@worlds_of_numbers
@given(strategies.rows_worlds(kinds=("normal", "special")), st.data())
def test_rows_have_the_bits_of_the_restatement(world, data):
    x, ids, probs = world.x, world.token_indices, world.token_probs
    *results, handle = fused_a2a.dispatch_forward(x, ids, probs, world.num_experts)
    names = ("recv_x", "recv_token_indices", "recv_token_probs", "tokens_per_expert")
    for name, got, want in zip(
        names, results, plain.rows_dispatch(x, ids, probs, world.num_experts)
    ):
        assert_same_bits(got, want, name)

    routes = plain.rows_routes(ids, world.num_experts)
    num_rows, num_tokens = [len(to) for to in routes], [len(own) for own in ids]
    width, dtype = x[0].shape[1], x[0].dtype
    rows = data.draw(
        strategies.matrices(num_rows, width, dtype, ("normal", "cancelling", "special"))
    )
    assert_same_bits(
        fused_a2a.combine_forward(rows, handle),
        plain.rows_return(rows, routes, num_tokens),
        "combined_x",
    )

    grad_probs = data.draw(
        strategies.matrices(num_rows, ids[0].shape[1], np.float32, ("normal", "special"))
    )
    got_x, got_probs = fused_a2a.dispatch_backward(handle, rows, grad_probs)
    assert_same_bits(got_x, plain.rows_return(rows, routes, num_tokens), "grad_x of dispatch")
    assert_same_bits(
        got_probs, plain.rows_return(grad_probs, routes, num_tokens), "grad_token_probs"
    )

    grads = data.draw(strategies.matrices(num_tokens, width, dtype, ("special",)))
    assert_same_bits(
        fused_a2a.combine_backward(handle, grads),
        plain.rows_send(grads, routes),
        "grad_x of combine",
    )


@worlds_of_numbers
@given(strategies.hybrid_worlds(kinds=("normal", "special")), st.data())
def test_expert_major_rows_have_the_bits_of_the_restatement(world, data):
    hidden, row_probs, scales, counts, handle = fused_a2a.hybrid_dispatch_forward(**vars(world))
    routes, want_counts, want_overflow = plain.hybrid_routes(
        world.routing_map, world.num_local_experts, world.num_permuted_tokens, world.pad_multiple
    )
    tokens, want_scales = world.x, [None] * len(world.x)
    if world.fp8_dispatch:
        encoded = [[plain.blockwise_fp8(row) for row in own] for own in world.x]
        tokens = [plain.matrix([row for row, _ in own], 128, plain.FP8) for own in encoded]
        want_scales = plain.hybrid_send(
            [plain.matrix([s for _, s in own], 1, np.float32) for own in encoded], routes
        )
    want_probs = (
        [None] * len(world.x)
        if world.probs is None
        else plain.hybrid_send_probs(world.probs, routes)
    )
    assert_same_bits(hidden, plain.hybrid_send(tokens, routes), "dispatched_hidden")
    assert_same_bits(row_probs, want_probs, "dispatched_probs")
    assert_same_bits(scales, want_scales, "dispatched_scaling_factor")
    assert_same_bits(counts, want_counts, "tokens_per_expert")
    assert_same_bits(handle.overflow, want_overflow, "overflow")

    num_rows, num_tokens = [len(to) for to in routes], [len(own) for own in world.x]
    width, dtype = world.x[0].shape[1], world.x[0].dtype
    rows = data.draw(
        strategies.matrices(num_rows, width, dtype, ("normal", "cancelling", "special"))
    )
    want = plain.hybrid_return(rows, routes, num_tokens, world.p2p_world_size)
    assert_same_bits(fused_a2a.hybrid_combine_forward(rows, handle), want, "combined_x")

    grad_probs = data.draw(strategies.matrices(num_rows, 1, np.float32, ("normal", "special")))
    grad_probs = [column[:, 0] for column in grad_probs]
    got_x, got_probs = fused_a2a.hybrid_dispatch_backward(handle, rows, grad_probs)
    assert_same_bits(got_x, want, "grad_x of dispatch")
    shapes = [routed.shape for routed in world.routing_map]
    assert_same_bits(got_probs, plain.hybrid_return_probs(grad_probs, routes, shapes), "grad_probs")

    grads = data.draw(strategies.matrices(num_tokens, width, dtype, ("special",)))
    got = fused_a2a.hybrid_combine_backward(handle, grads)
    assert_same_bits(got, plain.hybrid_send(grads, routes), "grad_x of combine")
