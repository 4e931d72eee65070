"""The comparison itself: equal results pass, and each single wrong number is reported in the protocol's terms."""

from types import SimpleNamespace

import api_arrays
import numpy as np
import pytest
import record_model
from differences import SCALE_DTYPES, TOKEN_DTYPES, combine_difference, dispatch_difference
from exact_formats import FACTS
from random_worlds import random_world


def as_result(world, rank, received):
    """The model's own result as arrays."""
    facts = FACTS[world.token_format]
    rows = received.row_offsets[-1]
    width = world.hidden // 2 if facts.code_bits == 4 else world.hidden
    code_bytes = b"".join(r.code_bytes or bytes(world.hidden * facts.code_bits // 8) for r in received.rows)
    scales = None
    if facts.group:
        flat = np.zeros(received.scale_size, np.uint8)
        for at, (value, _) in received.scale_bytes.items():
            flat[at] = value
        columns = world.hidden // facts.group
        shape = {"fp8_blockwise": (columns, rows), "mxfp4_rows": (rows, columns)}.get(
            world.token_format, (received.scale_size // (128 * columns), columns // 4, 32, 4, 4)
        )
        scales = flat.view(SCALE_DTYPES[world.token_format])
        scales = scales if world.fuse_a_scale_preshuffle else scales.reshape(shape)
    origin = [(-1, -1) if isinstance(r.src_rank, str) else (r.token, r.slot) for r in received.rows]
    return SimpleNamespace(
        output_tokens=np.frombuffer(bytearray(code_bytes), TOKEN_DTYPES[world.token_format]).reshape(rows, width),
        output_scales=scales,
        scales_offset=None if received.scales_offset is None else np.array(received.scales_offset, np.uint32),
        row_offsets=np.array(received.row_offsets, np.uint32),
        expert_ids=np.array(received.expert_ids, np.int32),
        src_info=np.array(origin, np.int32).reshape(rows, 2),
        recv_count=np.array(received.recv_count, np.int32),
        topk_ids=api_arrays.topk_ids(world)[rank],
        num_tokens=world.num_tokens(rank),
    )


def small_world(token_format):
    return random_world(
        11,
        token_format=token_format,
        n_ranks=2,
        n_local_experts=2,
        top_k=2,
        skip_a2a=False,
        fused_shared_expert=True,
        fuse_a_scale_preshuffle=False,
    )


def compared(world, spoil):
    received = record_model.dispatch(world)
    rank = next(r for r in range(world.n_ranks) if received[r].recv_count[0][0] + received[r].recv_count[1][0] > 1)
    result = as_result(world, rank, received[rank])
    spoil(result, next(i for i, r in enumerate(received[rank].rows) if not isinstance(r.src_rank, str)))
    return dispatch_difference(world, rank, received[rank], result, padding_is_zero=True)


@pytest.mark.parametrize("token_format", FACTS)
def test_the_model_equals_itself(token_format):
    for seed in range(20, 30):
        world = random_world(seed, token_format=token_format)
        for rank, received in enumerate(record_model.dispatch(world)):
            assert (
                dispatch_difference(world, rank, received, as_result(world, rank, received), padding_is_zero=True)
                is None
            )


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.parametrize(
    "name",
    [
        "output_tokens",
        "output_scales",
        "scales_offset",
        "row_offsets",
        "expert_ids",
        "src_info",
        "recv_count",
        "topk_ids",
    ],
)
def test_one_wrong_byte_is_reported(token_format, name):
    world = small_world(token_format)

    def spoil(result, row):
        wrong = getattr(result, name)
        if wrong is not None:
            at = wrong[:, row:] if name == "output_scales" and token_format == "fp8_blockwise" else wrong
            at = wrong[row:] if name in ("output_tokens", "src_info") else at
            flat = np.ascontiguousarray(at).view(np.uint8).reshape(-1)
            flat[0] ^= 0x40
            at[...] = flat.view(wrong.dtype).reshape(at.shape)

    message = compared(world, spoil)
    facts = FACTS[token_format]
    absent = name == "scales_offset" and not facts.tiles or name == "output_scales" and not facts.group
    assert (message is None) == absent
    assert absent or name in message


def test_two_rows_of_one_segment_exchanged_without_their_origin_are_reported():
    for seed in range(40, 60):
        world = random_world(seed, token_format="bf16", n_ranks=1, n_local_experts=1, top_k=1)
        (received,) = record_model.dispatch(world)
        result = as_result(world, 0, received)
        rows = [i for i, r in enumerate(received.rows) if r.src_rank == 0]
        if len(rows) > 1 and received.rows[rows[0]].code_bytes != received.rows[rows[1]].code_bytes:
            result.output_tokens[rows[:2]] = result.output_tokens[rows[1::-1]]
            assert "output_tokens" in dispatch_difference(world, 0, received, result, padding_is_zero=True)
            # exchanged with their origin they are right
            result.src_info[rows[:2]] = result.src_info[rows[1::-1]]
            assert dispatch_difference(world, 0, received, result, padding_is_zero=True) is None
            return
    raise AssertionError("no world with two rows")


def test_one_wrong_bit_of_combine_is_reported():
    world = next(w for w in (random_world(s, combine_dtype="bf16") for s in range(12, 60)) if w.weights and w.tokens[0])
    expected = record_model.combine(world)
    actual = api_arrays.array(expected[0], "bf16", (world.num_tokens(0), world.hidden))
    assert combine_difference(world, 0, expected[0], actual) is None
    actual.view(np.uint16)[-1, 3] ^= 1
    message = combine_difference(world, 0, expected[0], actual)
    assert f"token {world.num_tokens(0) - 1}, column 3" in message
