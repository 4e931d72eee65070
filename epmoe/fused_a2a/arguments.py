"""Checks the arguments of the fused_a2a functions before anything is launched; messages name value, rule and remedy."""

import operator

import ml_dtypes
import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import VECTOR_BYTES, view
from epmoe.kernels.rows.shape import MAX_TOP_K
from epmoe_ref.config import MAX_EXPERTS, MAX_INT32
from epmoe_ref.errors import EPValueError

BF16, FP16, FP32, E4M3 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn))
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
FP8_GROUP = 128  # elements that share a scale


def get_hidden_bytes(x) -> int:
    """Bytes that a buffer needs for one row of x [T, H]: H * max(itemsize, 2), since combine sends bfloat16.

    x: one rank's array, or a list over ranks.
    """
    for _ in range(2):  # a list over ranks, a pair of values and scales
        x = x[0] if isinstance(x, (list, tuple)) and x else x
    a = view(x, "x")
    if len(a.shape) != 2:
        raise EPValueError(f"x has shape {a.shape}, a matrix [tokens, hidden] is needed")
    return a.shape[1] * max(a.dtype.itemsize, 2)


def whole(name, value, least, most=None):
    """An int from `least` to `most`; 0-d integer arrays and tensors count as numbers."""
    try:
        number = operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise EPValueError(f"{name}={value!r} must be a whole number, at least {least}")
    if most is not None and number > most:
        raise EPValueError(f"{name}={number} must be at most {most}")
    return number


def rows(name, value, least=0):
    """Check a number of rows; it must fit in int32, in which kernels count."""
    return whole(name, value, least, MAX_INT32)


def plain(name, value, least=0):
    """An int of at least `least`. A one-element tensor is read now, since it may change later. None stays None."""
    if value is None or type(value) is int and value >= least:
        return value
    return whole(name, value, least)


def absent(argument):
    """Whether an optional argument was left out: None, or None on every rank."""
    return argument is None or isinstance(argument, (list, tuple)) and all(a is None for a in argument)


def matrices(
    buffer, name, given, *, dtypes=None, n_rows=None, rows_of="the rows of x", n_columns=None, because="", vectors=False
):
    """Check one matrix for each rank of this process, of one width and dtype: a list of Array, readable by kernels.

    n_rows: rows needed, for each rank: one for each of rows_of, in messages. n_columns: columns needed; 0 means arrays
    [rows]. because: says in the message why that many columns. vectors: whether rows must be whole vectors of 16 bytes.
    """
    named = [(f"{name} of rank {r.rank}", one) for r, one in zip(buffer.ranks, given)]
    seen = [inputs.readable(buffer.machine, one, what) for what, one in named]
    for i, ((what, _), a) in enumerate(zip(named, seen)):
        if len(a.shape) != (1 if n_columns == 0 else 2):
            needed = "an array [rows]" if n_columns == 0 else "a matrix [rows, columns]"
            raise EPValueError(f"{what} has shape {a.shape}, {needed} is needed: reshape it")
        if dtypes is not None and a.dtype not in dtypes:
            needed = " or ".join(map(str, dtypes))
            raise EPValueError(f"{what} has dtype {a.dtype}, {needed} is needed: convert it")
        if a.dtype.kind == "O":
            raise EPValueError(f"{what} has dtype object: rows of plain bytes are needed")
        if n_rows is not None and a.shape[0] != n_rows[i]:
            raise EPValueError(f"{what} has {a.shape[0]} rows, {n_rows[i]} are needed: one for each of {rows_of}")
        if n_columns and a.shape[1] != n_columns:
            raise EPValueError(f"{what} has {a.shape[1]} columns, {n_columns} are needed{because}")
        if a.shape[1:] != seen[0].shape[1:] or a.dtype != seen[0].dtype:
            raise EPValueError(
                f"{what} is {a.dtype} with {a.shape[1]} columns, on another rank {seen[0].dtype} with "
                f"{seen[0].shape[1]}: all ranks must agree"
            )
        row_bytes = a.shape[-1] * a.dtype.itemsize
        if vectors and (row_bytes == 0 or row_bytes % VECTOR_BYTES):
            raise EPValueError(
                f"{what}: a row of {a.shape[1]} x {a.dtype} has {row_bytes} bytes, "
                f"which must be a positive multiple of {VECTOR_BYTES}: pad the hidden size"
            )
    return seen


