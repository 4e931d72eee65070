"""A world's numbers as arguments of both packages, and their results as bit patterns."""

import ml_dtypes
import numpy as np

from epmoe_ref import EPConfig

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
BIT_TYPES = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}


def array(bits, dtype, shape):
    """An array of dtype with these bit patterns; shape is needed where there are no tokens."""
    return np.array(bits, BIT_TYPES[dtype]).reshape(shape).view(DTYPES[dtype])


def bytes_of(a):
    """The bytes of an array in C order, as uint8."""
    return np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8)


def config(world):
    return EPConfig(
        world.n_ranks,
        world.n_experts,
        world.top_k,
        world.hidden,
        world.max_tokens_per_rank,
        token_format=world.token_format,
        fuse_a_scale_preshuffle=world.fuse_a_scale_preshuffle,
        combine_dtype=world.combine_dtype,
        fused_shared_expert=world.fused_shared_expert,
        skip_a2a=world.skip_a2a,
        allreduce_world_size=world.allreduce_world_size,
        alignment=world.alignment,
    )


def input_tokens(world):
    return [array(t, "bf16", (len(t), world.hidden)) for t in world.tokens]


def topk_ids(world, dtype=np.int32):
    return [np.array(ids, dtype).reshape(len(ids), world.top_k) for ids in world.topk_ids]


def weights(world):
    if world.weights is None:
        return None
    return [array(w, "fp32", (len(w), world.top_k)) for w in world.weights]


def input_scale(world):
    """The argument input_scale of dispatch: a list over ranks, or 1.0."""
    if world.input_scale is None:
        return 1.0
    return [array([bits], "fp32", (1,))[0] for bits in world.input_scale]


def epilogue_args(world):
    """gain and bias, each a list over ranks."""
    if world.epilogue is None:
        return ()
    return ([array(g, "fp32", (world.hidden,)) for g in world.gain], [array(b, "fp32", (len(b),)) for b in world.bias])


def expert_outputs(world, rank, received, dispatched):
    """The rows that this rank's experts computed, in the row order of `dispatched`; padding rows are NaN.

    `received` is the oracle's result and says which rows are shared, padding, or of which src_rank.
    """
    rows = np.asarray(dispatched.src_info).shape[0]
    out = np.full((rows, world.hidden), 0xFFFFFFFF, np.uint32).astype(BIT_TYPES[world.combine_dtype])
    src_info = np.asarray(dispatched.src_info)
    for row, record in enumerate(received.rows):
        if record.src_rank == "shared":
            out[row] = world.shared_outputs[rank][record.token]
        elif record.src_rank != "padding":
            # order inside a segment is free, so the result says it; the src_rank is fixed
            token, slot = src_info[row]
            out[row] = world.routed_outputs[record.src_rank][token][slot]
    return out.view(DTYPES[world.combine_dtype])
