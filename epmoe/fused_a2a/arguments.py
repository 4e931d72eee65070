"""What the fused_a2a functions accept, checked before anything is launched: value, rule and remedy in every message."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, VECTOR_BYTES, DeviceArray, peek, view
from epmoe.host.lending import Loan
from epmoe.kernels.rows.shape import MAX_RANKS, MAX_TOP_K
from epmoe_ref.config import MAX_EXPERTS, MAX_INT32
from epmoe_ref.errors import EPValueError

BF16, FP16, FP32, E4M3 = (
    np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn)
)
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
FP8_GROUP = 128  # elements that share a scale


class Interface(NamedTuple):
    """How arrays come in and go out.

    peeks: functions by type of array, (array, what) -> (form, address, array), as host.arrays.peek; peek: of other types.
    result: (Loan, Field) -> what a caller gets of lent memory. told: the same of a NumPy array of the host.
    """

    peeks: dict = PEEKS
    peek: Callable = peek
    result: Callable = Loan._numpy if device.SIM else DeviceArray
    told: Callable = np.asarray


PLAIN = Interface()


def get_hidden_bytes(x) -> int:
    """Bytes that a buffer must have for one row of x [T, H]: H * max(itemsize, 2); combine travels in bfloat16.

    x: of one rank, or a list over ranks.
    """
    if isinstance(x, (list, tuple)):
        x = x[0]
    if isinstance(x, (list, tuple)):  # a pair of values and scales
        x = x[0]
    a = view(x, "x")
    if len(a.shape) != 2:
        raise EPValueError(f"x has shape {a.shape}, a matrix [tokens, hidden] is needed")
    return a.shape[1] * max(a.dtype.itemsize, 2)


def whole(name, value, least):
    """An int of at least `least`; 0-d integer arrays and tensors count as numbers."""
    if type(value) is int and value >= least:
        return value
    try:
        number = operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise EPValueError(f"{name}={value!r} must be a whole number, at least {least}")
    return number


def granted(name, num_sms):
    """How many SMs the caller grants, at least 1; None: all."""
    return (
        num_sms
        if num_sms is None or type(num_sms) is int and num_sms > 0
        else whole(name, num_sms, 1)
    )


def plain(name, value):
    """A number as an int, which a tensor of one element may be given for and may change afterwards; None stays None."""
    return value if value is None or type(value) is int else whole(name, value, 0)


def absent(argument):
    """Whether an optional argument was left out: None, or None on every rank."""
    return (
        argument is None or isinstance(argument, (list, tuple)) and all(a is None for a in argument)
    )


def without_rows(forms, num_rows):
    """Forms of all ranks' matrices without their numbers of rows; () of one that has not num_rows of its rank."""
    n_arrays = len(forms) // len(num_rows)
    return tuple(
        [
            (f[0][1:], *f[1:]) if f[0][:1] == (num_rows[i // n_arrays],) else ()
            for i, f in enumerate(forms)
        ]
    )


def values_and_scales(buffer, name, given):
    """Hidden states as they are given: (x,), or of pairs (e4m3 values, float32 scales) on every rank both."""
    of_all = given if buffer.world_has_lists else [given]
    if not isinstance(of_all, (list, tuple)) or not any(
        isinstance(a, (list, tuple)) for a in of_all
    ):
        return (given,)
    if not all(isinstance(a, (list, tuple)) and len(a) == 2 for a in of_all):
        raise EPValueError(
            f"{name} is a pair (e4m3 values, float32 scales) on every rank, or on none"
        )
    return tuple(map(list, zip(*of_all))) if buffer.world_has_lists else tuple(given)


def array(buffer, name, r, given):
    """One rank's array, where kernels can read it."""
    return inputs._array(buffer.machine, given, f"{name} of rank {r.rank}")


def matrices(
    buffer, name, given, *, dtypes=None, n_rows=None, n_columns=None, because="", vectors=False
):
    """One matrix a rank of this process, all of the same width and dtype: a list of Array.

    n_rows: rows of each rank. because: why so many columns, for the message. vectors: rows must be whole vectors of 16
    bytes.
    """
    seen = [
        array(buffer, name, r, a)
        for r, a in zip(buffer.ranks, inputs.ranks_of(buffer.world, name, given))
    ]
    for i, (r, a) in enumerate(zip(buffer.ranks, seen)):
        what = f"{name} of rank {r.rank}"
        if len(a.shape) != 2:
            raise EPValueError(f"{what} has shape {a.shape}, a matrix is needed")
        if dtypes is not None and a.dtype not in dtypes:
            needed = " or ".join(map(str, dtypes))
            raise EPValueError(f"{what} has dtype {a.dtype}, {needed} is needed: convert it")
        if a.dtype.kind == "O":
            raise EPValueError(f"{what} has dtype object: rows of plain bytes are needed")
        if n_rows is not None and a.shape[0] != n_rows[i]:
            raise EPValueError(f"{what} has {a.shape[0]} rows, {n_rows[i]} are needed")
        if n_columns is not None and a.shape[1] != n_columns:
            raise EPValueError(f"{what} has {a.shape[1]} columns, {n_columns} are needed{because}")
        if a.shape[1] != seen[0].shape[1] or a.dtype != seen[0].dtype:
            raise EPValueError(
                f"{what} is {a.dtype} with {a.shape[1]} columns, on another rank {seen[0].dtype} with "
                f"{seen[0].shape[1]}: all ranks must agree"
            )
        if vectors and (a.shape[1] == 0 or a.shape[1] * a.dtype.itemsize % VECTOR_BYTES):
            raise EPValueError(
                f"{what}: a row of {a.shape[1]} x {a.dtype} has {a.shape[1] * a.dtype.itemsize} bytes, "
                f"which must be a positive multiple of {VECTOR_BYTES}"
            )
    return seen


def hidden_rows(buffer, name, given, *, dtypes=None, n_rows=None):
    """Hidden states: one matrix a rank, rows of whole 16-byte vectors."""
    return matrices(buffer, name, given, dtypes=dtypes, n_rows=n_rows, vectors=True)


def vectors(buffer, name, given, num_rows):
    """Nothing, if each rank gave float32 [rows]."""
    of_ranks = inputs.ranks_of(buffer.world, name, given)
    for r, one, rows in zip(buffer.ranks, of_ranks, num_rows):
        p = array(buffer, name, r, one)
        if p.dtype != FP32 or p.shape != (rows,):
            raise EPValueError(
                f"{name} of rank {r.rank} is {p.dtype} {p.shape}, float32 ({rows},) is needed"
            )


def tokens(buffer, name, values, scales=None):
    """Hidden states as one matrix a rank, and the float32 scales of e4m3 values, if there are any."""
    if scales is None:
        return hidden_rows(buffer, name, values), None
    x = hidden_rows(buffer, name, values, dtypes=(E4M3,))
    hidden = x[0].shape[1]
    if hidden % FP8_GROUP:
        raise EPValueError(
            f"{name} has {hidden} columns, blockwise FP8 needs a multiple of {FP8_GROUP}"
        )
    return x, matrices(
        buffer,
        f"scales of {name}",
        scales,
        dtypes=(FP32,),
        n_rows=[a.shape[0] for a in x],
        n_columns=hidden // FP8_GROUP,
    )


def experts_per_rank(num_experts, n_ranks):
    """L, the number of experts a rank has."""
    num_experts = whole("num_experts", num_experts, 1)
    _at_most("num_experts", num_experts, MAX_EXPERTS)
    if num_experts % n_ranks:
        raise EPValueError(
            f"num_experts={num_experts} must be a multiple of n_ranks={n_ranks}: each rank has as many "
            "experts as every other"
        )
    return num_experts // n_ranks


def local_experts(value, n_ranks):
    """num_local_experts, of each rank."""
    local = whole("num_local_experts", value, 1)
    _at_most(f"num_local_experts={local} times n_ranks, num_experts", local * n_ranks, MAX_EXPERTS)
    return local


def rows(name, value, least=0):
    """A number of rows, which kernels count in int32."""
    number = whole(name, value, least)
    _at_most(name, number, MAX_INT32)
    return number


def padding(pad_multiple, local):
    """pad_multiple, which an expert's rows are rounded up to; None and 0: 1."""
    pad = whole("pad_multiple", pad_multiple or 0, 0) or 1
    # kernels count the padded rows of all experts of a rank in int32
    what = f"num_local_experts={local} times pad_multiple={pad}, rows of padding"
    _at_most(what, local * pad, MAX_INT32 // 2)
    return pad


def _at_most(name, number, most):
    if number > most:
        raise EPValueError(f"{name}={number} must be at most {most}")


def ranks_that_fit(n_ranks):
    """Nothing, if the kernels can serve so many ranks."""
    if n_ranks > MAX_RANKS:
        raise EPValueError(
            f"n_ranks={n_ranks}: the rows kernels serve at most {MAX_RANKS}, one a lane of a warp"
        )


def expert_indices(buffer, given, n_rows, num_experts):
    """token_indices: one integer matrix [T, K] a rank, distinct ids of [0, num_experts) in a token, -1 for none."""
    seen = matrices(buffer, "token_indices", given, n_rows=n_rows)
    top_k = seen[0].shape[1]
    for r, a in zip(buffer.ranks, seen):
        if a.dtype.kind not in "iu":
            raise EPValueError(
                f"token_indices of rank {r.rank} has dtype {a.dtype}, an integer type is needed: "
                "token_indices.astype(np.int64)"
            )
    if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
        raise EPValueError(
            f"token_indices has {top_k} ids a token, 1 to {min(num_experts, MAX_TOP_K)} are needed"
        )
    return seen


def distinct_ids(buffer, ids, num_experts):
    """Nothing, if the ids of arrays in host memory are of [-1, num_experts), and distinct in a token."""
    for r, a in zip(buffer.ranks, ids):
        if a.host is not None:
            inputs.check_ids(f"token_indices of rank {r.rank}", a.host, "num_experts", num_experts)


def scheduling(async_finish, allocate_on_comm_stream):
    """Nothing, if the flags go together. Both say when work runs, never what it computes."""
    if allocate_on_comm_stream and not async_finish:
        raise EPValueError(
            "allocate_on_comm_stream=True needs async_finish=True: else there is no such stream"
        )


def same_num_rows(buffer, given, num_rows):
    """Nothing, if num_permuted_tokens (None, one number, or one a rank) is what the handle has."""
    if given is None:
        return
    numbers = given if isinstance(given, (list, tuple)) else [given] * len(num_rows)
    for r, number, rows in zip(buffer.ranks, numbers, num_rows):
        if whole("num_permuted_tokens", number, 0) != rows:
            raise EPValueError(
                f"num_permuted_tokens={number} for rank {r.rank}, whose handle has {rows} rows: leave "
                "it out, or give what the dispatch returned"
            )


def handle_of(kind, maker, handle):
    """The handle, if the matching dispatch made it."""
    if not isinstance(handle, kind):
        raise EPValueError(
            f"handle is a {type(handle).__name__}; the handle that {maker}.forward returned is needed"
        )
    return handle