def tokens(buffer, values, scales=None):
    """Check hidden states x, one matrix a rank, and the float32 scales of e4m3 values (None without scales)."""
    if scales is None:
        return matrices(buffer, "x", values, vectors=True), None
    x = matrices(buffer, "x", values, dtypes=(E4M3,), vectors=True)
    hidden = x[0].shape[1]
    if hidden % FP8_GROUP:
        raise EPValueError(f"x has {hidden} columns, blockwise FP8 needs a multiple of {FP8_GROUP}")
    of_scales = dict(n_rows=[a.shape[0] for a in x], n_columns=hidden // FP8_GROUP)
    return x, matrices(buffer, "scales of x", scales, dtypes=(FP32,), **of_scales)


def experts_per_rank(num_experts, n_ranks):
    """L, the number of experts a rank has."""
    num_experts = whole("num_experts", num_experts, 1, MAX_EXPERTS)
    if num_experts % n_ranks:
        raise EPValueError(
            f"num_experts={num_experts} must be a multiple of n_ranks={n_ranks}: "
            "change one, or add experts that no token selects"
        )
    return num_experts // n_ranks


def local_experts(value, n_ranks):
    """Check num_local_experts, the number of experts on each rank."""
    local = whole("num_local_experts", value, 1)
    what = f"num_local_experts={local} times n_ranks, num_experts"
    return whole(what, local * n_ranks, 1, MAX_EXPERTS) // n_ranks


def padding(pad_multiple, local):
    """Check pad_multiple: each expert's rows are rounded up to a multiple of it. None and 0 become 1."""
    pad = whole("pad_multiple", pad_multiple or 0, 0) or 1
    # kernels count the padded rows of all experts of a rank in int32
    what = f"num_local_experts={local} times pad_multiple={pad}, rows of padding"
    return whole(what, local * pad, 1, MAX_INT32 // 2) // local


def expert_indices(buffer, given, n_rows, num_experts):
    """Check token_indices: an integer matrix [T, K] a rank, ids in [0, num_experts), distinct in a token; -1: none."""
    seen = matrices(buffer, "token_indices", given, n_rows=n_rows)
    top_k = seen[0].shape[1]
    for r, a in zip(buffer.ranks, seen):
        if a.dtype.kind not in "iu":
            raise EPValueError(
                f"token_indices of rank {r.rank} has dtype {a.dtype}, an integer type is needed: convert it to int64"
            )
    if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
        raise EPValueError(f"token_indices has {top_k} ids a token, 1 to {min(num_experts, MAX_TOP_K)} are needed")
    return seen


def scheduling(async_finish, allocate_on_comm_stream):
    """Raise EPValueError if the flags contradict each other. They say when work runs, not what it computes."""
    if allocate_on_comm_stream and not async_finish:
        raise EPValueError("allocate_on_comm_stream=True needs async_finish=True: else there is no such stream")


def same_as_handle(handle, numbers, pad_multiple):
    """Raise EPValueError if num_permuted_tokens (one, or one a rank) or pad_multiple is given and not the handle's."""
    buffer = handle.buffer
    if buffer.world_has_lists and not isinstance(numbers, (list, tuple)):
        numbers = [numbers] * len(handle.num_rows)
    numbers = inputs.ranks_of(buffer.world, "num_permuted_tokens", numbers)
    for r, number, n_rows in zip(buffer.ranks, numbers, handle.num_rows):
        if number is not None and whole("num_permuted_tokens", number, 0) != n_rows:
            raise EPValueError(
                f"num_permuted_tokens={number} for rank {r.rank}, whose handle has {n_rows} rows: leave "
                "it out, or give what the dispatch returned"
            )
    pad = handle.pad_multiple
    if pad_multiple is not None and (whole("pad_multiple", pad_multiple, 0) or 1) != pad:
        raise EPValueError(
            f"pad_multiple={pad_multiple}, the handle has {pad}: leave it out, or give what the dispatch was given"
        )
